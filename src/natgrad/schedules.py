"""Schedules of learning rate and momentum, of damping, and of refresh intervals.

Learning rates follow torch's schedulers. Damping and intervals are functions of the
optimizer's step (from 0), to be given as ``damping=`` or to `natgrad.Every`.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from natgrad.requiring import require_count, require_number


class PolynomialDecay(LRScheduler):
    """``lr0 (1 - (e - start) / (end - start))^power`` at epoch e (SP-NGD, eq. 21).

    The learning rate is lr0 before ``start`` and 0 after ``end``. With
    ``couple_momentum`` the momentum keeps its ratio to the learning rate (eq. 22).

    Args:
        optimizer: its groups need a ``momentum`` if that is coupled.
        start, end: in epochs; an epoch is ``steps_per_epoch`` calls of ``step()``.
        power: the decay rate, > 0.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        start: float,
        end: float,
        power: float,
        steps_per_epoch: int = 1,
        couple_momentum: bool = True,
        last_epoch: int = -1,
    ) -> None:
        require_number("start", start, "a number >= 0", low=0.0)
        require_number("end", end, f"a number > start={start}", above=start)
        require_number("power", power, "a number > 0", above=0.0)
        require_count("steps_per_epoch", steps_per_epoch)
        self.start = start
        self.end = end
        self.power = power
        self.steps_per_epoch = steps_per_epoch
        self.couple_momentum = couple_momentum
        if couple_momentum:
            for group in optimizer.param_groups:
                if "momentum" not in group:
                    raise ValueError(
                        f"{type(optimizer).__name__} has no momentum to couple. "
                        "Must be couple_momentum=False."
                    )
                group.setdefault("initial_momentum", group["momentum"])
        super().__init__(optimizer, last_epoch)

    def factor(self) -> float:
        """The learning rate at the current epoch over the first one."""
        epoch = self.last_epoch / self.steps_per_epoch
        done = (epoch - self.start) / (self.end - self.start)
        return (1.0 - min(max(done, 0.0), 1.0)) ** self.power

    def get_lr(self) -> list[Any]:
        """The learning rate of each group, and its momentum if that is coupled."""
        factor = self.factor()
        if self.couple_momentum:
            for group in self.optimizer.param_groups:
                group["momentum"] = group["initial_momentum"] * factor
        return [base * factor for base in self.base_lrs]


class WarmupStepDecay(LRScheduler):
    """Linear warmup, then times ``factor`` at each milestone (Pauloski et al., VI-C).

    Args:
        milestones: epochs at which the learning rate is multiplied by ``factor``.
        warmup: epochs in which it grows linearly from ``warmup_start`` times lr to lr.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        milestones: Sequence[float],
        factor: float = 0.1,
        warmup: float = 5.0,
        warmup_start: float = 0.1,
        steps_per_epoch: int = 1,
        last_epoch: int = -1,
    ) -> None:
        require_number("factor", factor, "a number > 0", above=0.0)
        require_number("warmup", warmup, "a number >= 0", low=0.0)
        require_number("warmup_start", warmup_start, "in [0, 1]", low=0.0, high=1.0)
        require_count("steps_per_epoch", steps_per_epoch)
        self.milestones: tuple[float, ...] = _ascending("milestones", milestones)
        self.decay = factor
        self.warmup = warmup
        self.warmup_start = warmup_start
        self.steps_per_epoch = steps_per_epoch
        super().__init__(optimizer, last_epoch)

    def factor(self) -> float:
        """The learning rate at the current epoch over its peak."""
        epoch = self.last_epoch / self.steps_per_epoch
        if epoch < self.warmup:
            return self.warmup_start + (1 - self.warmup_start) * epoch / self.warmup
        return self.decay ** bisect_right(self.milestones, epoch)

    def get_lr(self) -> list[Any]:
        """The learning rate of each group."""
        return [base * self.factor() for base in self.base_lrs]


@dataclass(frozen=True, kw_only=True)
class DampingWarmup:
    """From ``initial`` towards ``target`` (Osawa et al. 2019, eq. 13-14).

    ``gamma(t+1) = (1 - alpha) gamma(t) + alpha target`` with
    ``alpha = 2 log10(initial / target) / steps``.
    """

    initial: float
    target: float
    steps: int

    def __post_init__(self) -> None:
        require_number("target", self.target, "a number > 0", above=0.0)
        require_number(
            "initial", self.initial, f"> target={self.target}", above=self.target
        )
        require_count("steps", self.steps)
        if self.alpha > 1:
            least = math.ceil(2 * math.log10(self.initial / self.target))
            raise ValueError(f"Invalid steps={self.steps}. Must be >= {least}.")

    @property
    def alpha(self) -> float:
        """The part of the way to the target that each step goes."""
        return 2 * math.log10(self.initial / self.target) / self.steps

    def __call__(self, step: int) -> float:
        return self.target + (1 - self.alpha) ** step * (self.initial - self.target)


@dataclass(frozen=True, kw_only=True)
class DampingDecay:
    """``initial`` times ``factor`` at each of ``epochs`` (Pauloski et al., V-C)."""

    initial: float
    factor: float
    epochs: tuple[float, ...]
    steps_per_epoch: int

    def __post_init__(self) -> None:
        require_number("initial", self.initial, "a number >= 0", low=0.0)
        require_number("factor", self.factor, "a number > 0", above=0.0)
        _ascending("epochs", self.epochs)
        require_count("steps_per_epoch", self.steps_per_epoch)

    def __call__(self, step: int) -> float:
        passed = bisect_right(self.epochs, step / self.steps_per_epoch)
        return self.initial * self.factor**passed


@dataclass(frozen=True, kw_only=True)
class IntervalGrowth:
    """An interval times ``factor`` at each of ``epochs`` (Pauloski et al., V-C)."""

    initial: int
    factor: float
    epochs: tuple[float, ...]
    steps_per_epoch: int

    def __post_init__(self) -> None:
        require_count("initial", self.initial)
        require_number("factor", self.factor, "a number > 0", above=0.0)
        _ascending("epochs", self.epochs)
        require_count("steps_per_epoch", self.steps_per_epoch)

    def __call__(self, step: int) -> int:
        passed = bisect_right(self.epochs, step / self.steps_per_epoch)
        return max(1, round(self.initial * self.factor**passed))


def _ascending(name: str, values: Sequence[float]) -> tuple[float, ...]:
    if list(values) != sorted(values):
        raise ValueError(f"Invalid {name}={values!r}. Must be in ascending order.")
    return tuple(values)
