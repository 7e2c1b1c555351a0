"""An automatic damping and its value."""

import dataclasses
from typing import TYPE_CHECKING

from natgrad.math.quadratic import adapted
from natgrad.quadratic.options import AutoDamping

if TYPE_CHECKING:
    from natgrad.options import Options


class Lambda:
    """The damping as it is now: what `natgrad.Options.damping` is to the engine."""

    def __init__(self, options: AutoDamping) -> None:
        self.options = options
        self.value = options.initial
        self.first = options.initial
        self.streak = 0

    def __call__(self, step: int) -> float:
        """That of any step; 1 before there was one."""
        return 1.0 if self.value is None else self.value

    def __repr__(self) -> str:
        return repr(self.options)

    def start(self, value: float) -> None:
        """Begin with a damping that was found."""
        self.value = self.first = value

    def follow(self, ratio: float, trust: float) -> None:
        """Learn how well the model predicted the last step."""
        assert self.value is not None
        assert self.first is not None
        o, old = self.options, self.value
        factor = o.factor**o.every
        value, self.streak = adapted(old, ratio, factor, self.streak, trust)
        self.value = min(max(value, o.lowest * self.first), o.highest * self.first)


def with_value(options: "Options") -> "tuple[Options, Lambda | None]":
    """Options whose automatic damping has a value, and what that is changed by."""
    if not isinstance(options.damping, AutoDamping):
        return options, None
    damping = Lambda(options.damping)
    return dataclasses.replace(options, damping=damping), damping
