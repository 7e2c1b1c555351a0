"""A factor too large for one rank: its inverse divided by columns. Planned only.

When one factor costs more than a fair share of all inversions, no placement helps:
its owner is the slowest rank. Inverting by Cholesky, A = L L^T, can be divided without
approximation. Every helper gets A and repeats the decomposition (n^3 / 3
multiply-adds), then solves L L^T x_j = e_j for its own columns j. Only rows i >= j are
needed, because the inverse is symmetric: the columns together cost 2/3 n^3, divided by
r when dealt out in turn. So r helpers need ::

    seconds(r) = call + (square n^2 + cube n^3) (1/3 + 2/3 / r)

at most three times faster. The owner sends the packed factor to the helpers, and gets
back the columns, packed as well: n (n + 1) / 2 elements each way.

This is data for `natgrad plan` and `natgrad simulate`. The runtime does not execute it.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from natgrad.plan.plan import FLOAT_BYTES, Plan
from natgrad.plan.profile import HardwareProfile
from natgrad.plan.spec import StatisticSpec


@dataclass(frozen=True, kw_only=True)
class Split:
    """One factor divided by columns.

    Attributes:
        name: The statistic.
        ranks: Its owner first, then the helpers.
        seconds: Of each of them.
        whole: Seconds when the owner works alone.
        elements: Sent to the helpers, and again back to the owner.
    """

    name: str
    ranks: tuple[int, ...]
    seconds: float
    whole: float
    elements: int

    def exchange_seconds(self, profile: HardwareProfile) -> float:
        """Seconds to send the factor out and to gather the columns."""
        return 2 * profile.move(FLOAT_BYTES * self.elements, len(self.ranks))


def split_seconds(plan: Plan, spec: StatisticSpec, helpers: int) -> float:
    """Seconds of each of ``helpers`` ranks that divide one inversion."""
    one = StatisticSpec(
        name="", block="", kind="A", side="right", stack=spec.stack, size=1
    )
    call = plan.cost.invert(one)
    return call + (plan.cost.invert(spec) - call) * (1 / 3 + 2 / 3 / helpers)


def loads_of(plan: Plan) -> list[float]:
    """Seconds of inversion by rank, when everything is due."""
    loads = [0.0] * plan.world
    for spec in plan.statistics:
        loads[plan.owners[spec.name]] += plan.cost.invert(spec)
    return loads


def lower_bound(plan: Plan) -> float:
    """No placement of whole factors does better: max(total / world, largest)."""
    seconds = [plan.cost.invert(spec) for spec in plan.statistics]
    return max(sum(seconds) / plan.world, max(seconds, default=0.0))


def split_large(
    plan: Plan, *, most: int = 8, profile: HardwareProfile | None = None
) -> tuple[list[Split], list[float]]:
    """Divide each factor larger than a fair share; also every rank's seconds then.

    The number of helpers, at most ``most``, is what lets the last of them finish first,
    with the exchange counted if a profile is given. A factor is left alone if its owner
    is not the slowest rank, or if no helper pays.
    """
    if plan.inverse != "factored":
        raise ValueError(
            f"Invalid inverse={plan.inverse!r}. Must be 'factored': an "
            "eigendecomposition cannot be divided by columns."
        )
    if most < 1:
        raise ValueError(f"Invalid most={most}. Must be >= 1.")
    # Many helpers for the first factor leave none idle for the next: try every limit.
    trials = [_split_all(plan, limit, profile) for limit in range(1, most + 1)]

    def finish(trial: tuple[list[Split], list[float]]) -> float:
        moved = (s.exchange_seconds(profile) for s in trial[0] if profile)
        return max(trial[1]) + max(moved, default=0.0)

    return min(trials, key=finish)


def _split_all(
    plan: Plan, most: int, profile: HardwareProfile | None
) -> tuple[list[Split], list[float]]:
    loads = loads_of(plan)
    fair = sum(loads) / plan.world
    large = [s for s in plan.statistics if plan.cost.invert(s) > fair]
    large = [s for s in large if not s.diagonal and s.size > 1]
    splits: list[Split] = []
    for spec in sorted(large, key=lambda s: (-plan.cost.invert(s), s.name)):
        if loads[plan.owners[spec.name]] < max(loads):
            continue
        split = _split(plan, spec, loads, most, profile)
        if len(split.ranks) > 1:
            splits.append(split)
    return splits, loads


def _split(
    plan: Plan,
    spec: StatisticSpec,
    loads: list[float],
    most: int,
    profile: HardwareProfile | None,
) -> Split:
    """The best number of helpers for one factor; adds to their loads."""
    owner, whole = plan.owners[spec.name], plan.cost.invert(spec)
    rest = loads[owner] - whole
    idle = heapq.nsmallest(
        min(most, plan.world), range(plan.world), key=lambda r: (loads[r], r)
    )
    helpers = [rank for rank in idle if rank != owner][: most - 1]
    best = Split(
        name=spec.name, ranks=(owner,), seconds=whole, whole=whole, elements=spec.packed
    )
    finish = loads[owner]
    for count in range(1, len(helpers) + 1):
        ranks = (owner, *helpers[:count])
        seconds = split_seconds(plan, spec, len(ranks))
        trial = Split(
            name=spec.name,
            ranks=ranks,
            seconds=seconds,
            whole=whole,
            elements=spec.packed,
        )
        moved = trial.exchange_seconds(profile) if profile else 0.0
        busiest = max([rest, *(loads[rank] for rank in helpers[:count])])
        if busiest + seconds + moved < finish:
            best, finish = trial, busiest + seconds + moved
    loads[owner] = rest + best.seconds
    for rank in best.ranks[1:]:
        loads[rank] += best.seconds
    return best
