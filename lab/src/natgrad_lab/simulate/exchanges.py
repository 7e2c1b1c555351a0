"""The exchanges of a simulated step: when each can start and what it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from natgrad.plan import HardwareProfile, Plan
from natgrad.plan.autotune import (
    agree_seconds,
    exchange_seconds,
    is_measured,
    sgd_exchange,
)
from natgrad_lab.simulate.events import Task, Timeline
from natgrad_lab.simulate.policy import Kind
from natgrad_lab.simulate.roles import Conditions
from natgrad_lab.simulate.work import Work

NETWORK = "network"


def whole(_: str) -> float:
    """The weight of what is always sent."""
    return 1.0


@dataclass(kw_only=True)
class Exchanges:
    """Adds exchanges to a timeline, on the one stream "network".

    By the formula an exchange goes bucket by bucket, each after the layers that fill
    it. Where exchanges were measured, it is one task, and what of it overlaps compute
    another.
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

    def _send(
        self, exchange: str, side: str, ready: Mapping[float, Mapping[str, Task]]
    ) -> list[Task]:
        """Buckets of an exchange, each after the layers that fill it."""
        if self.plan.world == 1:
            return []
        if self.measured:
            return self._send_measured(exchange, side, ready)
        if exchange == "reduce_gradients":
            if self.sgd or self.plan.gradients == "ddp":
                return self._all_reduce(ready)
            names = [layer.spec.name for layer in self.work.layers[::-1]]
            weights = dict.fromkeys(names, 1.0)
        else:
            if self.sgd or not self.kind.estimated:
                return []
            names = self._statistics(side)
            weights = {name: self.kind.estimates(name) for name in names}
        tasks: list[Task] = []
        for bucket in self._buckets(exchange, names, weights):
            seconds = self._seconds(exchange, bucket, weights)
            tasks.append(self._ship(exchange, bucket, seconds, ready))
        return tasks

    def _send_measured(
        self, exchange: str, side: str, ready: Mapping[float, Mapping[str, Task]]
    ) -> list[Task]:
        """A whole exchange as it was measured, after the pass but for its overlap."""
        if side == "right" or (side and (self.sgd or not self.kind.estimated)):
            return []  # the library sends all statistics in one exchange
        if not side and (self.sgd or self.plan.gradients == "ddp"):
            seconds = sgd_exchange(self.plan.blocks, self.plan.world, self.profile)
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

    def _statistics(self, side: str) -> list[str]:
        blocks = self.plan.blocks if side == "right" else self.plan.blocks[::-1]
        forward = side == "right"
        specs = [s for block in blocks for s in block.statistics]
        return [s.name for s in specs if (s.kind == "A") == forward]

    def _buckets(
        self, exchange: str, names: Iterable[str], weights: Mapping[str, float]
    ) -> list[list[str]]:
        limit = self.conditions.bucket_bytes
        each = self.conditions.element_bytes(exchange)
        buckets: list[list[str]] = [[]]
        held = 0.0
        for item in self.plan.exchanges[exchange].select(names):
            size = each * item.elements * weights[item.name]
            if buckets[-1] and held + size > limit:
                buckets.append([])
                held = 0.0
            buckets[-1].append(item.name)
            held += size
        return [bucket for bucket in buckets if bucket]

    def _seconds(
        self, exchange: str, names: Sequence[str], weights: Mapping[str, float]
    ) -> float:
        seconds = exchange_seconds(
            self.plan,
            exchange,
            self.profile,
            names=names,
            weights=weights,
            element_bytes=self.conditions.element_bytes(exchange),
        )
        # A whole matrix is twice its triangle, but for the diagonal.
        whole = exchange == "reduce_statistics" and not self.conditions.packed
        return 2 * seconds if whole else seconds

    def _all_reduce(self, ready: Mapping[float, Mapping[str, Task]]) -> list[Task]:
        """DDP's buckets, as in SGD."""
        world, each = self.plan.world, self.conditions.element_bytes("reduce_gradients")
        tasks: list[Task] = []
        bucket: list[str] = []
        size = 0.0
        layers = self.work.layers[::-1]
        for index, layer in enumerate(layers):
            bucket.append(layer.spec.name)
            size += each * layer.spec.elements
            if size >= self.conditions.bucket_bytes or index == len(layers) - 1:
                seconds = 2 * self.profile.move(size, world)
                tasks.append(self._ship("reduce_gradients", bucket, seconds, ready))
                bucket, size = [], 0.0
        return tasks

    def _ship(
        self,
        exchange: str,
        names: Sequence[str],
        seconds: float,
        ready: Mapping[float, Mapping[str, Task]],
    ) -> Task:
        blocks = [name.rsplit("/", 1)[0] for name in names]
        if self.conditions.overlap:
            after = [tasks[block] for tasks in ready.values() for block in blocks]
        else:
            last = self.work.layers[0].spec.name
            after = [tasks[last] for tasks in ready.values()]
        label = f"{names[0]} +{len(names) - 1}" if len(names) > 1 else names[0]
        return self.timeline.add(label, exchange, NETWORK, seconds, after)

    def _agree(self, times: float, after: Iterable[Task]) -> list[Task]:
        """Small sums that all ranks wait for, if their seconds are known."""
        seconds = times * agree_seconds(self.profile, self.plan.world)
        if not seconds:
            return []
        return [self.timeline.add("agree", "agree", NETWORK, seconds, after)]

    def _share(
        self, exchange: str, after: Mapping[int, Task], weight: Callable[[str], float]
    ) -> Task | None:
        items = self.plan.exchanges[exchange].items
        weights = {i.name: weight(i.name) for i in items if weight(i.name)}
        names = list(weights)
        if not names or self.plan.world == 1:
            return None
        buckets = self._buckets(exchange, names, weights)
        if self.measured:
            buckets = [names]  # cut into buckets where it was measured
        seconds = sum(self._seconds(exchange, each, weights) for each in buckets)
        return self.timeline.add(exchange, exchange, NETWORK, seconds, after.values())
