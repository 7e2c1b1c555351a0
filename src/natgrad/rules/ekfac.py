"""EKFAC: K-FAC's eigenbases with the exact diagonal in them."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from natgrad.math.parts import kronecker_values
from natgrad.math.rules import corrected_scale, into_basis, out_of_basis
from natgrad.rules.rule import Basis, Form, Matrices, MovedMoments, Rule, Style
from natgrad.rules.rule import require_choices as require


@dataclass(frozen=True, kw_only=True)
class EKFAC(Rule):
    """In the eigenbases of A and G, divided by the second moment of gradients there.

    George et al. 2018. The second moment S is of each example's own gradient.

    Attributes:
        style: ``"eigen"`` adds lambda to S, ``"relative"`` lambda times the mean of S.
        basis: as for `Kronecker`.
        moments: what becomes of S when a refresh replaces the bases: ``"move"`` it into
            the new ones, or ``"restart"`` it; until there is a new S the scale is
            K-FAC's own.
    """

    name: ClassVar[str] = "ekfac"
    natural: ClassVar[bool] = True
    corrects: ClassVar[bool] = True

    style: Style = "eigen"
    basis: Basis = "exact"
    moments: MovedMoments = "move"

    def __post_init__(self) -> None:
        require(self, style=Style, basis=Basis, moments=MovedMoments)
        if self.style not in ("eigen", "relative"):
            raise ValueError(
                f"Invalid style={self.style!r} of EKFAC. The second moment is of the "
                "whole matrix, so must be 'eigen' or 'relative'."
            )

    @property
    def form(self) -> Form:
        """Always eigenbases."""
        return "eigen"

    def apply(self, x: Matrices) -> Tensor:
        """``Q_left (Q_left^T V Q_right / (S + damping)) Q_right^T``."""
        if not x.known or x.right is None or x.left is None:
            return x.direction
        if x.curvature is None:
            curvature = kronecker_values(x.right[1], x.left[1], x.direction)
        else:
            curvature = x.curvature.reshape(x.direction.shape)
        rotated = into_basis(x.direction, *x.bases)
        scaled = corrected_scale(rotated, curvature, self._damping(x, curvature))
        return out_of_basis(scaled, *x.bases)

    def _damping(self, x: Matrices, curvature: Tensor) -> float | Tensor:
        if self.style == "eigen":
            return x.damping
        means = curvature.reshape(x.count, 1, -1).mean(2, keepdim=True)
        each = means.expand(-1, len(curvature) // x.count, 1)
        return x.damping * each.reshape(-1, 1, 1)
