"""How long a step is: free, clipped by its KL divergence, or tied to the weight."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

import torch
from torch import Tensor

from natgrad.layers import Block
from natgrad.math import foreach
from natgrad.math.precondition import kl_scale
from natgrad.math.rules import fading, moving_part, trust_ratio
from natgrad.requiring import require_choice, require_number
from natgrad.rules.references import References, rows_of, stacked


@dataclass(frozen=True, kw_only=True)
class Sight:
    """What a length sees of a step: tensors ``(s, m, n)`` by name, on this rank.

    Attributes:
        blocks: those that this rank works on.
        directions: what the rules were given.
        gradients: this step's.
        like: an empty tensor of the statistics' dtype and device.
        lr: the largest learning rate.
        first: names of the blocks of which this rank is the first worker, so that a sum
            over ranks counts each once.
        total: a sum over all ranks, collective.
        noise: what is left in a direction of gradients that are only noise, by name.
        growth: of updates, the logarithm of how much more curvature there is along them
            than the inverses knew, by name; of factors that this rank owns.
        references: what lengths are measured by.
        whole: of norms ``(k, blocks)`` of what this rank has, those of whole tensors:
            ranks have pieces of some blocks of a sharded model. Collective, with the
            names of the blocks.
    """

    blocks: Mapping[str, Block]
    directions: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    like: Tensor
    lr: float
    first: frozenset[str]
    total: Callable[[Tensor], Tensor]
    noise: Mapping[str, float]
    growth: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
    references: References
    whole: Callable[[Sequence[str], Tensor], Tensor]


class Length:
    """How long an update is. A length is a frozen dataclass with its own options."""

    def scaled(self, updates: dict[str, Tensor], sight: Sight) -> dict[str, Tensor]:
        """Updates, each at its own length."""
        return updates

    def clip(self, updates: Mapping[str, Tensor], sight: Sight) -> Tensor | None:
        """A factor for the updates of all layers, the same on all ranks; None for 1."""
        return None


@dataclass(frozen=True, kw_only=True)
class Free(Length):
    """The length that the rule gives."""


@dataclass(frozen=True, kw_only=True)
class KLClip(Length):
    """All updates are scaled down so that their KL divergence is at most ``kappa``.

    Pauloski et al., eq. 18, where the product of update u and gradient stands for
    ``u^T F u``. With inverses of an earlier F that is too small where the curvature
    along u has grown since, so it is multiplied by the growth. The bound is of the
    preconditioned gradient: what momentum adds to it later is not counted, and can be
    a hundredfold with a momentum of 0.9. For natural gradients only.

    Attributes:
        kappa: the bound, > 0. Pauloski et al. have 1e-3.
        lr: the learning rate, for a `KFAC` that has no optimizer to read it from.
    """

    kappa: float = 1e-4
    lr: float | None = None

    def __post_init__(self) -> None:
        require_number("kappa", self.kappa, "a number > 0", above=0.0)
        if self.lr is not None:
            require_number("lr", self.lr, "a number > 0, or None", above=0.0)

    def clip(self, updates: Mapping[str, Tensor], sight: Sight) -> Tensor | None:
        """nu of eq. 18."""
        zero, growth = sight.like.new_zeros(()), sight.growth(updates)
        layers = [n for n, block in sight.blocks.items() if block.kind is not None]
        products = [
            torch.dot(updates[name].flatten(), sight.directions[name].flatten()).abs()
            if name in sight.first
            else zero
            for name in layers
        ]
        growths = [growth.get(name, zero) for name in layers]
        known = sight.total(stacked([*products, *growths], sight.like))
        total = (known[: len(layers)] * known[len(layers) :].exp()).sum()
        return kl_scale(total, self.kappa, sight.lr if self.lr is None else self.lr)


ReferenceNorm = Literal["start", "now"]


@dataclass(frozen=True, kw_only=True)
class LayerTrust(Length):
    """Each layer's update gets the norm that its weight and bias began with.

    A learning rate of 0.01 then moves every layer by 1% of that norm; of an embedding,
    the rows that were read. So too the updates of matrices without a layer that follow
    Adam's rule; norms and vectors keep theirs. A layer whose gradients of this step are
    zero stays where it is: the ratio would make up for it that its average fades.

    Attributes:
        reference: the norm of the weight at the ``"start"`` of training, or ``"now"``,
            as LARS has it. Steps that are a part of the norm now make it grow
            geometrically, unless the learning rate falls to zero soon enough.
        memory: steps shorten where gradients are small beside what they usually are:
            this is the decay of the running mean of their squared norms, in [0, 1). It
            counts all of them alike until there are more than it holds. None: every
            step has its whole length.
    """

    reference: ReferenceNorm = "start"
    memory: float | None = 0.999

    def __post_init__(self) -> None:
        require_choice("reference", self.reference, get_args(ReferenceNorm))
        if self.memory is not None:
            legal = "in [0, 1), or None"
            require_number("memory", self.memory, legal, low=0.0, below=1.0)

    def scaled(self, updates: dict[str, Tensor], sight: Sight) -> dict[str, Tensor]:
        """``u |w| / |u|``, times what is left of the length where gradients vanish."""
        rows = {name: rows_of(sight.blocks[name]) for name in updates}
        names = [name for name in updates if rows[name]]
        if not names:
            return updates
        chosen = [updates[name] for name in names]
        gradients = [sight.gradients[name] for name in names]
        sizes, peaks, strengths, lengths = self._seen(chosen, gradients, names, sight)
        counts = _vector(tuple(rows[n] for n in names), sizes.dtype, sizes.device)
        norms, shares = self._norms(chosen, names, sight)
        ratios = trust_ratio(norms, sizes, counts * shares)
        if self.memory is not None:
            ratios = ratios * self._fading(strengths, lengths, names, sight)
        ratios = torch.where(peaks > 0, ratios, 0.0)
        factors = [r.to(u) for r, u in zip(ratios.unbind(), chosen, strict=True)]
        scaled = foreach.multiplied(chosen, factors)
        return updates | dict(zip(names, scaled, strict=True))

    def _seen(
        self,
        updates: Sequence[Tensor],
        gradients: Sequence[Tensor],
        names: Sequence[str],
        sight: Sight,
    ) -> Sequence[Tensor]:
        """Norms of updates, peaks and norms of gradients, norms of directions."""
        found = [foreach.norms(updates), foreach.peaks(gradients)]
        if self.memory is not None:
            directions = [sight.directions[name] for name in names]
            found += [foreach.norms(gradients), foreach.norms(directions)]
        rows = torch.stack([stacked(numbers, sight.like) for numbers in found])
        rows = sight.whole(names, rows).unbind()
        return (*rows, *rows)[:4]

    def _norms(
        self, updates: Sequence[Tensor], names: Sequence[str], sight: Sight
    ) -> tuple[Tensor, Tensor]:
        """What the norms of updates are to be, and which share of each weight moves."""
        blocks, like = [sight.blocks[name] for name in names], sight.like
        shares = [like.new_ones(())] * len(blocks)
        if self.reference == "now":
            norms = list(sight.references.weight_norms(blocks, like).unbind())
        else:
            norms = [sight.references.states[name].start for name in names]
        for i, (b, update) in enumerate(zip(blocks, updates, strict=True)):
            if b.is_table:
                # the share is the update's alone; of a weight ranks may have pieces
                now = self.reference == "now"
                weight = b.fold([b.parameters[0].detach()]) if now else update
                moving, shares[i] = moving_part(weight, update)
                # of rows that were not looked at when training began, the usual norm
                past = norms[i] * shares[i].sqrt()
                norms[i] = moving if now else past
        return stacked(norms, like), stacked(shares, like)

    def _fading(
        self, sizes: Tensor, lengths: Tensor, names: Sequence[str], sight: Sight
    ) -> Tensor:
        assert self.memory is not None
        usual = sight.references.usual(names, sizes, self.memory)
        noise = tuple(sight.noise.get(name, 1.0) for name in names)
        return fading(lengths, usual, _vector(noise, usual.dtype, usual.device))


Adjust = Literal["original", "match_rms_adamw"]


@dataclass(frozen=True, kw_only=True)
class MuonLength(Length):
    """A length by the shape of the matrix, as Muon has it, whatever the weight's norm.

    Attributes:
        adjust: as in `torch.optim.Muon`: ``"original"`` multiplies an update
            ``(m, n)`` by ``sqrt(max(1, m / n))``, ``"match_rms_adamw"`` by
            ``0.2 sqrt(max(m, n))``, so that AdamW's learning rates fit.
        normalise: first give the update the norm ``sqrt(min(m, n))`` of an orthogonal
            matrix, so that any rule has Muon's length.
    """

    adjust: Adjust = "original"
    normalise: bool = True

    def __post_init__(self) -> None:
        require_choice("adjust", self.adjust, get_args(Adjust))

    def scaled(self, updates: dict[str, Tensor], sight: Sight) -> dict[str, Tensor]:
        """``u sqrt(s min(m, n)) / |u|`` times the factor of the shape."""
        names = [name for name in updates if sight.blocks[name].is_factored]
        if not names:
            return updates
        chosen = [updates[name] for name in names]
        factors = [sight.like.new_tensor(self._factor(u)) for u in chosen]
        if self.normalise:
            sizes = foreach.norms(chosen)
            factors = [
                torch.where(size > 0, (math.sqrt(len(u) * min(u.shape[1:])) * f), 0.0)
                / torch.where(size > 0, size, 1.0)
                for u, f, size in zip(chosen, factors, sizes, strict=True)
            ]
        scaled = foreach.multiplied(chosen, factors)
        return updates | dict(zip(names, scaled, strict=True))

    def _factor(self, update: Tensor) -> float:
        rows, cols = update.shape[1:]
        if self.adjust == "original":
            return math.sqrt(max(1.0, rows / cols))
        return 0.2 * math.sqrt(max(rows, cols))


@lru_cache(maxsize=64)
def _vector(
    values: tuple[float, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Kept: to copy numbers to a GPU is to wait for it."""
    return torch.tensor(values, dtype=dtype, device=device)
