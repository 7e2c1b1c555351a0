"""Refresh policies: when a statistic is estimated, and inverted, again."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from natgrad.math.staleness import next_interval
from natgrad.requiring import require_count, require_number

if TYPE_CHECKING:
    from natgrad.diagnostics.timer import Meter
    from natgrad.factors.budget import Account

Interval = int | Callable[[int], int]
HORIZON = 10_000
"""Steps over which a policy's mean interval is taken."""
ADAPTIVE_INTERVAL = 10
"""What a policy that decides as it goes is taken for: SP-NGD, Table 2, 5% to 24%."""


@dataclass(kw_only=True)
class Timing:
    """When one statistic is due, in steps counted from 0, and what was done so far.

    ``interval`` and ``previous`` are the last interval and the one before it;
    ``refreshed_at`` and ``inverted_at`` the steps of the last ones, -1 before any.
    """

    statistics_at: int = 0
    inverses_at: int = 0
    interval: int = 1
    previous: int = 1
    refreshed: int = 0
    skipped: int = 0
    inverted: int = 0
    refreshed_at: int = -1
    inverted_at: int = -1


class Refresh(ABC):
    """A policy that says when statistics and inverses are made again."""

    tolerance: float | None = None
    """If set, owners compare each new inverse with the two before it, and `judge`."""

    @abstractmethod
    def after_statistic(self, step: int, timing: Timing) -> int:
        """The step of the next estimate, asked after one at ``step``."""

    @abstractmethod
    def after_inverse(self, step: int, timing: Timing) -> int:
        """The step of the next inverse, asked after one at ``step``."""

    def judge(self, similar_to_last: bool, similar_to_before: bool, t: Timing) -> int:
        """The next interval, decided by a statistic's owner."""
        return t.interval

    def share_of_step(self) -> float | None:
        """Which share of a step inversions may cost; None: any. See `Paced`."""
        return None

    def mean_intervals(self) -> tuple[float, float]:
        """Mean steps between estimates, and between inversions; 10 if it adapts."""
        own = type(self).open_account is not Refresh.open_account
        if self.tolerance is not None or own:
            return ADAPTIVE_INTERVAL, ADAPTIVE_INTERVAL
        statistics = _mean_interval(self.after_statistic)
        return statistics, max(statistics, _mean_interval(self.after_inverse))

    def open_account(self, names: Sequence[str], meter: "Meter") -> "Account | None":
        """Who decides step by step instead, from measured seconds: only `Budget`."""
        return None


@dataclass(frozen=True)
class Every(Refresh):
    """Estimate every ``statistics`` steps, invert every ``inverses`` steps.

    Each is a number >= 1 or a function from the step to such a number (update
    decoupling and decay: Pauloski et al., section V-C).

    With ``early`` the first inverses do not last that long: an inverse of step t lasts
    max(t, ``statistics``) steps, up to ``inverses``. Curvature changes most at
    first, and this costs a handful of inversions in all.
    """

    statistics: Interval = 1
    inverses: Interval = 1
    early: bool = False

    def __post_init__(self) -> None:
        for name in ("statistics", "inverses"):
            value = getattr(self, name)
            if not callable(value):
                require_count(name, value)

    def after_statistic(self, step: int, timing: Timing) -> int:
        return step + _interval_at("statistics", self.statistics, step)

    def after_inverse(self, step: int, timing: Timing) -> int:
        interval = _interval_at("inverses", self.inverses, step)
        if self.early:
            least = _interval_at("statistics", self.statistics, step)
            interval = min(interval, max(least, step))
        return step + interval


