"""Adam in the eigenbases of the factors."""

from dataclasses import dataclass
from functools import partial
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
    Shampoo's. The damping is relative to the root of the mean second moment.

    SOAP (Vyas et al. 2024, Algorithm 3) is ``EigenAdam(source="gradients", late=True,
    basis="tracked", moments="keep")`` with ``Every(1, k)`` and `AverageGradients`. A
    step of it, in this order:

    1. The gradient and its running average (momentum) are *projected* into the bases
       that the steps before have left.
    2. The square of the projected gradient enters the *second moment*, whose root then
       divides the projected average, both without bias; the weight moves.
    3. ``G G^T`` and ``G^T G`` of the same gradient enter the factors. At every k-th
       step the *bases* follow by one step of orthogonal iteration and QR; the second
       moment keeps its numbers.

    The first step finds no bases: it makes them, by eigendecomposition, and does
    nothing else: neither momentum nor second moment nor weight changes.

    Attributes:
        sides, source: as for `Kronecker`.
        beta2: decay of the second moment, in [0, 1).
        basis: as for `Kronecker`.
        moments: what becomes of the second moment when a refresh replaces the bases:
            ``"move"`` it into the new ones, ``"keep"`` its numbers as they are, as
            SOAP does, or ``"restart"`` it.
        orthogonal: take the polar factor of the result (SOAP-Muon).
        late: a step uses the bases of the steps before it, and a matrix that has none
            yet does not move, as in SOAP. False: the gradient enters the factors first.
    """

    name: ClassVar[str] = "eigen_adam"
    adapts: ClassVar[bool] = True
    projects: ClassVar[bool] = True

    sides: Sides = "both"
    beta2: float = 0.95
    basis: Basis = "exact"
    moments: MovedMoments = "move"
    source: Source = "activations"
    orthogonal: bool = False
    late: bool = False

    def __post_init__(self) -> None:
        require(self, sides=Sides, basis=Basis, moments=MovedMoments, source=Source)
        require_number("beta2", self.beta2, "in [0, 1)", low=0.0, below=1.0)

    @property
    def descends(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """In any basis each entry is multiplied by a positive number."""
        return not self.orthogonal

    @property
    def form(self) -> Form:
        """Always eigenbases."""
        return "eigen"

    def apply(self, x: Matrices) -> Tensor:
        """``Q_left (Q_left^T V Q_right / (sqrt(S) + damping rms)) Q_right^T``."""
        rotated = into_basis(x.gradient, *x.bases)
        square = x.moment(rotated, self.beta2)
        if x.direction is not x.gradient:
            rotated = x.average(rotated, partial(into_basis, x.direction, *x.bases))
        scaled = adaptive_scale(rotated, square, x.damping)
        # The polar factor of a rotated matrix is the rotated polar factor.
        scaled = polar(scaled) if self.orthogonal else scaled
        return out_of_basis(scaled, *x.bases)
