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
from natgrad.math.rules import moving_part, trust_ratio
from natgrad.requiring import require_choice, require_number


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
    """

    blocks: Mapping[str, Block]
    directions: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    like: Tensor
    lr: float
    first: frozenset[str]
    total: Callable[[Tensor], Tensor]


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

    Pauloski et al., eq. 18. For natural gradients only.

    Attributes:
        kappa: the bound, > 0.
        lr: the learning rate, for a `KFAC` that has no optimizer to read it from.
    """

    kappa: float = 1e-3
    lr: float | None = None

    def __post_init__(self) -> None:
        require_number("kappa", self.kappa, "a number > 0", above=0.0)
        if self.lr is not None:
            require_number("lr", self.lr, "a number > 0, or None", above=0.0)

    def clip(self, updates: Mapping[str, Tensor], sight: Sight) -> Tensor | None:
        """nu of eq. 18."""
        products = [
            torch.dot(updates[name].flatten(), sight.directions[name].flatten()).abs()
            for name in updates
            if sight.blocks[name].kind is not None and name in sight.first
        ]
        total = sight.total(sum(products, start=sight.like.new_zeros(1)))[0]
        return kl_scale(total, self.kappa, sight.lr if self.lr is None else self.lr)


@dataclass(frozen=True, kw_only=True)
class LayerTrust(Length):
    """Each layer's update gets the norm of its weight and bias (LARS).

    A learning rate of 0.01 then changes every layer by 1%; of an embedding, the rows
    that were read. So too the updates of matrices without a layer that follow Adam's
    rule; norms and vectors keep theirs. A layer whose gradients of this step are zero
    stays where it is: the ratio would make up for it that its average fades.
    """

    def scaled(self, updates: dict[str, Tensor], sight: Sight) -> dict[str, Tensor]:
        """``u |w| / |u|``."""
        rows = {name: _rows(sight.blocks[name]) for name in updates}
        names = [name for name in updates if rows[name]]
        if not names:
            return updates
        like, gradients = sight.like, sight.gradients
        sizes = _stacked(foreach.norms([updates[name] for name in names]), like)
        peaks = _stacked(foreach.peaks([gradients[name] for name in names]), like)
        counts = _vector(tuple(rows[n] for n in names), sizes.dtype, sizes.device)
        blocks = [sight.blocks[name] for name in names]
        norms, shares = _weight_norms(blocks, updates, like)
        ratios = trust_ratio(norms, sizes, counts * shares)
        ratios = torch.where(peaks > 0, ratios, 0.0)
        chosen = [updates[name] for name in names]
        factors = [r.to(u) for r, u in zip(ratios.unbind(), chosen, strict=True)]
        scaled = foreach.multiplied(chosen, factors)
        return updates | dict(zip(names, scaled, strict=True))


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


def _rows(block: Block) -> int:
    """How many outputs the weight has; 0: its update keeps its length."""
    if block.is_factored:
        return block.spec.stack * block.spec.rows
    dims = [size for size in block.parameters[0].shape if size > 1]
    is_matrix = block.kind is None and len(dims) > 1
    return dims[0] if is_matrix and block.rule.adapts else 0


def _stacked(numbers: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.stack([x.to(like) for x in numbers])


@lru_cache(maxsize=64)
def _vector(
    values: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Kept: to copy numbers to a GPU is to wait for it."""
    return torch.tensor(values, dtype=dtype, device=device)


def _weight_norms(
    blocks: Sequence[Block], updates: Mapping[str, Tensor], like: Tensor
) -> tuple[Tensor, Tensor]:
    """Of each block's weight and bias together, and which share of it moves.

    Each rank has the whole weight, whoever else works on the block.
    """
    weights = foreach.norms([b.parameters[0].detach() for b in blocks])
    biases = [b.parameters[-1].detach() for b in blocks if len(b.parameters) > 1]
    found = iter(foreach.norms(biases) if biases else [])
    one, zero = like.new_ones(()), like.new_zeros(())
    bias = [next(found) if len(b.parameters) > 1 else zero for b in blocks]
    shares = [one] * len(blocks)
    for i, b in enumerate(blocks):
        if b.is_table:
            weight = b.fold([b.parameters[0].detach()])
            weights[i], shares[i] = moving_part(weight, updates[b.name])
    norms = torch.hypot(_stacked(weights, like), _stacked(bias, like))
    return norms, _stacked(shares, like)
