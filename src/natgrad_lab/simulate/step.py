"""The events of one training step, built from a plan.

Ranks that do the same are simulated once: forward and backward once for each speed
(normal, and stragglers), inversion and preconditioning once for each role. A role is
the set of statistics a rank owns and of blocks it alone works on. Idle ranks are one
role however many they are, so that 100,000 ranks cost no more than 1,000. A collective
needs all ranks: it is one task on the one stream "network".
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from natgrad.plan import BlockSpec, HardwareProfile, Plan, StatisticSpec
from natgrad.plan.predict import exchange_seconds
from natgrad.plan.split import Split
from natgrad_lab.simulate.events import Task, Timeline
from natgrad_lab.simulate.policy import Kind
from natgrad_lab.simulate.roles import Conditions, label, roles_of
from natgrad_lab.simulate.work import Layer, Work

NETWORK = "network"


@dataclass(kw_only=True)
class StepBuilder:
    """Adds a step's tasks to a timeline, in the order in which the library runs it."""

    work: Work
    profile: HardwareProfile
    conditions: Conditions
    plan: Plan
    kind: Kind
    splits: Sequence[Split] = ()
    sgd: bool = False
    timeline: Timeline = field(default_factory=Timeline)

    def build(self) -> Timeline:
        """Forward and backward with overlapped exchanges, then the curvature."""
        self.roles, self.columns = roles_of(self.plan, self.conditions)
        self.costs = {s.name: self.plan.cost.invert(s) for s in self.plan.statistics}
        self.speeds = Counter[float]()
        for role in self.roles:
            self.speeds[role.speed] += role.ranks
        ends, sent = self._passes()
        if self.sgd:
            self._update({}, ends, sent)
        else:
            self._curvature(ends, sent)
        return self.timeline

    # -- forward and backward ---------------------------------------------------------

    def _passes(self) -> tuple[dict[float, Task], list[Task]]:
        """The last compute task by speed, and what is on the network until then."""
        for speed in self.speeds if self.profile.step else ():
            stream, seconds = f"compute x{speed:g}", speed * self.profile.step
            self.timeline.add("host", "host", stream, seconds)
        forward = self._front("forward", self.work.layers)
        sent = self._send("reduce_statistics", "right", forward)
        if self.conditions.sampled and self.kind.estimated > 0 and not self.sgd:
            self._front("sampled backward", self.work.layers[::-1])
        backward = self._front("backward", self.work.layers[::-1])
        sent += self._send("reduce_statistics", "left", backward)
        sent += self._send("reduce_gradients", "", backward)
        last = self.work.layers[0].spec.name
        return {speed: tasks[last] for speed, tasks in backward.items()}, sent

    def _front(
        self, phase: str, layers: Sequence[Layer]
    ) -> dict[float, dict[str, Task]]:
        """A pass on every speed: tasks by layer, its statistics right after it."""
        found: dict[float, dict[str, Task]] = {}
        for speed, ranks in self.speeds.items():
            scale = speed * self._scale(ranks)
            found[speed] = {
                layer.spec.name: self._layer(phase, layer, scale, f"compute x{speed:g}")
                for layer in layers
            }
        return found

    def _layer(self, phase: str, layer: Layer, scale: float, stream: str) -> Task:
        name = layer.spec.name
        seconds = self._pass_seconds(phase, layer)
        task = self.timeline.add(name, phase, stream, scale * seconds)
        own = "sampled backward" if self.conditions.sampled else "backward"
        estimating = not self.sgd and self.kind.estimated > 0
        if not estimating or phase not in ("forward", own):
            return task
        seconds = sum(
            self._statistic_seconds(layer, s)
            for s in layer.spec.statistics
            if (s.kind == "A") == (phase == "forward")
        )
        if not seconds:
            return task
        return self.timeline.add(name, "statistics", stream, scale * seconds)

    def _pass_seconds(self, phase: str, layer: Layer) -> float:
        times = self.profile.models.get(self.work.name)
        times_two = 1 if phase == "forward" else 2
        if times is not None:
            whole = times.forward if phase == "forward" else times.backward
            share = (1 + layer.forward_flops) / self._all_flops
            return whole * share * self.conditions.batch / times.batch
        rate = self.profile.conv_flop if layer.convolves else self.profile.flop
        flops = times_two * layer.forward_flops * self.conditions.batch
        return times_two * self.profile.layer + rate * flops

    def _statistic_seconds(self, layer: Layer, spec: StatisticSpec) -> float:
        flops = layer.statistic_flops(spec)
        times = self.profile.models.get(self.work.name)
        if times is not None:
            share = flops / self._statistics_flops
            seconds = times.statistics * share * self.conditions.batch / times.batch
        else:
            rate = self.profile.statistics_flop
            seconds = self.profile.layer + rate * flops * self.conditions.batch
        return self.kind.estimated * seconds

    @property
    def _all_flops(self) -> float:
        return sum(1 + layer.forward_flops for layer in self.work.layers)

    @property
    def _statistics_flops(self) -> float:
        return sum(
            layer.statistic_flops(s)
            for layer in self.work.layers
            for s in layer.spec.statistics
        )

    def _scale(self, ranks: int) -> float:
        noise = self.conditions.jitter * math.sqrt(2 * math.log(max(1, ranks)))
        return (1 + noise) * self.profile.slowdown(self.plan.world)

    # -- exchanges --------------------------------------------------------------------

    def _send(
        self, exchange: str, side: str, ready: Mapping[float, Mapping[str, Task]]
    ) -> list[Task]:
        """Buckets of an exchange, each after the layers that fill it."""
        if self.plan.world == 1:
            return []
        if exchange == "reduce_gradients":
            if self.sgd or self.plan.gradients == "ddp":
                return self._all_reduce(ready)
            names = [layer.spec.name for layer in self.work.layers[::-1]]
            weights = dict.fromkeys(names, 1.0)
        else:
            if self.sgd or not self.kind.estimated:
                return []
            names = self._statistics(side)
            weights = dict.fromkeys(names, self.kind.estimated)
        tasks: list[Task] = []
        for bucket in self._buckets(exchange, names, weights):
            seconds = self._seconds(exchange, bucket, weights)
            tasks.append(self._ship(exchange, bucket, seconds, ready))
        return tasks

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

    # -- curvature --------------------------------------------------------------------

    def _curvature(self, ends: Mapping[float, Task], sent: Sequence[Task]) -> None:
        inverted = self._invert(ends, sent)
        shared = self._share("share_inverses", inverted, self.kind.inverted)
        applied = self._precondition(inverted, shared)
        updated = self._share("share_updates", applied, 1.0)
        self._update(applied, ends, [updated] if updated else [])

    def _invert(
        self, ends: Mapping[float, Task], sent: Sequence[Task]
    ) -> dict[int, Task]:
        outs, helped = self._split_out(sent)
        tasks: dict[int, Task] = {}
        for index, role in enumerate(self.roles):
            mine = sum(self.costs[name] for name in role.owned if name not in helped)
            mine += sum(
                split.seconds for split in self.splits if role.first in split.ranks
            )
            seconds = self.kind.inverted * mine * role.speed
            seconds *= self.profile.slowdown(self.plan.world)
            waits = [ends[role.speed], *sent[-1:], *outs]
            stream = f"role {index}"
            tasks[index] = self.timeline.add(
                label(role), "invert", stream, seconds, waits
            )
        return tasks

    def _split_out(self, sent: Sequence[Task]) -> tuple[list[Task], set[str]]:
        """The exchanges of divided factors, out and back, before the inversions."""
        if not self.splits or not self.kind.inverted:
            return [], set()
        seconds = max(s.exchange_seconds(self.profile) for s in self.splits)
        task = self.timeline.add(
            "divided factors",
            "share_inverses",
            NETWORK,
            self.kind.inverted * seconds,
            sent[-1:],
        )
        return [task], {split.name for split in self.splits}

    def _share(
        self, exchange: str, after: Mapping[int, Task], weight: float
    ) -> Task | None:
        names = [item.name for item in self.plan.exchanges[exchange].items]
        if not names or not weight or self.plan.world == 1:
            return None
        weights = dict.fromkeys(names, weight)
        buckets = self._buckets(exchange, names, weights)
        seconds = sum(self._seconds(exchange, each, weights) for each in buckets)
        return self.timeline.add(exchange, exchange, NETWORK, seconds, after.values())

    def _precondition(
        self, inverted: Mapping[int, Task], shared: Task | None
    ) -> dict[int, Task]:
        by_all = [b for c in self.columns for b in c if self._by_all(b)]
        everyone = sum(map(self.plan.cost.precondition, by_all))
        tasks: dict[int, Task] = {}
        for index, role in enumerate(self.roles):
            mine = [b for c in role.columns for b in self.columns[c]]
            seconds = everyone + sum(map(self.plan.cost.precondition, mine))
            seconds *= role.speed * self.profile.slowdown(self.plan.world)
            waits = [inverted[index], shared]
            tasks[index] = self.timeline.add(
                label(role), "precondition", f"role {index}", seconds, waits
            )
        return tasks

    def _by_all(self, block: BlockSpec) -> bool:
        return len(self.plan.workers[block.name]) == self.plan.world

    def _update(
        self,
        applied: Mapping[int, Task],
        ends: Mapping[float, Task],
        sent: Sequence[Task],
    ) -> None:
        times = self.profile.models.get(self.work.name)
        seconds = self.profile.element * self.work.parameters
        if times is not None:
            seconds = times.update
        for speed, end in ends.items():
            mine = [t for i, t in applied.items() if self.roles[i].speed == speed]
            stream = f"compute x{speed:g}"
            scale = speed * self.profile.slowdown(self.plan.world)
            waits = [end, *sent[-1:], *mine]
            self.timeline.add("update", "update", stream, scale * seconds, waits)
