"""A discrete-event simulation of tasks on streams.

A stream runs its tasks one at a time, in the order in which they were added, as a GPU
stream or a network does. A task starts when its stream is free and all tasks it waits
for are done.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(kw_only=True)
class Task:
    """One piece of work. ``start`` and ``end`` are set by `Timeline.run`."""

    name: str
    phase: str
    stream: str
    seconds: float
    after: tuple[Task, ...] = ()
    start: float = 0.0
    end: float = 0.0
    cause: Task | None = field(default=None, repr=False)
    """The task whose end let this one start."""


class Timeline:
    """Tasks, and after `run` when each of them started and ended."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []

    def add(
        self,
        name: str,
        phase: str,
        stream: str,
        seconds: float,
        after: Iterable[Task | None] = (),
    ) -> Task:
        """Append a task to its stream."""
        if seconds < 0:
            raise ValueError(f"Invalid seconds={seconds} of {name!r}. Must be >= 0.")
        waits = tuple(task for task in after if task is not None)
        task = Task(name=name, phase=phase, stream=stream, seconds=seconds, after=waits)
        self.tasks.append(task)
        return task

    def run(self) -> float:
        """Simulate; the time at which the last task ends."""
        queues: dict[str, deque[Task]] = defaultdict(deque)
        followers: dict[int, list[Task]] = defaultdict(list)
        waiting: dict[int, int] = {}
        for task in self.tasks:
            queues[task.stream].append(task)
            waiting[id(task)] = len(task.after)
            for other in task.after:
                followers[id(other)].append(task)
        running: list[tuple[float, int, Task]] = []
        ready_of = _Starter(queues, waiting, running)
        for stream in list(queues):
            ready_of.start(stream, 0.0, None)
        done = 0
        now = 0.0
        while running:
            now, _, task = heapq.heappop(running)
            done += 1
            queues[task.stream].popleft()
            ready_of.busy.discard(task.stream)
            for other in followers[id(task)]:
                waiting[id(other)] -= 1
                ready_of.start(other.stream, now, task)
            ready_of.start(task.stream, now, task)
        if done < len(self.tasks):
            raise ValueError(f"{len(self.tasks) - done} tasks wait for each other.")
        return now

    def critical(self) -> list[Task]:
        """The chain of tasks that decides the end, first to last."""
        task = max(self.tasks, key=lambda t: t.end, default=None)
        chain: list[Task] = []
        while task is not None:
            chain.append(task)
            task = task.cause
        return chain[::-1]

    def phases(self) -> dict[str, float]:
        """Seconds of the critical chain by phase; they sum to the end."""
        totals: dict[str, float] = {}
        for task in self.critical():
            totals[task.phase] = totals.get(task.phase, 0.0) + task.seconds
        return totals

    def busy(self) -> dict[str, float]:
        """Seconds of all tasks by phase, whether overlapped or not, on any stream."""
        totals: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for task in self.tasks:
            totals[task.phase][task.stream] += task.seconds
        return {phase: max(each.values()) for phase, each in totals.items()}


class _Starter:
    """Starts the head of a stream when nothing holds it back."""

    def __init__(
        self,
        queues: dict[str, deque[Task]],
        waiting: dict[int, int],
        running: list[tuple[float, int, Task]],
    ) -> None:
        self.queues, self.waiting, self.running = queues, waiting, running
        self.busy: set[str] = set()
        self.count = 0

    def start(self, stream: str, now: float, cause: Task | None) -> None:
        queue = self.queues[stream]
        if stream in self.busy or not queue or self.waiting[id(queue[0])]:
            return
        task = queue[0]
        self.busy.add(stream)
        task.start, task.end, task.cause = now, now + task.seconds, cause
        self.count += 1
        heapq.heappush(self.running, (task.end, self.count, task))


def streams(tasks: Sequence[Task]) -> list[str]:
    """The streams in use, in the order of their first task."""
    return list(dict.fromkeys(task.stream for task in tasks))