@dataclass(frozen=True)
class Paced(Refresh):
    """As another policy says, but inverses more rarely where they would cost too much.

    By the cost model, from shapes and the number of vectors that layers multiply,
    inversions take at most ``share`` of what a step takes otherwise: of all statistics
    those most rarely that cost most. Nothing is measured: every rank decides the same,
    and a run that is resumed goes on as it would have.

    Args:
        policy: `Every`, `Scheduled` or one of your own. `Adaptive` and `Budget` find
            intervals by themselves.
        share: a number > 0.
    """

    policy: Refresh = field(default_factory=Every)
    share: float = 0.25

    def __post_init__(self) -> None:
        policy: Any = self.policy
        plain = isinstance(policy, Refresh) and policy.tolerance is None
        own = plain and type(policy).open_account is not Refresh.open_account
        if not plain or own or policy.share_of_step() is not None:
            raise ValueError(
                f"Invalid policy={policy!r}. Must be Every(...), Scheduled(...) or a "
                "natgrad.Refresh that does not find intervals by itself."
            )
        require_number("share", self.share, "a number > 0", above=0.0)

    def after_statistic(self, step: int, timing: Timing) -> int:
        return self.policy.after_statistic(step, timing)

    def after_inverse(self, step: int, timing: Timing) -> int:
        return max(self.policy.after_inverse(step, timing), step + timing.interval)

    def share_of_step(self) -> float | None:
        return self.share


def _staircase(epoch: int) -> int:
    """Osawa et al. 2019, eq. 20."""
    return min(20, 5 * (epoch // 5) + 1)


def _late(epoch: int) -> int:
    """Osawa et al. 2019, eq. 21."""
    return 1 if epoch < 13 else 20


RULES: dict[str, Callable[[int], int]] = {"staircase": _staircase, "late": _late}


@dataclass(frozen=True, kw_only=True)
class Scheduled(Refresh):
    """An interval that depends on the epoch, after an always-fresh start.

    Args:
        steps_per_epoch: optimizer steps in an epoch.
        rule: ``"staircase"``, min(20, 5 floor(e / 5) + 1) (Osawa et al. 2019,
            eq. 20), ``"late"``, 1 before epoch 13 and 20 from then on (eq. 21), or
            a function from the epoch (counted from 0) to the interval in steps.
        always_fresh: the first steps refresh every time, whatever the rule says.
    """

    steps_per_epoch: int
    rule: str | Callable[[int], int] = "staircase"
    always_fresh: int = 500

    def __post_init__(self) -> None:
        require_count("steps_per_epoch", self.steps_per_epoch)
        if not callable(self.rule) and self.rule not in RULES:
            legal = ", ".join(map(repr, RULES))
            raise ValueError(
                f"Invalid rule={self.rule!r}. Must be one of {legal}, or a function "
                "from the epoch to an interval."
            )
        require_count("always_fresh", self.always_fresh, least=0)

    def interval(self, step: int) -> int:
        """Steps from a refresh at ``step`` to the next one."""
        if step < self.always_fresh:
            return 1
        rule = self.rule if callable(self.rule) else RULES[self.rule]
        return _interval_at("rule", rule, step // self.steps_per_epoch)

    def after_statistic(self, step: int, timing: Timing) -> int:
        return step + self.interval(step)

    def after_inverse(self, step: int, timing: Timing) -> int:
        return step + self.interval(step)


@dataclass(frozen=True)
class Adaptive(Refresh):
    """Each statistic finds its own interval (SP-NGD, Algorithms 1 and 2).

    A refreshed statistic's damped inverse is compared with the last one and the one
    before: similar means a relative Frobenius distance under ``tolerance``.
    """

    tolerance: float = 0.1  # pyright: ignore[reportIncompatibleVariableOverride]

    def __post_init__(self) -> None:
        value: Any = self.tolerance
        if not (isinstance(value, int | float) and 0 < value < float("inf")):
            raise ValueError(f"Invalid tolerance={value!r}. Must be a number > 0.")

    def after_statistic(self, step: int, timing: Timing) -> int:
        return step + timing.interval

    def after_inverse(self, step: int, timing: Timing) -> int:
        return step + timing.interval

    def judge(self, similar_to_last: bool, similar_to_before: bool, t: Timing) -> int:
        return next_interval(
            similar_to_last=similar_to_last,
            similar_to_before=similar_to_before,
            last=t.interval,
            before=t.previous,
        )


def _mean_interval(after: Callable[[int, Timing], int]) -> float:
    step = count = 0
    while step < HORIZON:
        step, count = after(step, Timing()), count + 1
    return step / count


def _interval_at(name: str, interval: Interval, at: int) -> int:
    if not callable(interval):
        return interval
    value = interval(at)
    require_count(f"{name}({at})", value)
    return value
