"""The polar factor of the direction in whitened coordinates."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from natgrad.math.packing import Packing
from natgrad.math.polar import MUON, Quintics, newton_schulz, polar
from natgrad.math.rules import between, evening, row_norms, whiten, whiten_back
from natgrad.requiring import require_number
from natgrad.rules.rule import Form, Matrices, Rule, Sides, Source, Style
from natgrad.rules.rule import require_choices as require

Whitening = Literal["half", "full"]
Iteration = Literal["best", "muon"] | Quintics


@dataclass(frozen=True, kw_only=True)
class Orthogonal(Rule):
    """All singular values of the whitened direction become 1.

    Without factors (``sides="none"``) this is Muon. In the coordinates of K-FAC's
    factors it is what `Polar` began with.

    ``whitening="half"``: ``W_G P W_A^T`` with P the polar factor of ``W_G^T V W_A``,
    where W is a damped factor to minus ``power``; ``"full"``: the polar factor of
    ``(G + ..)^-power V (A + ..)^-power``, which is Newton-Muon for the inputs alone,
    and PMuon with ``source="gradients"`` and a power of 0.3.

    Attributes:
        sides: as for `Kronecker`, or ``"none"``.
        source: as for `Kronecker`.
        whitening: ``"half"`` or ``"full"``, as above.
        power: > 0; None: 1/2, which whitens, for ``"half"`` (any root will do: it is
            made by Cholesky), and 1 for ``"full"``.
        style: how the damping lambda enters each factor: ``"relative"`` to its mean
            eigenvalue, or ``"factored"``: lambda itself, split if there are two.
        iteration: ``"best"``: what leaves singular values of three decades within 2e-3
            of 1 (`natgrad.math.polar.polar`); ``"muon"``: Muon's five quintics, as
            published; or a tuple with the coefficients ``(a, b, c)`` of each quintic.
        beta2: NorMuon: rows of the polar factor are divided by the root of the running
            mean of their squares, with this decay, in [0, 1), and the result gets the
            norm that the polar factor had. None: they are not.
    """

    name: ClassVar[str] = "orthogonal"

    sides: Sides = "both"
    whitening: Whitening = "half"
    style: Style = "relative"
    source: Source = "activations"
    power: float | None = None
    iteration: Iteration = "best"
    beta2: float | None = None

    def __post_init__(self) -> None:
        require(self, sides=Sides, whitening=Whitening, style=Style, source=Source)
        if self.power is not None:
            require_number("power", self.power, "a number > 0, or None", above=0.0)
        if self.beta2 is not None:
            legal = "in [0, 1), or None"
            require_number("beta2", self.beta2, legal, low=0.0, below=1.0)
        _require_iteration(self.iteration)
        if self.style not in ("relative", "factored"):
            raise ValueError(
                f"Invalid style={self.style!r} of Orthogonal. Each side is whitened on "
                "its own, so must be 'relative' or 'factored'."
            )

    @property
    def descends(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Without factors, whose inverses rounding may spoil."""
        return self.sides == "none"

    @property
    def form(self) -> Form:
        """Roots of the damped inverses, the inverses, or other powers."""
        usual: Form = "root" if self.whitening == "half" else "inverse"
        return usual if self.power in (None, {"root": 0.5}.get(usual, 1.0)) else "power"

    @property
    def packing(self) -> Packing:
        """Packed: unpacking is little beside the polar factor."""
        return "upper" if self.form == "root" else "symmetric"

    def moment_shape(self, shape: tuple[int, int, int]) -> tuple[int, int, int] | None:
        """One number per row, for NorMuon."""
        return None if self.beta2 is None else (*shape[:2], 1)

    def apply(self, x: Matrices) -> Tensor:
        """The polar factor, whitened back if half-whitened."""
        right = x.right[0] if x.right else None
        left = x.left[0] if x.left else None
        if self.whitening == "full":
            v = between(x.direction, right, left) if x.known else x.direction
            return self._even_rows(self._polar(v), x)
        if self.form != "root":
            p = self._even_rows(self._polar(between(x.direction, right, left)), x)
            return between(p, right, left)
        p = self._polar(whiten(x.direction, right, left))
        return whiten_back(self._even_rows(p, x), right, left)

    def _polar(self, v: Tensor) -> Tensor:
        if self.iteration == "best":
            return polar(v)
        return newton_schulz(v, MUON if self.iteration == "muon" else self.iteration)

    def _even_rows(self, p: Tensor, x: Matrices) -> Tensor:
        """``P / sqrt(S)`` at the norm of P, with S the second moment of its rows."""
        if self.beta2 is None:
            return p
        rows = row_norms(p)
        return p * evening(rows, x.moment(rows, self.beta2))


def _require_iteration(given: Any) -> None:
    if given in ("best", "muon"):
        return
    good = isinstance(given, tuple) and len(given) > 0  # pyright: ignore[reportUnknownArgumentType]
    if not good or not all(isinstance(q, tuple) and len(q) == 3 for q in given):
        raise ValueError(
            f"Invalid iteration={given!r}. Must be 'best', 'muon', or a tuple of "
            "coefficients (a, b, c), one for each iteration."
        )
