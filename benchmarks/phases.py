"""Where a step of natgrad spends its time, by the library's own meter.

The phases add up to the step. What the meter does not see is forward and backward, and
under `KFAC` the step of its host optimizer.
"""

import statistics
import time
from collections import defaultdict
from typing import Any

from benchmarks.common import Contender, no_garbage_collection, run_step
from natgrad.diagnostics.timer import Reader, Seconds, phase_sum

PHASES = (
    "forward and backward",
    "statistics",
    "inverses",
    "preconditioning",
    "update",
)


def split(total: float, found: Seconds) -> dict[str, float]:
    """The seconds of a step by `PHASES`, of what the meter counted in it."""
    estimated = phase_sum(found, "estimate", "sampled")
    step, inverses = phase_sum(found, "step"), phase_sum(found, "invert")
    reduced = phase_sum(found, "reduce", "refresh") - inverses  # they are inside
    preconditioning = phase_sum(found, "precondition")
    update = step - reduced - inverses - preconditioning
    parts = (estimated + reduced, inverses, preconditioning, update)
    return dict(zip(PHASES, (total - estimated - step, *parts), strict=True))


def measure(contender: Contender, clock: str, rounds: int = 3) -> dict[str, Any]:
    """Median seconds by kind of step and phase."""
    meter = contender.target.engine.meter
    meter.clock = time.process_time if clock == "cpu" else time.perf_counter
    reader = Reader(meter)
    seconds: dict[str, list[dict[str, float]]] = defaultdict(list)
    for _ in range(rounds):
        for kind in contender.kinds:
            reader.take()
            with no_garbage_collection():
                total = getattr(run_step(contender, kind), clock)
            seconds[kind].append(split(total, reader.take()))
    return {
        kind: {phase: statistics.median(x[phase] for x in each) for phase in PHASES}
        for kind, each in seconds.items()
    }
