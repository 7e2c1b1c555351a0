"""Schedules of a run, from epochs in the settings to the steps the library counts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from natgrad import Budget, Every, Refresh, Scheduled
from natgrad.schedules import (
    DampingDecay,
    DampingWarmup,
    IntervalGrowth,
    PolynomialDecay,
    WarmupStepDecay,
)
from natgrad_lab.named import adaptive, timed
from natgrad_lab.train.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class WarmupCosine:
    """Linear warmup from ``first``, then constant or half a cosine down to 0.

    A factor of the learning rate at a step; all positions are steps.
    """

    warmup: float
    first: float
    total: int
    cosine: bool

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return self.first + (1 - self.first) * step / self.warmup
        if not self.cosine:
            return 1.0
        done = (step - self.warmup) / max(1.0, self.total - self.warmup)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def make_scheduler(
    optimizer: Optimizer, config: TrainConfig, examples: int
) -> LRScheduler:
    """The learning-rate scheduler, to be stepped after every update."""
    schedule = config.schedule
    if schedule.kind == "polynomial":
        return _polynomial(optimizer, config, examples)
    warmup = schedule.warmup_epochs * examples / config.batch
    if schedule.kind == "steps":
        return WarmupStepDecay(
            optimizer,
            milestones=_in_steps(schedule.decay_epochs, config, examples),
            factor=schedule.decay_factor,
            warmup=warmup,
            warmup_start=schedule.warmup_start,
        )
    factor = WarmupCosine(
        warmup=warmup,
        first=schedule.warmup_start,
        total=config.total_steps(examples),
        cosine=schedule.kind == "cosine",
    )
    return LambdaLR(optimizer, factor)


def _polynomial(
    optimizer: Optimizer, config: TrainConfig, examples: int
) -> PolynomialDecay:
    schedule = config.schedule
    last = config.total_steps(examples) * config.batch / examples
    ends = (schedule.start, last if schedule.end is None else schedule.end)
    start, end = _in_steps(ends, config, examples)
    return PolynomialDecay(
        optimizer,
        start=start,
        end=end,
        power=schedule.power,
        couple_momentum=schedule.couple_momentum,
    )


@dataclass(frozen=True, kw_only=True)
class Damping:
    """lambda at a step: a constant or a warmup, times a step decay."""

    target: float
    warmup: DampingWarmup | None = None
    decay: DampingDecay | None = None

    def __call__(self, step: int) -> float:
        value = self.target if self.warmup is None else self.warmup(step)
        return value if self.decay is None else value * self.decay(step)


def make_damping(config: TrainConfig, examples: int, usual: float) -> Damping:
    """The damping schedule of a config; ``usual`` if it has none."""
    curvature = config.curvature
    target = usual if curvature.damping is None else curvature.damping
    warmup = decay = None
    if curvature.damping_start is not None:
        warmup = DampingWarmup(
            initial=curvature.damping_start,
            target=target,
            steps=curvature.damping_warmup,
        )
    if curvature.damping_decay_epochs:
        decay = DampingDecay(
            initial=1.0,
            factor=curvature.damping_decay,
            epochs=_in_steps(curvature.damping_decay_epochs, config, examples),
            steps_per_epoch=1,
        )
    return Damping(target=target, warmup=warmup, decay=decay)


def make_refresh(config: TrainConfig, examples: int, usual: Refresh) -> Refresh:
    """The refresh rule of a config: Every, Scheduled, Adaptive, Budget or the usual."""
    refresh, kind = config.refresh, config.refresh.kind
    if kind == "adaptive":
        return adaptive(usual, refresh.tolerance)
    if kind == "budget":
        return Budget(overhead=refresh.overhead)
    if kind in ("staircase", "late"):
        per_epoch = max(1, round(examples / config.batch))
        fresh = refresh.always_fresh
        return Scheduled(steps_per_epoch=per_epoch, rule=kind, always_fresh=fresh)
    times = (refresh.statistics, refresh.inverses)
    if kind is None and times == (None, None) and not refresh.decay_epochs:
        return usual
    every = timed(usual, *times)
    if not refresh.decay_epochs:
        return every
    at = _in_steps(refresh.decay_epochs, config, examples)
    grow = partial(
        IntervalGrowth, factor=refresh.decay_factor, epochs=at, steps_per_epoch=1
    )
    statistics, inverses = every.statistics, every.inverses
    assert isinstance(statistics, int)
    assert isinstance(inverses, int)
    return Every(statistics=grow(initial=statistics), inverses=grow(initial=inverses))


def _in_steps(
    epochs: Sequence[float], config: TrainConfig, examples: int
) -> tuple[float, ...]:
    """The library's schedules count in steps here: an epoch need not be whole."""
    return tuple(each * examples / config.batch for each in epochs)
