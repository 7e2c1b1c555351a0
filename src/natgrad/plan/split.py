"""A factor too large for one rank: its inverse divided by columns.

When one factor costs more than a fair share of all inversions, no placement helps:
its owner is the slowest rank. Inverting by Cholesky, A = L L^T, can be divided without
approximation. Every helper gets A and repeats the decomposition (n^3 / 3
multiply-adds), then solves L L^T x_j = e_j for its own columns j. Only rows i >= j are
needed, because the inverse is symmetric: the columns together cost 2/3 n^3, divided by
r when dealt out in turn. So r ranks need ::

    seconds(r) = call + (square n^2 + cube n^3) (1/3 + 2/3 / r)

at most three times faster. Two exchanges are added to the plan: ``share_factors``, the
packed factor from its owner to the helpers, and ``gather_columns``, each helper's
columns, packed as well, back to the owner.

``make_plan(split=8)`` puts this into a plan, which is checked, compared, described and
simulated like any other. It is not executed: `make_buckets` refuses its exchanges.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from natgrad.plan.cost import CostModel
from natgrad.plan.exchange import Exchange, Item
from natgrad.plan.spec import FLOAT_BYTES, StatisticSpec
from natgrad.plan.strategies import Ranks

if TYPE_CHECKING:
    from natgrad.plan.autotune.profile import HardwareProfile
    from natgrad.plan.plan import Plan

OUT, BACK = SPLIT_EXCHANGES = ("share_factors", "gather_columns")


@dataclass(frozen=True, kw_only=True)
class Split:
    """One factor divided by columns among ``ranks``: its owner, then the helpers."""

    spec: StatisticSpec
    ranks: Ranks

    @property
    def name(self) -> str:
        """The statistic's."""
        return self.spec.name

    def seconds(self, cost: CostModel) -> float:
        """Of each of its ranks."""
        return split_seconds(cost, self.spec, len(self.ranks))

    def columns(self, place: int) -> int:
        """Packed elements of the columns of ``ranks[place]``: every r-th one."""
        n, r = self.spec.size, len(self.ranks)
        return self.spec.stack * sum(n - j for j in range(place, n, r))

    def exchange_seconds(
        self, profile: HardwareProfile, element_bytes: float = FLOAT_BYTES
    ) -> float:
        """Seconds to send the factor out; to gather the columns takes as long."""
        return profile.move_among(element_bytes * self.spec.packed, self.ranks)


def split_seconds(cost: CostModel, spec: StatisticSpec, ranks: int) -> float:
    """Seconds of each of so many ranks that divide one inversion."""
    one = StatisticSpec(
        name="", block="", kind="A", side="right", stack=spec.stack, size=1
    )
    whole = cost.invert(spec)
    call = min(whole, cost.invert(one))
    return call + (whole - call) * (1 / 3 + 2 / 3 / ranks)


def split_exchanges(splits: Sequence[Split], world: int) -> dict[str, Exchange]:
    """What dividing moves; nothing if nothing is divided."""
    if not splits:
        return {}
    out = [_item(s.name, s.spec.packed, s.ranks[0], s.ranks) for s in splits]
    back = [
        _item(f"{s.name}#{i}", s.columns(i), rank, s.ranks[:1])
        for s in splits
        for i, rank in enumerate(s.ranks)
        if i
    ]
    pairs = ((OUT, out), (BACK, back))
    return {
        name: Exchange(name=name, reduces=False, world=world, items=tuple(items))
        for name, items in pairs
    }


def _item(name: str, elements: int, source: int, destinations: Ranks) -> Item:
    return Item(
        name=name,
        elements=elements,
        sources=(source,),
        destinations=tuple(sorted(destinations)),
    )


def loads_of(plan: Plan) -> list[float]:
    """Seconds of inversion by rank, when everything is due."""
    divided = {split.name for split in plan.splits}
    loads = [0.0] * plan.world
    for spec in plan.statistics:
        if spec.name not in divided:
            loads[plan.owners[spec.name]] += plan.cost.invert(spec)
    for split in plan.splits:
        for rank in split.ranks:
            loads[rank] += split.seconds(plan.cost)
    return loads


def lower_bound(plan: Plan) -> float:
    """No placement of whole factors does better: max(total / world, largest)."""
    seconds = [plan.cost.invert(spec) for spec in plan.statistics]
    return max(sum(seconds) / plan.world, max(seconds, default=0.0))


def split_large(
    specs: Sequence[StatisticSpec],
    owners: Mapping[str, int],
    world: int,
    cost: CostModel,
    most: int,
    profile: HardwareProfile | None,
) -> tuple[Split, ...]:
    """Divide each factor larger than a fair share among at most ``most`` ranks.

    Their number is what lets the last of them finish first, the exchanges counted; by
    the library's constants without a ``profile``. A factor is left alone if its owner
    is not the slowest rank, or if no helper pays.
    """
    if most == 1:
        return ()
    # not above: every import of natgrad would pay for it, and few plans split
    from natgrad.plan.autotune.profile import HardwareProfile

    profile = profile or HardwareProfile(name="the library's constants")
    # Many helpers for the first factor leave none idle for the next: try every limit.
    trials = [
        _Splitting(specs, owners, world, cost, limit, profile)
        for limit in range(1, most + 1)
    ]
    return tuple(min(trials, key=lambda trial: trial.finish).splits)


class _Splitting:
    """One trial: the splits of at most ``most`` ranks each, and every rank's load."""

    def __init__(
        self,
        specs: Sequence[StatisticSpec],
        owners: Mapping[str, int],
        world: int,
        cost: CostModel,
        most: int,
        profile: HardwareProfile,
    ) -> None:
        self.owners, self.world, self.cost = owners, world, cost
        self.most, self.profile = most, profile
        self.splits: list[Split] = []
        self.loads = [0.0] * world
        for spec in specs:
            self.loads[owners[spec.name]] += cost.invert(spec)
        fair = sum(self.loads) / world
        large = [s for s in specs if not s.diagonal and cost.invert(s) > fair]
        for spec in sorted(large, key=lambda s: (-cost.invert(s), s.name)):
            if self.loads[owners[spec.name]] == max(self.loads):
                self._divide(spec)

    @property
    def finish(self) -> float:
        """When the slowest rank is done; exchanges of several run side by side."""
        moved = (2 * s.exchange_seconds(self.profile) for s in self.splits)
        return max(self.loads) + max(moved, default=0.0)

    def _divide(self, spec: StatisticSpec) -> None:
        """Find the best number of helpers for one factor; adds to their loads."""
        owner, loads = self.owners[spec.name], self.loads
        rest = loads[owner] - self.cost.invert(spec)
        idle = heapq.nsmallest(
            min(self.most, self.world), range(self.world), key=lambda r: (loads[r], r)
        )
        helpers = [rank for rank in idle if rank != owner][: self.most - 1]
        best, finish = None, loads[owner]
        for count in range(1, len(helpers) + 1):
            trial = Split(spec=spec, ranks=(owner, *helpers[:count]))
            busiest = max([rest, *(loads[rank] for rank in helpers[:count])])
            moved = 2 * trial.exchange_seconds(self.profile)
            end = busiest + trial.seconds(self.cost) + moved
            if end < finish:
                best, finish = trial, end
        if best is not None:
            self.splits.append(best)
            loads[owner] = rest
            for rank in best.ranks:
                loads[rank] += best.seconds(self.cost)
