"""Where a step of natgrad spends its time.

The methods named in `METHODS` are wrapped for the time of the measurement. A phase is
charged with a method's time without that of wrapped methods inside it, so the phases
add up to the step, with forward and backward as the rest.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import SGD

from benchmarks.common import Contender, no_garbage_collection, run_step
from natgrad.capture.hooks import Hooks
from natgrad.capture.recorder import Capture
from natgrad.distributed.communicator import Communicator
from natgrad.distributed.transfer import Flight
from natgrad.engine.engine import Engine
from natgrad.factors.statistics import Statistics
from natgrad.kfac import KFAC
from natgrad.polar import Polar
from natgrad.spngd import SPNGD

PHASES = (
    "forward and backward",
    "statistics",
    "inverses",
    "preconditioning",
    "communication",
    "update",
)

METHODS: dict[str, tuple[tuple[type, str], ...]] = {
    "statistics": (
        (Capture, "_after_backward"),
        (Engine, "reduce_statistics"),
        (Statistics, "refresh"),
    ),
    "inverses": ((Statistics, "_invert"),),
    "preconditioning": (
        (Engine, "reduce_gradients"),
        (Engine, "precondition"),
        (Engine, "measured"),
        (KFAC, "write"),
    ),
    "communication": (
        (Engine, "agree"),
        (Engine, "share"),
        (Statistics, "_share_findings"),
        (Statistics, "_share_inverses"),
        (Communicator, "begin"),
        (Communicator, "agree"),
        (Flight, "put"),
        (Flight, "finish"),
    ),
    "update": (
        (KFAC, "step"),
        (SPNGD, "step"),
        (Polar, "step"),
        (SGD, "step"),
    ),
}


class Stopwatch:
    """Seconds by phase, each without the phases inside it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._clock = clock
        self._running: list[str] = []
        self._since = 0.0

    def enter(self, phase: str) -> None:
        """Begin a phase inside the current one."""
        self._charge()
        self._running.append(phase)

    def leave(self) -> None:
        """Return to the phase around."""
        self._charge()
        self._running.pop()

    def _charge(self) -> None:
        now = self._clock()
        if self._running:
            self.seconds[self._running[-1]] += now - self._since
        self._since = now

    def wrap(self, method: Callable[..., Any], phase: str) -> Callable[..., Any]:
        """The method, with its time charged to a phase."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.enter(phase)
            try:
                return method(*args, **kwargs)
            finally:
                self.leave()

        return wrapped


@contextmanager
def watching(contender: Contender, watch: Stopwatch) -> Iterator[None]:
    """Wrap the methods of `METHODS`, and those hooks that are bound already."""
    # torch gives a class of optimizers its own step with the first instance
    table = [
        (c, m, phase)
        for phase, pairs in METHODS.items()
        for c, m in pairs
        if m in c.__dict__
    ]
    old = {(c, m): c.__dict__[m] for c, m, _ in table}
    for c, m, phase in table:
        setattr(c, m, watch.wrap(old[c, m], phase))
    unhook = _wrap_hooks(contender, watch)
    try:
        yield
    finally:
        unhook()
        for (c, m), method in old.items():
            setattr(c, m, method)


def _wrap_hooks(contender: Contender, watch: Stopwatch) -> Callable[[], None]:
    """A model's forward hooks hold the method itself: replace them in its tables."""
    changed: list[tuple[dict[int, Any], int, Any]] = []
    for module in contender.target.engine.model.modules():
        for key, hook in list(module._forward_hooks.items()):
            function = getattr(hook, "func", None)
            if getattr(function, "__func__", None) is _LAYER_HOOK:
                changed.append((module._forward_hooks, key, hook))
                module._forward_hooks[key] = watch.wrap(hook, "statistics")
    assert changed, "natgrad has no forward hooks in this model"

    def undo() -> None:
        for table, key, hook in changed:
            table[key] = hook

    return undo


_LAYER_HOOK = Hooks.__dict__["_layer_hook"]


def measure(contender: Contender, clock: str, rounds: int = 3) -> dict[str, Any]:
    """Median seconds by kind of step and phase."""
    now = time.process_time if clock == "cpu" else time.perf_counter
    seconds: dict[str, list[dict[str, float]]] = defaultdict(list)
    for _ in range(rounds):
        for kind in contender.kinds:
            watch = Stopwatch(now)
            with watching(contender, watch), no_garbage_collection():
                total = getattr(run_step(contender, kind), clock)
            rest = {PHASES[0]: total - sum(watch.seconds.values())}
            seconds[kind].append(rest | watch.seconds)
    return {
        kind: {
            phase: statistics.median(x.get(phase, 0.0) for x in each)
            for phase in PHASES
        }
        for kind, each in seconds.items()
    }
