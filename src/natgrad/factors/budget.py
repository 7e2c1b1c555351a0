"""A refresh policy that measures what it costs and keeps within a share of the step.

Note [Spending a budget]
A step may take ``overhead`` times the plain step's seconds: what the loop takes without
the hooks and the preconditioning, a median over recent steps. Every step puts that
allowance, less what preconditioning takes, into an account, and every refresh is paid
from it as measured. The account decides what is due in the coming step: of all
statistics the one first whose refresh is worth most a second, until the next cannot be
paid. It is then saved for, so no statistic waits forever, and a single step may exceed
the overhead where the mean does not.

Worth is ``change x age``: how much the statistic had changed at its last refresh (Osawa
et al. 2019, eq. 19) times the steps since. A statistic that drifts by r a step and
costs c seconds settles at an interval proportional to sqrt(c / r), which is what makes
the sum of all drifts least for the seconds spent.

All ranks decide the same: each tells its seconds in the step's verdict, and all decide
from the sums. Owners invert at the same time, so a refresh costs what the busiest
takes.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from natgrad.diagnostics.timer import Meter, Reader, phase_sum
from natgrad.factors.refresh import Refresh, Timing

WINDOW = 25
FLOOR = 0.1
WARMUP = 2
UNKNOWN_CHANGE = 1.0
LEAST_CHANGE = 1e-3
SMOOTHING = 0.5
PER_RANK = 3
PER_STATISTIC = 3


@dataclass(frozen=True)
class Budget(Refresh):
    """Refresh as much as ``overhead`` allows, where it is worth most.

    With 0.10 a step takes on average at most 10% longer than without natgrad, once
    every statistic was refreshed for the first time. Preconditioning is paid from it
    too; if that alone takes more, a tenth of the overhead still goes into refreshes and
    ``report()`` says that the budget cannot be kept. ``refreshes()["budget"]`` tells
    what was spent and what had to be given up.

    Decisions come from measured seconds, so two runs differ in what they refresh when.
    """

    overhead: float = 0.10

    def __post_init__(self) -> None:
        value: Any = self.overhead
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (number and 0 < value < float("inf")):
            raise ValueError(f"Invalid overhead={value!r}. Must be a number > 0.")

    def after_statistic(self, step: int, timing: Timing) -> int:
        return step + 1

    def after_inverse(self, step: int, timing: Timing) -> int:
        return step + 1

    def open_account(self, names: Sequence[str], meter: Meter) -> "Account":
        return Account(self.overhead, names, meter)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A statistic that might be refreshed, with the seconds that would take."""

    name: str
    owner: int
    estimate: float
    invert: float
    change: float
    age: int

    @property
    def worth(self) -> float:
        """Staleness that a second spent here would remove."""
        return self.change * self.age / max(self.estimate + self.invert, 1e-9)


def choose(candidates: Sequence[Candidate], credit: float) -> list[Candidate]:
    """The most worthy first, until the next cannot be paid: it is saved for.

    Estimates run on every rank; inversions side by side, each on its owner.
    """
    chosen: list[Candidate] = []
    for each in sorted(candidates, key=lambda c: (-c.worth, c.name)):
        if bill([*chosen, each]) > credit:
            break
        chosen.append(each)
    return chosen


def bill(chosen: Sequence[Candidate]) -> float:
    """Seconds that all of these take together."""
    busy: dict[int, float] = defaultdict(float)
    for each in chosen:
        busy[each.owner] += each.invert
    return sum(each.estimate for each in chosen) + max(busy.values(), default=0.0)


@dataclass(kw_only=True)
class Cost:
    """The smoothed seconds of one statistic, and its change from refresh to refresh.

    0 is not measured yet. Smoothing lets intervals settle: the change at a refresh is
    proportional to the interval before it, and without it they would swing forever.
    """

    estimate: float = 0.0
    invert: float = 0.0
    change: float = 0.0


@dataclass(kw_only=True)
class Books:
    """What is known, equal on all ranks, in seconds.

    ``unpaid`` is what inversions in the step just done will cost: ranks tell it in the
    next. ``paid_`` are sums over steps.
    """

    windows: int = 0
    plain: float = 0.0
    fixed: float = 0.0
    credit: float = 0.0
    unpaid: float = 0.0
    paid_plain: float = 0.0
    paid_fixed: float = 0.0
    paid_refresh: float = 0.0


@dataclass(kw_only=True)
class _Local:
    """What this rank has measured and not told yet."""

    last: float | None = None
    plain: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    changes: dict[str, Tensor] = field(default_factory=lambda: {})


