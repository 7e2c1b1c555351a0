"""Schedules of a run, from epochs in the settings to the steps the library counts."""

import bisect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from natgrad_lab.train.config import ScheduleConfig, TrainConfig


@dataclass(frozen=True, kw_only=True)
class LrFactor:
    """What the learning rate is multiplied by at a step: warmup, then decay.

    All positions are steps; ``decay_at`` is used by kind "steps", ``total`` by
    "cosine".
    """

    kind: str
    warmup: int
    first: float
    decay_at: tuple[int, ...]
    factor: float
    total: int

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return self.first + (1 - self.first) * (step + 1) / self.warmup
        if self.kind == "steps":
            return self.factor ** bisect.bisect_right(self.decay_at, step)
        if self.kind == "cosine":
            done = (step - self.warmup) / max(1, self.total - self.warmup)
            return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
        return 1.0


def lr_factor(config: TrainConfig, examples: int) -> LrFactor:
    """The factor of a config on a training set of ``examples``."""
    schedule: ScheduleConfig = config.schedule
    return LrFactor(
        kind=schedule.kind,
        warmup=config.step_of(schedule.warmup_epochs, examples),
        first=schedule.warmup_start,
        decay_at=tuple(config.step_of(e, examples) for e in schedule.decay_epochs),
        factor=schedule.decay_factor,
        total=config.total_steps(examples),
    )


def make_scheduler(
    optimizer: Optimizer, config: TrainConfig, examples: int
) -> LRScheduler:
    """The learning-rate scheduler, to be stepped after every update."""
    schedule = config.schedule
    if schedule.kind != "polynomial":
        return LambdaLR(optimizer, lr_factor(config, examples))
    from natgrad.schedules import PolynomialDecay

    end = config.epochs if schedule.end is None else schedule.end
    per_epoch = examples / config.batch
    return PolynomialDecay(
        optimizer,
        start=schedule.start * per_epoch,
        end=end * per_epoch,
        power=schedule.power,
        couple_momentum=schedule.couple_momentum,
    )


@dataclass(frozen=True, kw_only=True)
class Damping:
    """lambda at a step: a constant or a warmup, times a step decay."""

    base: Callable[[int], float]
    decay_at: tuple[int, ...] = ()
    factor: float = 1.0

    def __call__(self, step: int) -> float:
        passed = bisect.bisect_right(self.decay_at, step)
        return self.base(step) * self.factor**passed


@dataclass(frozen=True)
class Constant:
    """The same value at every step."""

    value: float

    def __call__(self, step: int) -> float:
        return self.value


def make_damping(config: TrainConfig, examples: int) -> Damping:
    """The damping schedule of a config."""
    curvature = config.curvature
    base: Callable[[int], float] = Constant(curvature.damping)
    if curvature.damping_start is not None:
        from natgrad.schedules import DampingWarmup

        base = DampingWarmup(
            initial=curvature.damping_start,
            target=curvature.damping,
            steps=curvature.damping_warmup,
        )
    at = tuple(config.step_of(e, examples) for e in curvature.damping_decay_epochs)
    return Damping(base=base, decay_at=at, factor=curvature.damping_decay)


@dataclass(frozen=True, kw_only=True)
class GrowingInterval:
    """An interval in steps, multiplied by ``factor`` at each of ``grow_at``."""

    first: int
    grow_at: tuple[int, ...]
    factor: float

    def __call__(self, step: int) -> int:
        passed = bisect.bisect_right(self.grow_at, step)
        return max(1, round(self.first * self.factor**passed))


def make_refresh(config: TrainConfig, examples: int) -> Any:
    """The refresh rule of a config: Every, Scheduled or Adaptive."""
    from natgrad import Adaptive, Every, Scheduled

    refresh = config.refresh
    if refresh.kind == "adaptive":
        return Adaptive(tolerance=refresh.tolerance)
    if refresh.kind != "every":
        per_epoch = max(1, examples // config.batch)
        return Scheduled(steps_per_epoch=per_epoch, rule=refresh.kind)
    at = tuple(config.step_of(e, examples) for e in refresh.decay_epochs)
    if not at:
        return Every(statistics=refresh.statistics, inverses=refresh.inverses)
    return Every(
        statistics=_growing(refresh.statistics, at, refresh.decay_factor),
        inverses=_growing(refresh.inverses, at, refresh.decay_factor),
    )


def _growing(first: int, at: tuple[int, ...], factor: float) -> GrowingInterval:
    return GrowingInterval(first=first, grow_at=at, factor=factor)
