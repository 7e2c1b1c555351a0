"""The events of one training step, built from a plan.

Ranks that do the same are simulated once: forward and backward once for each speed
(normal, and stragglers), inversion and preconditioning once for each role. A role is
the set of statistics a rank owns and of blocks it alone works on. Idle ranks are one
role however many they are, so that 100,000 ranks cost no more than 1,000. A collective
needs all ranks: it is one task on the one stream "network".

Seconds are the profile's: by operation, or, for a model that was measured on one rank,
that model's own, divided in proportion to the operations. Ranks that share cores slow
each other as `HardwareProfile.finish` says.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from natgrad.plan import BlockSpec, StatisticSpec
from natgrad.plan.autotune import AGREEMENTS
from natgrad_lab.simulate.events import Task, Timeline
from natgrad_lab.simulate.exchanges import Exchanges, whole
from natgrad_lab.simulate.roles import label, roles_of
from natgrad_lab.simulate.work import Layer

MEASURED = ("eigen", "kronecker")
"""The inverse and rule of which `ModelTimes` has the seconds."""


@dataclass(kw_only=True)
class StepBuilder(Exchanges):
    """Adds a step's tasks to a timeline, in the order in which the library runs it."""

    scale: str = "kronecker"
    subsample: int | None = 1

    def build(self) -> Timeline:
        """Forward and backward with overlapped exchanges, then the curvature."""
        self.roles, self.columns = roles_of(self.plan, self.conditions)
        self.times = self.profile.models.get(self.work.name)
        self._price()
        self.speeds = Counter[float]()
        for role in self.roles:
            self.speeds[role.speed] += role.ranks
        ends, sent = self._passes()
        if self.sgd:
            self._update({}, ends, sent)
        else:
            self._curvature(ends, sent)
        return self.timeline

    def _price(self) -> None:
        """Seconds of each inversion and of preconditioning each block, alone."""
        cost = self.profile.cost(self.plan.inverse, self.scale)
        self.costs = {s.name: cost.invert(s) for s in self.plan.statistics}
        self.applies = {b.name: cost.precondition(b) for b in self.plan.blocks}
        if self.times is not None and (self.plan.inverse, self.scale) == MEASURED:
            _scale_to(self.costs, self.times.invert)
            _scale_to(self.applies, self.times.precondition)

    # -- forward and backward ---------------------------------------------------------

    def _passes(self) -> tuple[dict[float, Task], list[Task]]:
        """The last compute task by speed, and what is on the network until then."""
        for speed in self.speeds if self.profile.step else ():
            stream, seconds = f"compute x{speed:g}", speed * self.profile.step
            self.timeline.add("host", "host", stream, seconds)
        forward = self._front("forward", self.work.layers)
        if self.conditions.sampled and self.kind.estimated > 0 and not self.sgd:
            self._front("sampled backward", self.work.layers[::-1])
        backward = self._front("backward", self.work.layers[::-1])
        sent = self._reduce(forward, backward)
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
        times, times_two = self.times, 1 if phase == "forward" else 2
        if times is not None:
            whole = times.forward if phase == "forward" else times.backward
            share = (1 + layer.forward_flops) / self._all_flops
            return whole * share * self.conditions.batch / times.batch
        flops = times_two * layer.forward_flops * self.conditions.batch
        width = (0.5 * layer.forward_flops * self.conditions.batch) ** (1 / 3)
        rate = self.profile.conv_flop
        if not layer.convolves:
            rate = self.profile.product(width)
        return times_two * self.profile.layer + rate * flops

    def _statistic_seconds(self, layer: Layer, spec: StatisticSpec) -> float:
        flops, times = layer.statistic_flops(spec), self.times
        batch = layer.looked_at(self.conditions.batch, self.plan.world, self.subsample)
        if times is not None:
            share = flops / self._statistics_flops
            seconds = times.statistics * share * batch / times.batch
        else:
            rate = self.profile.statistics_flop
            if layer.convolves and spec.kind == "A":
                rate = self.profile.conv_statistics_flop or rate
            call = self.profile.layer + self.profile.statistic
            seconds = call + rate * flops * batch
        return self.kind.estimates(spec.name) * seconds

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

    # -- curvature --------------------------------------------------------------------

    def _curvature(self, ends: Mapping[float, Task], sent: Sequence[Task]) -> None:
        sent = [*sent, *self._agree(1, [*ends.values(), *sent[-1:]])]
        inverted = self._invert(ends, sent)
        agreed = self._agree(1 if self.kind.inverted else 0, inverted.values())
        shared = self._share("share_inverses", inverted, self.kind.inverts)
        last = shared or next(iter(agreed), None)
        applied = self._precondition(inverted, last)
        agreed = self._agree(AGREEMENTS - 1, applied.values())
        updated = self._share("share_updates", applied, whole)
        self._update(applied, ends, [updated] if updated else agreed)

    def _sharing_cores(self, loads: Sequence[float]) -> list[float]:
        """Seconds of each role, from what it would need alone."""
        world = self.plan.world
        if self.profile.nodes(world)[1] > 1:
            return [self.profile.slowdown(world) * load for load in loads]
        pairs = zip(self.roles, loads, strict=True)
        ends = self.profile.finish([x for role, x in pairs for _ in range(role.ranks)])
        last = itertools.accumulate(role.ranks for role in self.roles)
        return [
            max(ends[n - r.ranks : n]) for r, n in zip(self.roles, last, strict=True)
        ]

    def _invert(
        self, ends: Mapping[float, Task], sent: Sequence[Task]
    ) -> dict[int, Task]:
        loads: list[float] = []
        for role in self.roles:
            mine = sum(self.costs[x] * self.kind.inverts(x) for x in role.owned)
            loads.append(mine * role.speed)
        tasks: dict[int, Task] = {}
        for index, seconds in enumerate(self._sharing_cores(loads)):
            role = self.roles[index]
            waits = [ends[role.speed], *sent[-1:]]
            stream = f"role {index}"
            tasks[index] = self.timeline.add(
                label(role), "invert", stream, seconds, waits
            )
        return tasks

    def _precondition(
        self, inverted: Mapping[int, Task], shared: Task | None
    ) -> dict[int, Task]:
        by_all = [b for c in self.columns for b in c if self._by_all(b)]
        everyone = sum(self.applies[b.name] for b in by_all)
        loads: list[float] = []
        for role in self.roles:
            mine = [b for c in role.columns for b in self.columns[c]]
            seconds = everyone + sum(self.applies[b.name] for b in mine)
            loads.append(role.speed * seconds)
        tasks: dict[int, Task] = {}
        for index, seconds in enumerate(self._sharing_cores(loads)):
            waits = [inverted[index], shared]
            tasks[index] = self.timeline.add(
                label(self.roles[index]),
                "precondition",
                f"role {index}",
                seconds,
                waits,
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
        seconds = self.profile.element * self.work.parameters
        own = self.profile.block * len(self.plan.blocks)
        if self.times is not None:
            seconds, own = self.times.update, self.times.overhead
        for speed, end in ends.items():
            mine = [t for i, t in applied.items() if self.roles[i].speed == speed]
            stream = f"compute x{speed:g}"
            scale = speed * self.profile.slowdown(self.plan.world)
            waits = [end, *sent[-1:], *mine]
            if own and not self.sgd:
                self.timeline.add("library", "overhead", stream, scale * own, waits)
            self.timeline.add("update", "update", stream, scale * seconds, waits)


def _scale_to(seconds: dict[str, float], total: float) -> None:
    """Make them sum to what was measured, if it was."""
    now = sum(seconds.values())
    if total and now:
        for name in seconds:
            seconds[name] *= total / now
