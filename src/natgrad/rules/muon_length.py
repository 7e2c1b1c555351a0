"""How long Muon's steps are."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from natgrad.math import foreach
from natgrad.requiring import require_choice
from natgrad.rules.lengths import Length, Sight, stacked, vector

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
        numbers = [self._factor(u) for u in chosen]
        if not self.normalise:
            scaled = foreach.scaled_each(chosen, numbers)
            return updates | dict(zip(names, scaled, strict=True))
        sizes = stacked(foreach.norms(chosen), sight.like)
        wanted = [
            math.sqrt(len(u) * min(u.shape[1:])) * x
            for u, x in zip(chosen, numbers, strict=True)
        ]
        lengths = vector(tuple(wanted), sizes.dtype, sizes.device)
        factors = torch.where(sizes > 0, lengths / sizes, 0.0)
        factors = [f.to(u) for f, u in zip(factors.unbind(), chosen, strict=True)]
        scaled = foreach.multiplied(chosen, factors)
        return updates | dict(zip(names, scaled, strict=True))

    def _factor(self, update: Tensor) -> float:
        rows, cols = update.shape[1:]
        if self.adjust == "original":
            return math.sqrt(max(1.0, rows / cols))
        return 0.2 * math.sqrt(max(rows, cols))
