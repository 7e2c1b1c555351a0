"""One trial: trained in its own folder, from its checkpoint when it has one."""

import os
import re
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from natgrad import InverseError
from natgrad_lab.errors import UserError
from natgrad_lab.study.curves import Curve, from_records
from natgrad_lab.study.points import Planned
from natgrad_lab.train import run as runs
from natgrad_lab.train.files import full_disk_said, no_space
from natgrad_lab.train.loop import Ending, Trainer
from natgrad_lab.train.processes import processes
from natgrad_lab.train.progress import Bar
from natgrad_lab.train.records import Record, read_metrics
from natgrad_lab.train.signals import StopRequest

CHECKPOINT = re.compile(r"step-(\d{8})(?:\.\d+)?")
"""A whole checkpoint's name; those being written, or found damaged, have others."""
Started = Callable[[Trainer, int], None]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How training ended: the curve, or None when it was interrupted."""

    curve: Curve | None


class TrialTrainer(Trainer):
    """A trainer that records where training starts too: a curve's point at update 0."""

    def _steps(self, request: StopRequest, bar: Bar) -> Ending:
        if not self.step and not self._evaluate(bar):
            return Ending(reason="diverged", step=self.step)
        try:
            return super()._steps(request, bar)
        except InverseError:
            # damping too small for the curvature met: the method gave up, as with NaN
            return Ending(reason="diverged", step=self.step)

    def _one_step(self) -> None:
        first = not self.step
        super()._one_step()
        if first:  # of the initial weights: it was computed before their update
            self._write("start", loss=self._last.item())


def train(planned: Planned, folder: Path, started: Started) -> Outcome:
    """Train to the end, or until a signal.

    Args:
        planned: the trial.
        folder: its run folder.
        started: called with the trainer and the step it goes on from.
    """
    with full_disk_said(folder):
        ending = _run(planned, folder, started)
    if ending.reason == "interrupted":
        return Outcome(curve=None)
    # "unsaved" is done as well: the last checkpoint failed, but the curve is whole
    ended = "diverged" if ending.reason == "diverged" else "done"
    records = read_metrics(folder / "metrics.jsonl")
    _check(records, ending, planned, folder)
    return Outcome(curve=from_records(records, ended))


def _check(
    records: list[Record], ending: Ending, planned: Planned, folder: Path
) -> None:
    """A full disk does not stop training, but it may have taken records away."""
    if not records or records[-1]["kind"] != "end":
        raise no_space(folder)
    every = planned.config.log_every
    seen = {each["step"] for each in records if each["kind"] == "train"}
    if seen.issuperset(range(every, ending.step + 1, every)):
        return
    clear(folder)
    raise UserError(
        f"The records of {planned.point.label} have a hole: a worker was killed while "
        "its disk was full. Run the same command again; this trial starts over."
    )


def forget(folder: Path) -> None:
    """Remove what only an unfinished trial needs."""
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)


def _run(planned: Planned, folder: Path, started: Started) -> Ending:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(
            "A study's worker is one process. Start several workers instead of "
            "torchrun: `natgrad study work URL`."
        )
    with processes() as world:
        run = _prepare(planned, folder)
        trainer = TrialTrainer(run, world, show=False)
        try:
            return _train(trainer, run, started)
        finally:
            trainer.close()


def _train(trainer: Trainer, run: runs.Run, started: Started) -> Ending:
    step = latest_step(run.folder)
    started(trainer, step)
    if not step:
        return trainer.train()
    try:
        return trainer.train(resume=True)
    except UserError as error:
        warnings.warn(f"{error} This trial starts over.", stacklevel=2)
    clear(run.folder)
    runs.create(run.folder, run.name, run.config)
    started(trainer, 0)
    return trainer.train()


def _prepare(planned: Planned, folder: Path) -> runs.Run:
    """The run folder; one without a checkpoint starts clean."""
    if not latest_step(folder):
        clear(folder)
        runs.create(folder, planned.point.label, planned.config)
    return runs.Run(folder=folder, name=planned.point.label, config=planned.config)


def latest_step(folder: Path) -> int:
    """The newest whole checkpoint's step; 0 without one."""
    names = [path.name for path in (folder / "checkpoints").glob("step-*")]
    whole = [match for name in names if (match := CHECKPOINT.fullmatch(name))]
    return max((int(match[1]) for match in whole), default=0)


def clear(folder: Path) -> None:
    """Remove an attempt that left nothing to go on from; the lock stays."""
    forget(folder)
    for name in ("metrics.jsonl", "config.json", "versions.json"):
        (folder / name).unlink(missing_ok=True)
