"""`natgrad demo`: race optimizers on three tasks, then train on two processes."""

import os
import subprocess
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import tyro
from rich.progress import Progress
from rich.table import Table

from natgrad_lab.console import Console, show
from natgrad_lab.demo.race import CONTENDERS, Race, race
from natgrad_lab.demo.report import draw, sentences, task_table
from natgrad_lab.demo.sweep import best_rate
from natgrad_lab.demo.tasks import TASKS, Task
from natgrad_lab.errors import UserError
from natgrad_lab.train import run as runs
from natgrad_lab.train.records import read_metrics

SEED = 4
"""Not one of the sweep's."""
SHARED = "digits-spngd"


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Race SGD, AdamW, Muon, SOAP, Polar and SPNGD on three tasks: two minutes."""

    out: Path | None = None
    """Folder for the figure and the run. None: a new one under runs/."""
    steps: int | None = None
    """Steps of each training. None: the tasks'."""


def main(arguments: Sequence[str]) -> int:
    """Run the races and print what came out."""
    asked = tyro.cli(Demo, prog="natgrad demo", args=list(arguments))
    folder = runs.choose_folder("demo", asked.out)
    folder.mkdir(parents=True, exist_ok=True)
    print(
        "Each optimizer trains at the best of five learning rates of a sweep that was "
        "made before\n(natgrad_lab/demo/sweep.json). SPNGD finds its own."
    )
    torch.set_num_threads(1)  # small networks gain nothing by more
    found: dict[str, list[Race]] = {}
    for task in TASKS.values():
        short = task if asked.steps is None else replace(task, steps=asked.steps)
        found[task.name] = _raced(short)
        show(task_table(short, found[task.name]))
    show(_two_processes(folder, quick=asked.steps is not None))
    for line in sentences(found):
        print(line)
    print(f"figure: {draw(found, folder / 'demo.png')}")
    return 0


def _raced(task: Task) -> list[Race]:
    found: list[Race] = []
    total = task.steps * len(CONTENDERS)
    with _progress(f"{task.name:<12}", total) as advance:
        for name, contender in CONTENDERS.items():
            rate = best_rate(task.name, name)
            found.append(race(task, contender, rate, SEED, advance))
    return found


@contextmanager
def _progress(title: str, total: int) -> Generator[Callable[[], None]]:
    """A bar on a terminal, a line elsewhere; yields what counts a step."""
    console = Console()
    if not console.is_terminal:
        print(f"{title}: {total} steps in all", flush=True)
        yield lambda: None
        return
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task(title, total=total)
        yield lambda: progress.advance(bar)


def _two_processes(folder: Path, quick: bool) -> Table:
    """A recipe on one process and on two, by the same command under torchrun."""
    table = Table(title=f"natgrad train {SHARED}, on one process and on two")
    for head in ("processes", "final test accuracy", "last training loss"):
        table.add_column(head)
    for processes in (1, 2):
        out = folder / f"{SHARED}-{processes}"
        launch = ["-m", "torch.distributed.run", "--standalone"]
        launch += ["--nproc-per-node", str(processes)] if processes > 1 else []
        command = [sys.executable, *(launch if processes > 1 else [])]
        command += ["-m", "natgrad_lab", "train", SHARED, "--out", str(out)]
        command += ["--threads", "1", "--epochs", "0.3" if quick else "2"]
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise UserError(f"{' '.join(command)} failed:\n{done.stderr}")
        records = read_metrics(out / "metrics.jsonl")
        test = [r["accuracy"] for r in records if r["kind"] == "test"][-1]
        loss = [r["loss"] for r in records if r["kind"] == "train"][-1]
        table.add_row(str(processes), f"{test:.2f} %", f"{loss:.4f}")
    table.caption = "batch norm sees the half of each batch that its process has"
    return table
