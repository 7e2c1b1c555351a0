"""Rules for parameters without factors: biases, norms, parameters of unknown layers."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from natgrad.math.rules import adaptive_scale
from natgrad.requiring import require_number
from natgrad.rules.rule import Matrices, Rule


@dataclass(frozen=True, kw_only=True)
class Plain(Rule):
    """The direction as it is."""

    name: ClassVar[str] = "plain"
    descends: ClassVar[bool] = True

    def apply(self, x: Matrices) -> Tensor:
        """V."""
        return x.direction


@dataclass(frozen=True, kw_only=True)
class Adam(Rule):
    """Divided by the root of the running second moment, elementwise, times a rate.

    Attributes:
        rate: multiplies the update, > 0: the learning rate of these parameters as a
            part of the others'.
        beta2: decay of the second moment, in [0, 1).
        damping: >= 0, relative to the root mean square of the parameter's gradients;
            torch's ``eps`` is absolute.
    """

    name: ClassVar[str] = "adam"
    adapts: ClassVar[bool] = True
    descends: ClassVar[bool] = True

    rate: float = 1.0
    beta2: float = 0.95
    damping: float = 1e-3

    def __post_init__(self) -> None:
        require_number("rate", self.rate, "a number > 0", above=0.0)
        require_number("beta2", self.beta2, "in [0, 1)", low=0.0, below=1.0)
        require_number("damping", self.damping, "a number >= 0", low=0.0)

    def apply(self, x: Matrices) -> Tensor:
        """``rate V / (sqrt(S) + damping rms)``."""
        square = x.moment(x.gradient, self.beta2)
        mean = x.mean(square)
        scaled = adaptive_scale(x.direction, square, self.damping, mean)
        return scaled if self.rate == 1 else scaled.mul_(self.rate)


def is_fallback(rule: Rule) -> bool:
    """Whether a rule needs no matrix: it takes each entry of a parameter alone."""
    return isinstance(rule, Plain | Adam)
