"""`natgrad data`: download a data set; write a cache of its images."""

import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars

from natgrad_lab.data.download import Progress
from natgrad_lab.data.sources import SOURCES, get
from natgrad_lab.errors import UserError

USAGE = f"""usage: natgrad data get NAME [--root DIR]
       natgrad data cache imagenet --out DIR [--crop resized] [--check] ...

get downloads, checks and unpacks a data set: {", ".join(SOURCES)}.
The others but imagenet need none: text of your own is named by --data.folder.
cache resizes ImageNet's images once, for --data.cache DIR."""
SILENT = 10.0
"""Seconds after which a slow download says again where it is."""


@dataclass(frozen=True, kw_only=True)
class Get:
    """Download a data set, check it and unpack it; an interrupted one goes on."""

    name: Annotated[str, tyro.conf.Positional]
    """The data set."""
    root: Path | None = None
    """Folder of all data sets. None: $NATGRAD_DATA, or the user's cache."""


def main(arguments: Sequence[str]) -> int:
    """Parse, then download or write a cache."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if arguments else 2
    if arguments[0] == "cache":
        from natgrad_lab.data import cache_command

        return cache_command.main(arguments[1:])
    if arguments[0] != "get":
        legal = "'data get' or 'data cache'"
        raise UserError(f"Unknown command 'data {arguments[0]}'. Must be {legal}.")
    asked = tyro.cli(Get, prog="natgrad data get", args=list(arguments[1:]))
    with _progress() as progress:
        folder = get(asked.name, asked.root, progress)
    print(f"{asked.name} is in {folder}")
    return 0


@contextmanager
def _progress() -> Generator[Progress]:
    if not sys.stderr.isatty():
        yield Lines()
        return
    with _bars() as bars:
        yield Follow(bars)


class Lines:
    """Progress without a terminal: a line at every tenth of a file, or after 10 s.

    Args:
        clock: tells the seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._said: dict[str, tuple[int, float]] = {}

    def __call__(self, name: str, done: int, total: int) -> None:
        tenth, now = 10 * done // total, self._clock()
        last, when = self._said.get(name, (-1, now))
        if tenth == last and now - when < SILENT:
            return
        self._said[name] = tenth, now
        amount = f"{done / 1e6:.1f} of {total / 1e6:.1f} MB ({100 * done // total} %)"
        print(f"{name}: {amount}", file=sys.stderr, flush=True)


class Follow:
    """Shows a download's progress, a bar a file."""

    def __init__(self, bars: Bars) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, name: str, done: int, total: int) -> None:
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=total)
        self._bars.update(self._tasks[name], completed=done, total=total)


def _bars() -> Bars:
    return Bars(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
