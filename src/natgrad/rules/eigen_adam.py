"""Adam in the eigenbases of the factors."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from natgrad.math.polar import polar
from natgrad.math.rules import adaptive_scale, into_basis, out_of_basis
from natgrad.requiring import require_number
from natgrad.rules.rule import Basis, Form, Matrices, MovedMoments, Rule, Sides, Source
from natgrad.rules.rule import require_choices as require


@dataclass(frozen=True, kw_only=True)
class EigenAdam(Rule):
    """In the factors' eigenbases, divided by the root of the running second moment.

    In the bases of K-FAC's factors, or with ``source="gradients"`` in those of
    Shampoo's, which is SOAP (Vyas et al. 2024). The damping is relative to the root of
    the mean second moment.

    Attributes:
        sides, source: as for `Kronecker`.
        beta2: decay of the second moment, in [0, 1).
        basis: as for `Kronecker`.
        moments: what becomes of the second moment when a refresh replaces the bases:
            ``"move"`` it into the new ones, ``"keep"`` its numbers as they are, as
            SOAP does, or ``"restart"`` it.
        orthogonal: take the polar factor of the result (SOAP-Muon).
    """

    name: ClassVar[str] = "eigen_adam"
    adapts: ClassVar[bool] = True

    sides: Sides = "both"
    beta2: float = 0.95
    basis: Basis = "exact"
    moments: MovedMoments = "move"
    source: Source = "activations"
    orthogonal: bool = False

    def __post_init__(self) -> None:
        require(self, sides=Sides, basis=Basis, moments=MovedMoments, source=Source)
        require_number("beta2", self.beta2, "in [0, 1)", low=0.0, below=1.0)

    @property
    def form(self) -> Form:
        """Always eigenbases."""
        return "eigen"

    def apply(self, x: Matrices) -> Tensor:
        """``Q_left (Q_left^T V Q_right / (sqrt(S) + damping rms)) Q_right^T``."""
        rotated = into_basis(x.gradient, *x.bases)
        square = x.moment(rotated, self.beta2)
        if x.direction is not x.gradient:
            rotated = into_basis(x.direction, *x.bases)
        scaled = adaptive_scale(rotated, square, x.damping)
        # The polar factor of a rotated matrix is the rotated polar factor.
        scaled = polar(scaled) if self.orthogonal else scaled
        return out_of_basis(scaled, *x.bases)
