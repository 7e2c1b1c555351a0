"""K-FAC: the inverse of a Kronecker product of two factors."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from natgrad.math.precondition import apply_eigen
from natgrad.math.rules import between
from natgrad.requiring import require_number
from natgrad.rules.rule import Basis, Form, Matrices, Rule, Sides, Source, Style
from natgrad.rules.rule import require_choices as require


@dataclass(frozen=True, kw_only=True)
class Kronecker(Rule):
    """K-FAC: ``(G + ..)^-1 V (A + ..)^-1``, the natural gradient of the papers.

    With ``source="gradients"`` and a ``power`` of 1/4 (or 1/2 on one side) it is
    Shampoo: ``(G G^T + ..)^-1/4 V (G^T G + ..)^-1/4``.

    Attributes:
        source: what the factors are estimated from: ``"activations"`` (A of the
            layer's inputs, G of the gradients at its outputs), or ``"gradients"``: the
            weight's own gradient, so that any matrix has them, whatever layer uses it.
        power: each damped factor is raised to minus this power, > 0.
        sides: ``"both"`` factors, only the ``"inputs"`` (A) or only the ``"outputs"``
            (G). What is left out is not estimated, sent or inverted.
        style: how the damping lambda enters. ``"eigen"`` adds lambda to the eigenvalues
            of the Kronecker product (Pauloski et al., eq. 13-15); ``"factored"`` splits
            it between the two factors (pi-split; SP-NGD, eq. 12) and inverts by
            Cholesky, which is cheaper; ``"relative"`` adds lambda times its mean
            eigenvalue to each factor; ``"whole"`` adds lambda to each of two factors
            (Pauloski et al., eq. 11-12; Shampoo's epsilon), and ``"root"`` its root (Ma
            et al., appendix B).
        basis: of ``"eigen"``: a new eigendecomposition at every refresh (``"exact"``),
            or ``"tracked"``: one step of orthogonal iteration from the last basis,
            which is cheaper and lags behind.
    """

    name: ClassVar[str] = "kronecker"

    sides: Sides = "both"
    style: Style = "eigen"
    basis: Basis = "exact"
    source: Source = "activations"
    power: float = 1.0  # pyright: ignore[reportIncompatibleVariableOverride]

    def __post_init__(self) -> None:
        require(self, sides=Sides, style=Style, basis=Basis, source=Source)
        require_number("power", self.power, "a number > 0", above=0.0)
        if self.sides == "none":
            raise ValueError(
                "Invalid sides='none' of Kronecker. Must be 'both', 'inputs' or "
                "'outputs': Plain() is the rule without factors."
            )
        if self.basis == "tracked" and self.form != "eigen":
            raise ValueError(
                f"Invalid basis='tracked' with style={self.style!r} and sides="
                f"{self.sides!r}, which have no eigenbases. Must be 'exact'."
            )

    @property
    def natural(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether it approximates the inverse Fisher: not Shampoo."""
        return self.source == "activations" and self.power == 1

    @property
    def form(self) -> Form:
        """Eigenbases for the joint damping of two sides, else dense inverses."""
        if self.power != 1:
            return "power"
        joint = self.sides == "both" and self.style == "eigen"
        return "eigen" if joint else "inverse"

    def apply(self, x: Matrices) -> Tensor:
        """``(F + damping I)^-1 V``; the plain direction while a factor is missing."""
        if not x.known:
            return x.direction
        if self.form == "eigen":
            assert x.right is not None
            assert x.left is not None
            return apply_eigen(x.direction, x.right, x.left, x.damping)
        return between(
            x.direction,
            x.right[0] if x.right else None,
            x.left[0] if x.left else None,
        )
