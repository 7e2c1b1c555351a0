"""Seconds of a step by phase: what diagnostics show and what `Budget` spends.

Phases are named as in a step: ``estimate`` (hooks, by statistic), ``sampled`` (the
extra backward), ``reduce`` (sums to owners), ``refresh``, in it ``invert`` (by
statistic), ``precondition`` (by block), and ``step``, which holds all but the first
two. Two parts of ``step`` are what any optimizer has: ``gradients`` (their reduction)
and ``update``.

On a GPU work is timed by events on its stream and read later, without waiting for it.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, Protocol, TypeVar

import torch

Seconds = dict[tuple[str, str], float]
Names = str | Mapping[str, float]
P = ParamSpec("P")
R = TypeVar("R")


class Meter:
    """Adds up seconds by ``(phase, name)``; idle, at next to no cost, until started."""

    def __init__(
        self, device: torch.device, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.clock = clock
        self.running = False
        self._cuda = device.type == "cuda"
        self._seconds: Seconds = defaultdict(float)
        self._events: list[tuple[str, Names, Any, Any]] = []

    @contextmanager
    def __call__(self, phase: str, names: Names = "") -> Generator[None]:
        """Count the time inside under a name, or under several by their shares."""
        if not self.running:
            yield
            return
        stop = self._start(phase, names)
        try:
            yield
        finally:
            stop()

    def _start(self, phase: str, names: Names) -> Callable[[], None]:
        if not self._cuda:
            began = self.clock()
            return lambda: self._add(phase, names, self.clock() - began)
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()

        def stop() -> None:
            last.record()
            self._events.append((phase, names, first, last))

        return stop

    def _add(self, phase: str, names: Names, seconds: float) -> None:
        shares = {names: 1.0} if isinstance(names, str) else names
        whole = sum(shares.values())
        for name, share in shares.items():
            self._seconds[phase, name] += seconds * share / whole

    def totals(self) -> Seconds:
        """Seconds since it was started, of all that the device has finished."""
        pending, self._events = self._events, []
        for phase, names, first, last in pending:
            if last.query():
                self._add(phase, names, first.elapsed_time(last) / 1000)
            else:
                self._events.append((phase, names, first, last))
        return dict(self._seconds)


class Reader:
    """One of several that read a meter, each in its own time."""

    def __init__(self, meter: Meter) -> None:
        meter.running = True
        self._meter, self._before = meter, meter.totals()

    def take(self) -> Seconds:
        """Seconds since the last `take`."""
        now = self._meter.totals()
        before, self._before = self._before, now
        return {key: value - before.get(key, 0.0) for key, value in now.items()}


def phase_sum(seconds: Seconds, *phases: str) -> float:
    """The seconds of all names of some phases."""
    return sum(value for (phase, _), value in seconds.items() if phase in phases)


class _HasMeter(Protocol):
    meter: Meter


def metered(phase: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Count a method's time under ``phase`` on its object's ``meter``."""

    def decorate(method: Callable[P, R]) -> Callable[P, R]:
        @wraps(method)
        def timed(*args: P.args, **kwargs: P.kwargs) -> R:
            owner: _HasMeter = args[0]  # pyright: ignore[reportAssignmentType]
            with owner.meter(phase):
                return method(*args, **kwargs)

        return timed

    return decorate
