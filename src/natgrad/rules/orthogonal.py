"""The polar factor of the direction in whitened coordinates."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from natgrad.math.polar import polar
from natgrad.math.rules import between, whiten, whiten_back
from natgrad.requiring import require_number
from natgrad.rules.rule import Form, Matrices, Rule, Sides, Source, Style
from natgrad.rules.rule import require_choices as require

Whitening = Literal["half", "full"]


@dataclass(frozen=True, kw_only=True)
class Orthogonal(Rule):
    """All singular values of the whitened direction become 1.

    Without factors (``sides="none"``) this is Muon. In the coordinates of K-FAC's
    factors it is what `Polar` began with; with ``source="gradients"`` and a ``power``
    of 1/4 it is PMuon.

    ``whitening="half"``: ``W_G P W_A^T`` with P the polar factor of ``W_G^T V W_A`` and
    ``W W^T`` the damped inverse of a factor (for another ``power``, W is the damped
    factor to minus that power); ``"full"``: the polar factor of
    ``(G + ..)^-1 V (A + ..)^-1``.

    Attributes:
        sides: as for `Kronecker`, or ``"none"``.
        source: as for `Kronecker`.
        power: of ``"half"``: what W is of a damped factor, > 0; 1/2 whitens.
        whitening: ``"half"`` or ``"full"``, as above.
        style: how the damping lambda enters each factor: ``"relative"`` to its mean
            eigenvalue, or ``"factored"``: lambda itself, split if there are two.
    """

    name: ClassVar[str] = "orthogonal"

    sides: Sides = "both"
    whitening: Whitening = "half"
    style: Style = "relative"
    source: Source = "activations"
    power: float = 0.5

    def __post_init__(self) -> None:
        require(self, sides=Sides, whitening=Whitening, style=Style, source=Source)
        require_number("power", self.power, "a number > 0", above=0.0)
        if self.whitening == "full" and self.power != 0.5:
            raise ValueError(
                f"Invalid power={self.power} with whitening='full', which takes the "
                "whole inverse. Must be 0.5, the default."
            )
        if self.style not in ("relative", "factored"):
            raise ValueError(
                f"Invalid style={self.style!r} of Orthogonal. Each side is whitened on "
                "its own, so must be 'relative' or 'factored'."
            )

    @property
    def form(self) -> Form:
        """Roots of the damped inverses, or the inverses."""
        if self.whitening == "full":
            return "inverse"
        return "root" if self.power == 0.5 else "power"

    def apply(self, x: Matrices) -> Tensor:
        """The polar factor, whitened back if half-whitened."""
        right = x.right[0] if x.right else None
        left = x.left[0] if x.left else None
        if self.whitening == "full":
            return polar(between(x.direction, right, left) if x.known else x.direction)
        return whiten_back(polar(whiten(x.direction, right, left)), right, left)
