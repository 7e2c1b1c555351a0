"""Options of what the quadratic model finds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from natgrad.requiring import require_count, require_number

AUTO = "auto"
Auto = Literal["auto"]
KINDS = ("loss", "gaussian", "gaussian_log")
OutputProduct = Callable[[Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]]
Hessian = Literal["loss", "gaussian", "gaussian_log"] | OutputProduct


@dataclass(frozen=True, kw_only=True)
class AutoDamping:
    """Damping that follows how well the quadratic model predicts the loss.

    Every ``every`` steps the change of the objective on the step's own batch is divided
    by the change that the model predicted. Where the ratio is above 3/4 damping is
    multiplied by ``factor ** every``, where it is below 1/4 divided by it
    (Levenberg-Marquardt; Martens and Grosse 2015, section 6.5), four times where the
    objective grew. Each fall in a row is by one more of these factors, up to four.
    The first ``every`` steps are all compared, and so is the step
    after one that made the objective grow.

    Attributes:
        initial: the first damping, > 0. None: the curvature ``g . B g / g . g`` along
            the first gradient g, B the Gauss-Newton matrix.
        every: steps between two comparisons, >= 1. Each takes one more forward.
        factor: a step's, in (0, 1).
        lowest, highest: bounds of the damping, as multiples of the first one.
    """

    initial: float | None = None
    every: int = 5
    factor: float = 0.95
    lowest: float = 1e-8
    highest: float = 1e8

    def __post_init__(self) -> None:
        if self.initial is not None:
            legal = "a number > 0, or None"
            require_number("initial", self.initial, legal, above=0.0)
        require_count("every", self.every)
        require_number("factor", self.factor, "in (0, 1)", above=0.0, below=1.0)
        legal = "in (0, 1]"
        require_number("lowest", self.lowest, legal, above=0.0, high=1.0)
        require_number("highest", self.highest, "a number >= 1", low=1.0)


def require_rate(name: str, value: Any, legal: str, **bounds: float) -> None:
    """Raise unless it is ``"auto"`` or such a number."""
    if value != AUTO:
        require_number(name, value, f"{legal}, or 'auto'", **bounds)


def require_hessian(value: Any) -> None:
    """Raise unless it is the name of a Hessian, or a function."""
    if value not in KINDS and not callable(value):
        names = ", ".join(map(repr, KINDS))
        raise ValueError(
            f"Invalid hessian={value!r}. Must be one of {names}, or a function of "
            "outputs and tangents."
        )
