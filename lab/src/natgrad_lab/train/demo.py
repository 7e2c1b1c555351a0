"""`natgrad demo`: four optimizers on digits, then one of them on two processes."""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from natgrad_lab.console import show
from natgrad_lab.errors import UserError
from natgrad_lab.recipes import find
from natgrad_lab.report.curves import draw
from natgrad_lab.report.summary import Summary, summarise
from natgrad_lab.report.table import run_table
from natgrad_lab.train import run as runs
from natgrad_lab.train.processes import World
from natgrad_lab.train.session import new_run

RECIPES = ("digits-sgd", "digits-kfac", "digits-polar", "digits-spngd")
SHARED = "digits-spngd"


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Train on embedded data with SGD, KFAC on SGD, Polar and SPNGD; about a minute."""

    out: Path | None = None
    """Folder for the runs. None: a new one under runs/."""
    epochs: float | None = None
    """Epochs of each run. None: the recipes'."""


def main(arguments: Sequence[str]) -> int:
    """Run the tour and print what came out."""
    asked = tyro.cli(Demo, prog="natgrad demo", args=list(arguments))
    folder = runs.choose_folder("demo", asked.out)
    print("Training a small ResNet on 8 x 8 digits with four optimizers.", flush=True)
    done = [_here(name, folder, asked.epochs) for name in RECIPES]
    done.append(_two_processes(SHARED, folder, asked.epochs))
    names = [each.name for each in done]
    summaries = [summarise(each) for each in done]
    show(run_table(summaries, names))
    print(training_seconds(summaries))
    print(f"runs and their records: {folder}")
    print(f"figure: {draw(summaries, folder / 'compare.png', names)}")
    return 0


def training_seconds(summaries: Sequence[Summary]) -> str:
    """By the wall clock, in all and of each run; starting and testing not counted."""
    each = ", ".join(f"{one.name} {one.seconds:.1f}" for one in summaries)
    total = sum(one.seconds for one in summaries)
    return f"training seconds: {total:.1f} ({each})"


def _here(name: str, folder: Path, epochs: float | None) -> Path:
    config = find(name).config
    if epochs is not None:
        config = dataclasses.replace(config, epochs=epochs)
    made = new_run(folder / name, name, config, World(), title=f"{name:<22}")
    with made as (run, ending):
        if ending.reason == "interrupted":
            raise KeyboardInterrupt
        return run.folder


def _two_processes(name: str, folder: Path, epochs: float | None) -> Path:
    """The same recipe by the same command, under torchrun."""
    out = folder / f"{name}-2-processes"
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *launch, "-m", "natgrad_lab", "train", name]
    command += ["--out", str(out), "--threads", "1"]
    if epochs is not None:
        command += ["--epochs", str(epochs)]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    status = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL)
    if status.returncode != 0:
        raise UserError(f"The run on two processes failed: {' '.join(command)}")
    return out
