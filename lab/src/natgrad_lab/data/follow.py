"""What a person sees of a download or a long reading: bars, or plain lines."""

import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Literal

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars

from natgrad_lab.data.download import Progress

Unit = Literal["bytes", "images"]
SILENT = 10.0
"""Seconds after which something slow says again where it is."""
PATIENCE = 2.0
"""Seconds in which reading images says nothing: most sets are small."""


@contextmanager
def followed(unit: Unit) -> Generator[Progress]:
    """Told (name, done, in all) inside, it shows how far each name is."""
    if not sys.stderr.isatty():
        yield Lines(unit)
        return
    bars = _bars(unit)
    try:
        yield Follow(bars)
    finally:
        bars.stop()


class Lines:
    """Progress without a terminal: a line at every tenth of a thing, or after 10 s.

    Args:
        unit: what is counted.
        clock: tells the seconds.
    """

    def __init__(
        self, unit: Unit = "bytes", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._unit, self._clock, self._began = unit, clock, clock()
        self._said: dict[str, tuple[int, float]] = {}

    def __call__(self, name: str, done: int, total: int) -> None:
        tenth, now = 10 * done // total, self._clock()
        last, when = self._said.get(name, (-1, now))
        if tenth == last and now - when < SILENT:
            return
        if self._unit == "images" and now - self._began < PATIENCE:
            return
        self._said[name] = tenth, now
        amount = f"{done:,} of {total:,} images"
        if self._unit == "bytes":
            amount = f"{done / 1e6:.1f} of {total / 1e6:.1f} MB"
        line = f"{name}: {amount} ({100 * done // total} %)"
        print(line, file=sys.stderr, flush=True)


class Follow:
    """Shows progress on a terminal, a bar for each name; nothing before the first."""

    def __init__(self, bars: Bars) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, name: str, done: int, total: int) -> None:
        self._bars.start()
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=total)
        self._bars.update(self._tasks[name], completed=done, total=total)


def _bars(unit: Unit) -> Bars:
    return Bars(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        DownloadColumn() if unit == "bytes" else MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
