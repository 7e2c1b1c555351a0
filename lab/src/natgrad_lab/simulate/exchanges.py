"""The exchanges of a simulated step: when each can start and what it takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from natgrad.plan import (
    EXCHANGES,
    Departure,
    HardwareProfile,
    Leg,
    Plan,
    Wiring,
    departures,
    reductions,
)
from natgrad.plan.autotune import (
    agree_seconds,
    departure_seconds,
    exchange_seconds,
    is_measured,
    scaled,
    sgd_exchange,
)
from natgrad_lab.simulate.events import Task, Timeline
from natgrad_lab.simulate.policy import Kind
from natgrad_lab.simulate.roles import Conditions
from natgrad_lab.simulate.work import Work

NETWORK = "network"
Ready = Mapping[float, Mapping[str, Task]]
"""Tasks of a pass, by the speed of the ranks that do it and by layer."""


def whole(_: str) -> float:
    """The weight of what is always sent."""
    return 1.0


@dataclass(kw_only=True)
class Exchanges:
    """Adds exchanges to a timeline, on the one stream "network".

    By the formula a reduction goes bucket by bucket, each after the layers that fill
    it, in the plan's order. Where exchanges were measured, each is one task, and what
    of it overlaps compute another.
    """

    work: Work
    profile: HardwareProfile
    conditions: Conditions
    plan: Plan
    kind: Kind
    sgd: bool = False
    timeline: Timeline = field(default_factory=Timeline)

    @property
    def measured(self) -> bool:
        """Whether exchanges of this world were measured."""
        return is_measured(self.profile, self.plan.world)

    def _reduce(self, forward: Ready, backward: Ready) -> list[Task]:
        """The reductions of a step, in the plan's order; see `natgrad.plan.sequence`.

        By the formula each bucket is a task, after the layers that fill it.
        """
        if self.plan.world == 1:
            return []
        if self.measured:
            sent = self._send_measured("reduce_statistics", "left", backward)
            sent += self._send_measured("reduce_gradients", "", backward)
            return sent + self._swap(sent[-1:])
        legs: Sequence[Leg] = ()
        if not self.sgd:
            due = [s.name for s in self.plan.statistics if self.kind.estimates(s.name)]
            legs = reductions(self.plan, due, early=True)
        weights = {n: self.kind.estimates(n) for x in legs for n in x.names if "/" in n}
        wiring = scaled(self.plan, legs, self._wiring, weights)
        first, second = departures(self.plan, legs, wiring)
        ready = {"forward": forward, "backward": backward}
        tasks: list[Task] = []
        for departure in first:
            seconds = self._departure(departure, legs[departure.leg].exchange, weights)
            tasks.append(self._ship(legs, departure, seconds, ready))
        if self._averaged:
            tasks += self._all_reduce(backward)
        if legs:
            tasks += self._agree(1, tasks[-1:], "control")
        busy = Counter[int]()
        for departure in second:
            seconds = departure_seconds(departure, self.profile, weights)
            busy.update(dict.fromkeys(departure.bucket.ranks, seconds))
        if second:
            spread = "reduce_gradients"
            last = max(busy.values())
            tasks.append(self.timeline.add(spread, spread, NETWORK, last, tasks[-1:]))
        return tasks + self._swap(tasks[-1:])

    def _swap(self, after: Sequence[Task]) -> list[Task]:
        """The pieces of a sharded model's gradients, to their workers."""
        if self.sgd or not self.plan.exchanges["reduce_gradients"].swaps:
            return []
        task = self._share("reduce_gradients", dict(enumerate(after)), whole)
        return [task] if task else []

    @property
    def _averaged(self) -> bool:
        """Whether DDP or `fully_shard` averages gradients."""
        return self.sgd or self.plan.gradients != "own"

    @property
    def _ways(self) -> int:
        """How often an average moves all weights, in reduce-scatters and all-gathers.

        `fully_shard` gathers them in the forward and in the backward.
        """
        return 3 if self.plan.gradients == "sharded" else 2

    @property
    def _wiring(self) -> Wiring:
        conditions = self.conditions
        return Wiring(
            bucket_bytes=conditions.bucket_bytes,
            sent_bytes={x: conditions.element_bytes(x) for x in EXCHANGES},
            way=self.profile.way,
        )

    def _departure(
        self, departure: Departure, exchange: str, weights: Mapping[str, float]
    ) -> float:
        seconds = departure_seconds(departure, self.profile, weights)
        # A whole matrix is twice its triangle, but for the diagonal.
        whole = exchange == "reduce_statistics" and not self.conditions.packed
        return 2 * seconds if whole else seconds

    def _send_measured(self, exchange: str, side: str, ready: Ready) -> list[Task]:
        """A whole exchange as it was measured, after the pass but for its overlap."""
        if side and (self.sgd or not self.kind.estimated):
            return []
        if not side and self._averaged:
            seconds = sgd_exchange(self.plan.blocks, self.plan.world, self.profile)
            seconds *= self._ways / 2
        else:
            names = [item.name for item in self.plan.exchanges[exchange].items]
            due = self.kind.estimates if side else whole
            seconds = self._seconds(exchange, names, {n: due(n) for n in names})
        hidden = self.profile.overlap if self.conditions.overlap else 0.0
        layers = self.work.layers
        middle, last = layers[len(layers) // 2].spec.name, layers[0].spec.name
        waits = [[t[middle] for t in ready.values()], [t[last] for t in ready.values()]]
        parts = ((exchange, hidden), (f"rest of {exchange}", 1 - hidden))
        return [
            self.timeline.add(name, exchange, NETWORK, share * seconds, after)
            for (name, share), after in zip(parts, waits, strict=True)
        ]

    def _seconds(
        self, exchange: str, names: Sequence[str], weights: Mapping[str, float]
    ) -> float:
        return exchange_seconds(
            self.plan,
            exchange,
            self.profile,
            names=names,
            weights=weights,
            element_bytes=self.conditions.element_bytes(exchange),
            bucket_bytes=self.conditions.bucket_bytes,
        )

    def _all_reduce(self, ready: Ready) -> list[Task]:
        """DDP's buckets, as in SGD, or `fully_shard`'s."""
        world, each = self.plan.world, self.conditions.element_bytes("reduce_gradients")
        tasks: list[Task] = []
        bucket: list[str] = []
        size = 0.0
        layers = self.work.layers[::-1]
        for index, layer in enumerate(layers):
            bucket.append(layer.spec.name)
            size += each * layer.spec.elements
            if size >= self.conditions.bucket_bytes or index == len(layers) - 1:
                seconds = self._ways * self.profile.move(size, world)
                tasks.append(self._ship_blocks(bucket, seconds, ready))
                bucket, size = [], 0.0
        return tasks

    def _ship(
        self,
        legs: Sequence[Leg],
        departure: Departure,
        seconds: float,
        ready: Mapping[str, Ready],
    ) -> Task:
        """A bucket, after what makes its last item."""
        names = [p.name for p in departure.bucket.parcels]
        exchange = legs[departure.leg].exchange
        phase, block = departure.after
        if not self.conditions.overlap:
            phase, block = "backward", self.work.layers[0].spec.name
        after = [tasks[block] for tasks in ready[phase].values() if block in tasks]
        label = f"{names[0]} +{len(names) - 1}" if len(names) > 1 else names[0]
        return self.timeline.add(label, exchange, NETWORK, seconds, after)

    def _ship_blocks(self, blocks: Sequence[str], seconds: float, ready: Ready) -> Task:
        """A bucket of DDP's."""
        last = blocks[-1]
        if not self.conditions.overlap:
            last = self.work.layers[0].spec.name
        after = [tasks[last] for tasks in ready.values()]
        label = f"{blocks[0]} +{len(blocks) - 1}" if len(blocks) > 1 else blocks[0]
        return self.timeline.add(label, "reduce_gradients", NETWORK, seconds, after)

    def _agree(
        self, times: float, after: Iterable[Task], phase: str = "agree"
    ) -> list[Task]:
        """Small sums that all ranks wait for."""
        seconds = times * agree_seconds(self.profile, self.plan.world)
        if not seconds:
            return []
        return [self.timeline.add(phase, phase, NETWORK, seconds, after)]

    def _share(
        self, exchange: str, after: Mapping[int, Task], weight: Callable[[str], float]
    ) -> Task | None:
        items = self.plan.exchanges[exchange].items
        weights = {i.name: weight(i.name) for i in items if weight(i.name)}
        names = list(weights)
        if not names or self.plan.world == 1:
            return None
        seconds = self._seconds(exchange, names, weights)
        return self.timeline.add(exchange, exchange, NETWORK, seconds, after.values())
