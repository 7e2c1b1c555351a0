"""`natgrad study status`: how far a study is, and how long it will take."""

import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from optuna.trial import FrozenTrial, TrialState
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from natgrad_lab.study.ledger import Ledger
from natgrad_lab.study.points import Point

Cell = tuple[str, int]


@dataclass(frozen=True, kw_only=True)
class Row:
    """Trials of one method at one batch size."""

    method: str
    batch: int
    total: int
    done: int
    diverged: int
    running: int
    waiting: int
    best: float | None
    """Best test accuracy so far, in percent."""


@dataclass(frozen=True, kw_only=True)
class Running:
    """A trial in a worker's hands."""

    label: str
    worker: str
    attempt: int
    step: int
    total: int


@dataclass(frozen=True, kw_only=True)
class Status:
    """A study at one moment. ``left`` are seconds; None before a trial has ended."""

    name: str
    rows: tuple[Row, ...]
    running: tuple[Running, ...]
    lost: int
    """Trials whose worker is dead: they wait to be taken up again."""
    left: float | None

    @property
    def total(self) -> int:
        """Trials in all."""
        return sum(row.total for row in self.rows)

    @property
    def ended(self) -> int:
        """Trials that are done or diverged."""
        return sum(row.done + row.diverged for row in self.rows)


def read_status(ledger: Ledger) -> Status:
    """Look at a study."""
    ledger.spec()  # says so when the study is not ours
    trials = ledger.planned_trials()
    cells: dict[Cell, list[FrozenTrial]] = defaultdict(list)
    for each in trials:
        cells[cell(each)].append(each)
    running = [each for each in trials if each.state == TrialState.RUNNING]
    lost = ledger.lost()
    alive = {x.number for x in running if x._trial_id not in lost}
    return Status(
        name=ledger.name,
        rows=tuple(_row(where, cells[where], alive) for where in sorted(cells)),
        running=tuple(_running(each) for each in running if each.number in alive),
        lost=len(running) - len(alive),
        left=seconds_left(trials, len(alive)),
    )


def cell(trial: FrozenTrial) -> Cell:
    """A trial's method and batch size."""
    point = trial.user_attrs["point"]
    return point["method"], point["batch"]


def seconds_left(trials: Sequence[FrozenTrial], workers: int) -> float | None:
    """Work left over workers at work (at least one).

    An unfinished trial is expected to take as long as the median of those that ended
    with the same method and batch (all attempts together); of all, where none has. One
    that has begun has the rest of it left.
    """
    walls: dict[Cell, list[float]] = defaultdict(list)
    for each in trials:
        if "wall" in each.user_attrs and each.state.is_finished():
            walls[cell(each)].append(each.user_attrs["wall"])
    if not walls:
        return None
    anywhere = statistics.median([x for found in walls.values() for x in found])
    left = 0.0
    for each in trials:
        if each.state.is_finished():
            continue
        known = walls.get(cell(each))
        expected = statistics.median(known) if known else anywhere
        step, total = each.user_attrs.get("progress", (0, 1))
        left += expected * (1 - step / total)
    return left / max(1, workers)


def _row(where: Cell, trials: Sequence[FrozenTrial], alive: set[int]) -> Row:
    states = [each.state for each in trials]
    running = sum(each.number in alive for each in trials)
    values = [x.value for x in trials if x.state == TrialState.COMPLETE]
    return Row(
        method=where[0],
        batch=where[1],
        total=len(trials),
        done=states.count(TrialState.COMPLETE),
        diverged=states.count(TrialState.FAIL),
        running=running,
        waiting=sum(not state.is_finished() for state in states) - running,
        best=max((x for x in values if x is not None), default=None),
    )


def _running(trial: FrozenTrial) -> Running:
    facts = trial.user_attrs
    step, total = facts.get("progress", (0, 0))
    return Running(
        label=Point(**facts["point"]).label,
        worker=facts.get("worker", ""),
        attempt=facts.get("attempts", 1),
        step=step,
        total=total,
    )


def show_status(ledger: Ledger, *, every: float, once: bool) -> None:
    """Print the table; on a terminal keep it fresh until all trials have ended."""
    console = Console()
    status = read_status(ledger)
    if once or not console.is_terminal:
        Console(width=None if console.is_terminal else 120).print(render(status))
        return
    with Live(render(status), console=console, auto_refresh=False) as live:
        while status.ended < status.total:
            time.sleep(every)
            status = read_status(ledger)
            live.update(render(status), refresh=True)


def render(status: Status) -> Group:
    """The table, what runs now, and the time left."""
    table = Table(title=f"study {status.name}: {status.ended} of {status.total} trials")
    for title in ("method", "batch", "done", "diverged", "running", "waiting"):
        table.add_column(title, justify="left" if title == "method" else "right")
    table.add_column("best %", justify="right")
    for row in status.rows:
        counts = (row.batch, row.done, row.diverged, row.running, row.waiting)
        best = "" if row.best is None else f"{row.best:.2f}"
        table.add_row(row.method, *map(str, counts), best)
    lines = [Text(_running_line(each)) for each in status.running]
    if status.lost:
        text = f"trials whose worker is gone, to be taken up again: {status.lost}"
        lines.append(Text(text))
    return Group(table, *lines, Text(f"time left: {_time_left(status)}"))


def _running_line(running: Running) -> str:
    far = f"{running.step}/{running.total} updates" if running.total else "starting"
    again = f", attempt {running.attempt}" if running.attempt > 1 else ""
    return f"{running.worker}: {running.label} ({far}{again})"


def _time_left(status: Status) -> str:
    if status.ended == status.total:
        return "none, every trial has ended"
    if status.left is None:
        return "unknown until a trial has ended"
    workers = len(status.running)
    who = f"with {workers} at work" if workers else "with one worker; none is at work"
    return f"{duration(status.left)} ({who})"


def duration(seconds: float) -> str:
    """Seconds as a person says them: 45 s, 12 min, 3 h 20 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"