class Account:
    """The seconds of one run and what they may buy. See Note [Spending a budget]."""

    def __init__(self, overhead: float, names: Sequence[str], meter: Meter) -> None:
        self.overhead = overhead
        self.books = Books()
        self.costs = {name: Cost() for name in names}
        self._meter, self._reader = meter, Reader(meter)
        self._local = _Local()
        self._waits: dict[str, int] = {}

    def note_change(self, name: str, change: Tensor) -> None:
        """An owner has found how much a statistic had changed."""
        self._local.changes[name] = change

    # -- what ranks tell each other ---------------------------------------------------

    def facts(self, like: Tensor) -> Tensor:
        """This rank's seconds since the last call, as float64 to be summed."""
        seconds, now, local = self._reader.take(), self._meter.clock(), self._local
        refresh = phase_sum(seconds, "estimate", "sampled", "reduce", "refresh")
        inside = phase_sum(seconds, "reduce", "refresh", "gradients", "update")
        fixed = max(0.0, phase_sum(seconds, "step") - inside)
        if local.last is not None:
            local.plain.append(max(0.0, now - local.last - refresh - fixed))
        local.last = now
        from statistics import median  # slow to import, and few runs have a budget

        plain = median(local.plain) if local.plain else 0.0
        told = [plain, fixed, refresh]
        for name in self.costs:
            told += [
                seconds.get((phase, name), 0.0) for phase in ("estimate", "invert")
            ]
            told.append(0.0)
        vector = like.new_tensor(told, dtype=torch.float64)
        # never 0: what did not change once is looked at again, some time
        for name, change in local.changes.items():
            at = PER_RANK + PER_STATISTIC * [*self.costs].index(name) + 2
            vector[at] = change.double().nan_to_num(1.0, 1.0).clamp(LEAST_CHANGE, 1e12)
        local.changes = {}
        return vector

    def learn(self, facts: Sequence[float], world: int) -> None:
        """Take in the sums of all ranks' `facts`, and pay what they say was spent."""
        books = self.books
        plain, fixed, refresh = (x / world for x in facts[:PER_RANK])
        entries = zip(*[iter(facts[PER_RANK:])] * PER_STATISTIC, strict=True)
        for cost, (estimate, invert, change) in zip(
            self.costs.values(), entries, strict=True
        ):
            cost.estimate = _smooth(cost.estimate, estimate / world)
            cost.invert = _smooth(cost.invert, invert)
            cost.change = _smooth(cost.change, change)
        books.windows += 1
        books.plain = plain or books.plain
        books.fixed = _smooth(books.fixed, fixed)
        # the first refresh of everything is a start that no budget can avoid
        if books.windows > WARMUP:
            self._pay(fixed, refresh)

    def _pay(self, fixed: float, refresh: float) -> None:
        books = self.books
        allowed = self.overhead * books.plain
        books.credit += max(allowed - fixed, FLOOR * allowed) - refresh
        books.paid_plain += books.plain
        books.paid_fixed += fixed
        books.paid_refresh += refresh

    # -- what is due ------------------------------------------------------------------

    def decide(
        self, step: int, timings: Mapping[str, Timing], owners: Mapping[str, int]
    ) -> set[str]:
        """Names of the statistics to refresh in the step after ``step``."""
        candidates = [
            Candidate(
                name=name,
                owner=owners[name],
                age=step + 1 - timing.refreshed_at,
                estimate=self.costs[name].estimate,
                invert=self.costs[name].invert,
                change=self.costs[name].change or UNKNOWN_CHANGE,
            )
            for name, timing in timings.items()
        ]
        self._waits = {c.name: c.age for c in candidates}
        books, everything = self.books, bill(candidates)
        most = everything + books.unpaid
        books.credit = max(-everything, min(books.credit, most))
        if books.windows < WARMUP:
            return set()
        chosen = choose(candidates, books.credit - books.unpaid)
        books.unpaid = bill([replace(c, estimate=0.0) for c in chosen])
        return {c.name for c in chosen}

    # -- what it says -----------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """Shares of the plain step's seconds, and in words what was given up."""
        books, paid = self.books, self.books.paid_plain
        everything = sum(c.estimate + c.invert for c in self.costs.values())
        stalest = max(self._waits, key=lambda n: self._waits[n], default="")
        numbers = {
            "overhead": self.overhead,
            "plain_seconds": books.plain,
            "preconditioning": books.paid_fixed / paid if paid else 0.0,
            "refreshes": books.paid_refresh / paid if paid else 0.0,
            "always_fresh": everything / books.plain if books.plain else 0.0,
            "longest_wait": self._waits.get(stalest, 0),
            "longest_waiting": stalest,
        }
        return numbers | {"says": _in_words(numbers, measured=paid > 0)}

    def state_dict(self) -> dict[str, Any]:
        """Numbers only. Seconds of another machine are soon replaced by its own."""
        costs = {name: asdict(cost) for name, cost in self.costs.items()}
        return {"books": asdict(self.books), "costs": costs}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with saved books, which `checking.require_state` has looked at."""
        books, costs = Books(**state["books"]), state["costs"]
        known = {name: Cost(**costs[name]) for name in self.costs if name in costs}
        self.books, self.costs = books, self.costs | known
        self._local = _Local()
        if books.plain:
            self._local.plain.append(books.plain)


def _smooth(old: float, new: float) -> float:
    """A running average that starts with the first measurement; 0 is none."""
    if not (old and new):
        return old or new
    return SMOOTHING * old + (1 - SMOOTHING) * new


def _in_words(numbers: Mapping[str, Any], *, measured: bool) -> str:
    overhead, fixed = numbers["overhead"], numbers["preconditioning"]
    if not measured:
        return f"Budget of {overhead:.1%} over the plain step: nothing measured yet."
    spent = fixed + numbers["refreshes"]
    text = (
        f"Budget of {overhead:.1%} over the plain step "
        f"({1000 * numbers['plain_seconds']:.1f} ms): {spent:.1%} was spent, "
        f"{fixed:.1%} on preconditioning and {numbers['refreshes']:.1%} on refreshes."
    )
    if fixed > overhead:
        text += (
            " Preconditioning alone is over the budget: it cannot be kept, and "
            "refreshes are at the least."
        )
    if numbers["longest_wait"] <= 1:
        return f"{text} Nothing had to be given up."
    return (
        f"{text} Given up: refreshing everything at every step, which would take "
        f"{numbers['always_fresh']:.1%}; {numbers['longest_waiting']} has waited "
        f"longest, {numbers['longest_wait']} steps."
    )
