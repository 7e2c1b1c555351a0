"""What a person sees of a run: a live bar, or plain lines without a terminal."""

import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)


class Bar:
    """Progress of one run. Shows nothing on ranks other than 0.

    Args:
        title: what runs.
        total: steps in all.
        done: steps already done (a resumed run).
        show: whether this rank shows anything.
    """

    def __init__(self, title: str, total: int, *, done: int = 0, show: bool = True):
        self._title, self._total, self._show = title, total, show
        self._live: Progress | None = None
        if show and sys.stderr.isatty():
            self._live = _live()
            self._task = self._live.add_task(
                title, total=total, completed=done, note=""
            )
        self._note = ""

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def advance(self, step: int) -> None:
        """``step`` updates are done."""
        if self._live is not None:
            self._live.update(self._task, completed=step)

    def say(self, step: int, epoch: float, **numbers: float) -> None:
        """Show the newest evaluation: a note on the bar, or a line of its own."""
        note = "  ".join(f"{name} {value:.4g}" for name, value in numbers.items())
        if self._live is not None:
            self._live.update(self._task, note=note)
        elif self._show:
            where = f"step {step}/{self._total}  epoch {epoch:.2f}"
            print(f"{self._title}  {where}  {note}", file=sys.stderr, flush=True)


def _live() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=Console(stderr=True),
    )
