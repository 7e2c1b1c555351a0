"""How long a step is: free, clipped by its KL divergence, or tied to the weight.

Note [A length that does not feed on itself]
A step that is a part of the weight's norm *now* lengthens what it is measured by:
without a normalisation layer, or at a constant learning rate, norms grow geometrically.
So a step is a part of the norm at the *start*, which every rank notes in its first
step. And a rule that gives all gradients one length cannot stop: where gradients have
become small, because all examples are learnt, it goes on at full length. So the ranks
that work on a layer also keep the usual size of its gradients, over a long memory, and
steps shorten where the direction is small beside it (`natgrad.math.rules.fading`).
"""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from natgrad.math import foreach
from natgrad.math.precondition import kl_scale
from natgrad.math.rules import LEAST_ROW, fading, moving_part, trust_ratio
from natgrad.math.shards import local
from natgrad.requiring import require_choice, require_number

if TYPE_CHECKING:
    from natgrad.layers import Block

RUNAWAY = 100.0
"""A weight of more than so many times its norm at the start is said to run away."""
LOOK_EVERY = 100


@dataclass(kw_only=True)
class Reference:
    """Of one layer.

    Attributes:
        start: the norm of weight and bias together when training began, on every rank;
            of a weight that began at zero, `usual_norm`.
        usual: the root of the mean squared norm of its gradients, on its workers.
        steps: how many gradients that is made of.
    """

    start: Tensor
    usual: Tensor | None = None
    steps: int = 0


class References:
    """That of each matrix. See Note [A length that does not feed on itself]."""

    def __init__(self) -> None:
        self.states: dict[str, Reference] = {}
        self.total: Callable[[Tensor], Tensor] | None = None
        self._warned = False
        self.last_grown: dict[str, float] = {}

    def whole(self, norms: Tensor) -> Tensor:
        """Norms of whole weights, from those of what each rank has of them.

        ``total`` sums over ranks if weights are cut; all ranks then ask for the same.
        """
        if self.total is None:
            return norms
        return self.total(norms.double().square()).sqrt().to(norms)

    def weight_norms(self, blocks: "Sequence[Block]", like: Tensor) -> Tensor:
        """Of each block's weight and bias together, whoever works on the block."""
        return self.whole(weight_norms(blocks, like))

    def begin(self, blocks: "Sequence[Block]", like: Tensor) -> None:
        """Note the norms of weights that are not known yet, in the first step all."""
        new = [b for b in blocks if b.name not in self.states and has_reference(b)]
        if new:
            usual = like.new_tensor([usual_norm(b) for b in new])
            norms = self.weight_norms(new, like)
            some = self.whole(stacked(norms_here(new, 0), like)) > 0
            starts = torch.where(some, norms, usual)
            for block, start in zip(new, starts.unbind(), strict=True):
                self.states[block.name] = Reference(start=start)

    def usual(self, names: Sequence[str], sizes: Tensor, memory: float) -> Tensor:
        """Add the norms of this step's gradients; returns the usual ones.

        All gradients count equally until there are more than the memory holds.
        """
        states = [self.states[name] for name in names]
        kept = [min(memory, s.steps / (s.steps + 1)) for s in states]
        zero = sizes.new_zeros(())
        old = stacked([zero if s.usual is None else s.usual for s in states], sizes)
        if len(set(kept)) == 1:  # a number need not be copied to a device
            weights = math.sqrt(kept[0]), math.sqrt(1 - kept[0])
        else:
            found = sizes.new_tensor([kept, [1 - x for x in kept]]).sqrt()
            weights = found[0], found[1]
        new = torch.hypot(weights[0] * old, weights[1] * sizes)  # a square may be lost
        for s, x in zip(states, new.unbind(), strict=True):
            s.usual, s.steps = x, s.steps + 1
        return new

    def grown(self, blocks: "Sequence[Block]", like: Tensor) -> dict[str, float]:
        """By name, how many times its norm at the start a weight that runs away has."""
        known = [b for b in blocks if b.name in self.states]
        if not known:
            return {}
        starts = stacked([self.states[b.name].start for b in known], like)
        least = like.new_tensor([LEAST_ROW * rows_of(b) ** 0.5 for b in known])
        found = self.weight_norms(known, like) / torch.maximum(starts, least)
        numbers: list[float] = found.tolist()
        ratios = dict(zip([b.name for b in known], numbers, strict=True))
        return {name: x for name, x in ratios.items() if not x <= RUNAWAY}

    def watch(
        self, step: int, blocks: "Sequence[Block]", like: Tensor, *, warn: bool
    ) -> None:
        """Warn once, when a weight runs away; looks every 100 steps."""
        if (self._warned and self.total is None) or (step + 1) % LOOK_EVERY:
            return
        grown = self.last_grown = self.grown(blocks, like)
        warn = warn and not self._warned
        self._warned |= bool(grown)
        if grown and warn:
            worst = max(grown, key=lambda name: grown[name])
            warnings.warn(
                f"The weight of {worst} has {grown[worst]:.3g} times the norm that it "
                f"began with, after step {step}; {len(grown)} layer(s) have more than "
                f"{RUNAWAY:.0f} times theirs. Training may diverge: lower the learning "
                "rate, let it fall to zero, or add weight decay. health() names them.",
                stacklevel=5,
            )

    def save(self) -> dict[str, Any]:
        """Tensors and numbers by block name."""
        return {
            name: {"start": s.start, "usual": s.usual, "steps": s.steps}
            for name, s in self.states.items()
        }

    def load(
        self, saved: Mapping[str, Any], blocks: "Iterable[Block]", like: Tensor
    ) -> None:
        """Take over what `save` returned; a layer that it does not know begins now."""
        ours = {b.name for b in blocks}
        self.states = {
            name: Reference(
                start=entry["start"].to(like, copy=True),
                usual=None if usual is None else usual.to(like, copy=True),
                steps=int(entry["steps"]),
            )
            for name, entry in saved.items()
            if name in ours
            for usual in [entry["usual"]]
        }


