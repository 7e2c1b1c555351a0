"""`natgrad demo`: race optimizers on three tasks, then train on two processes."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import tyro
from rich.progress import Progress

from natgrad_lab.console import Console, show
from natgrad_lab.demo.race import CONTENDERS, Race, race
from natgrad_lab.demo.report import draw, sentences, table_of
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
    if asked.steps is not None and asked.steps < 1:
        raise UserError(f"Invalid steps={asked.steps}. Must be >= 1.")
    folder = runs.choose_folder("demo", asked.out)
    folder.mkdir(parents=True, exist_ok=True)
    print(
        f"{len(CONTENDERS)} optimizers train on {len(TASKS)} small tasks, each at the "
        "best of five learning rates\n(natgrad_lab/demo/sweep.json); SPNGD finds its "
        "own. It takes half a minute."
    )
    torch.set_num_threads(1)  # small networks gain nothing by more
    found: dict[str, list[Race]] = {}
    for task in TASKS.values():
        short = task if asked.steps is None else replace(task, steps=asked.steps)
        found[task.name] = _raced(short)
    shared = _two_processes(folder, quick=asked.steps is not None)
    show(table_of(found))
    for line in (*sentences(found), shared):
        print(textwrap.fill(line, 80))
    print(f"Figure: {draw(found, folder / 'demo.png')}")
    return 0


def _raced(task: Task) -> list[Race]:
    found: list[Race] = []
    with _progress(f"{task.name:<12}", task.steps * len(CONTENDERS)) as advance:
        for name, contender in CONTENDERS.items():
            rate = best_rate(task.name, name)
            found.append(race(task, contender, rate, SEED, advance))
    took = sum(each.seconds[-1] for each in found)
    print(
        f"{task.name:<12} {task.steps} steps of batch {task.batch:,}, "
        f"{task.unit}: {took:.0f} s",
        flush=True,
    )
    return found


@contextmanager
def _progress(title: str, total: int) -> Generator[Callable[[], None]]:
    """A bar on a terminal, nothing elsewhere; yields what counts a step."""
    console = Console()
    if not console.is_terminal:
        yield lambda: None
        return
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task(title, total=total)
        yield lambda: progress.advance(bar)


def _two_processes(folder: Path, quick: bool) -> str:
    """A recipe on one process and on two, by the same command under torchrun."""
    print(f"{'processes':<12} natgrad train {SHARED}, on one and on two", flush=True)
    ends: list[str] = []
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
        ends.append(f"{test:.1f}%")
    return (
        f"SPNGD on digits, two epochs, ends with a test accuracy of {ends[0]} on one "
        f"process and {ends[1]} on two (batch norm sees the half of each batch that "
        "its process has)."
    )