def has_reference(block: "Block") -> bool:
    """Whether updates of a block get a length, and are ours to give."""
    return rows_of(block) > 0 and not block.is_foreign


def usual_norm(block: "Block") -> float:
    """Of a weight that begins at zero: as torch has it, rows of 1 / sqrt(3)."""
    return 0.0 if block.is_table else math.sqrt(rows_of(block) / 3)


def rows_of(block: "Block") -> int:
    """How many outputs a weight has whose updates get a length; 0 for another."""
    if block.is_factored:
        return block.spec.stack * block.spec.rows
    dims = [size for size in block.parameters[0].shape if size > 1]
    is_matrix = block.kind is None and len(dims) > 1
    return dims[0] if is_matrix and (block.is_asked or block.rule.adapts) else 0


@torch.no_grad()
def norms_here(blocks: "Sequence[Block]", number: int) -> list[Tensor]:
    """Of what this rank has of each block's first or second parameter.

    Their squares add up over ranks: what several have counts by its part.
    """
    mine = [local(b.parameters[number]) for b in blocks]
    copies = [b.spec.cuts[number].copies if b.spec.cuts else 1 for b in blocks]
    norms = zip(foreach.norms(mine) if mine else (), copies, strict=True)
    return [x if n == 1 else x / math.sqrt(n) for x, n in norms]


def weight_norms(blocks: "Sequence[Block]", like: Tensor) -> Tensor:
    """Of what this rank has of each block's weight and bias together."""
    weights = stacked(norms_here(blocks, 0), like)
    if all(len(b.parameters) == 1 for b in blocks):
        return weights
    found = iter(norms_here([b for b in blocks if len(b.parameters) > 1], 1))
    zero = like.new_zeros(())
    bias = [next(found) if len(b.parameters) > 1 else zero for b in blocks]
    return torch.hypot(weights, stacked(bias, like))


def stacked(numbers: Sequence[Tensor], like: Tensor) -> Tensor:
    """Scalars as one vector."""
    return torch.stack([x if x.dtype == like.dtype else x.to(like) for x in numbers])


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

    blocks: "Mapping[str, Block]"
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
            torch.dot(updates[name].flatten(), sight.directions[name].flatten())
            if name in sight.first
            else zero
            for name in layers
        ]
        growths = [growth.get(name, zero) for name in layers]
        sizes, grown = sight.total(stacked([*products, *growths], sight.like)).chunk(2)
        total = (sizes.abs() * grown.exp()).sum()
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
            counts all of them equally until there are more than it holds. None: every
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
        counts = vector(tuple(rows[n] for n in names), sizes.dtype, sizes.device)
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
        same = all(u is g for u, g in zip(updates, gradients, strict=True))  # LARS
        sizes = foreach.norms(updates)
        found = [sizes, sizes if same else foreach.peaks(gradients)]
        if self.memory is not None:
            directions = [sight.directions[name] for name in names]
            found += [foreach.norms(gradients), foreach.norms(directions)]
        rows = stacked([x for numbers in found for x in numbers], sight.like)
        rows = sight.whole(names, rows.view(len(found), -1)).unbind()
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
                norms[i] = moving if now else norms[i] * shares[i].sqrt()
        return stacked(norms, like), stacked(shares, like)

    def _fading(
        self, sizes: Tensor, lengths: Tensor, names: Sequence[str], sight: Sight
    ) -> Tensor:
        assert self.memory is not None
        usual = sight.references.usual(names, sizes, self.memory)
        noise = tuple(sight.noise.get(name, 1.0) for name in names)
        return fading(lengths, usual, vector(noise, usual.dtype, usual.device))


@lru_cache(maxsize=64)
def vector(
    values: tuple[float, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Kept: to copy numbers to a GPU is to wait for it."""
    return torch.tensor(values, dtype=dtype, device=device)
