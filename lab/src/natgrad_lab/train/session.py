"""From settings to a run that has ended: a new one, one that is resumed, a restart."""

import signal
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from natgrad_lab.console import show
from natgrad_lab.errors import UserError
from natgrad_lab.locks import Lock
from natgrad_lab.report.curves import draw
from natgrad_lab.report.summary import Summary, summarise
from natgrad_lab.report.table import run_table
from natgrad_lab.train import run as runs
from natgrad_lab.train.config import TrainConfig
from natgrad_lab.train.files import full_disk_said
from natgrad_lab.train.loop import Ending, Trainer
from natgrad_lab.train.processes import World, processes
from natgrad_lab.train.records import read_metrics

DIVERGED = "the loss is not finite: lower the learning rate or raise the damping"
UNSAVED = "the last checkpoint could not be written: make room and resume with:"
STATUS = {"done": 0, "diverged": 3, "unsaved": 4, "interrupted": 130}
PREEMPTED = 75
"""After SIGTERM: sysexits' EX_TEMPFAIL, for a scheduler that starts it again."""


def begin(name: str, config: TrainConfig) -> int:
    """Train a recipe in a folder of its own; the exit status."""
    with processes(config.timeout) as world:
        folder = Path(world.share(str(runs.choose_folder(name, config.out))))
        if world.any(world.main and runs.launched_here(folder)):
            return _go_on(folder, config, world)
        with new_run(folder, name, config, world) as (run, ending):
            return finish(run, ending, world)


def resume(folder: Path) -> int:
    """Go on with a run from its last checkpoint; the exit status."""
    run = runs.load(folder)
    if _complete(run):
        print(f"{folder} is complete: nothing to resume.")
        show(run_table([summarise(folder)]))
        return 0
    with processes(run.config.timeout) as world, held(folder, world):
        ending = Trainer(run, world, title=run.name).train(resume=True)
        return finish(run, ending, world)


@contextmanager
def new_run(
    folder: Path, name: str, config: TrainConfig, world: World, title: str = ""
) -> Generator[tuple[runs.Run, Ending]]:
    """Train a run that is not there yet; inside, its folder is still locked.

    Everything that can be refused is looked at before the folder is made, and a run
    that ends in an error before its first step is done leaves nothing behind.
    """
    together(world, folder, lambda: runs.require_free(folder))
    run = runs.Run(folder=folder, name=name, config=config)
    trainer = Trainer(run, world, title=title or name)
    with held(folder, world):
        together(world, folder, lambda: runs.require_free(folder))
        before = set(folder.iterdir()) if world.main else set()
        try:
            start(folder, name, config, world)
            with full_disk_said(folder):
                ending = trainer.train()
        except BaseException:
            if world.main and not trainer.step:
                runs.discard(folder, keep=before)
            raise
        yield run, ending


def start(folder: Path, name: str, config: TrainConfig, world: World) -> runs.Run:
    """Rank 0 creates the run's folder; a failure there is raised on every rank."""
    together(world, folder, lambda: runs.create(folder, name, config))
    return runs.Run(folder=folder, name=name, config=config)


@contextmanager
def held(folder: Path, world: World) -> Generator[None]:
    """Inside, no other process trains in the folder; rank 0 has its lock."""
    locks: list[Lock] = []
    together(world, folder, lambda: locks.append(Lock(folder, runs.launch())))
    with locks[0] if locks else nullcontext():
        yield


def together(world: World, folder: Path, action: Callable[[], object]) -> None:
    """Rank 0 does something with a folder; what fails is raised on every rank."""
    problem = ""
    if world.main:
        try:
            with full_disk_said(folder):
                action()
        except (UserError, OSError) as error:
            problem = str(error)
    problem = world.share(problem)
    if problem:
        raise UserError(problem)


def finish(run: runs.Run, ending: Ending, world: World) -> int:
    """Print the table and draw the curves, on rank 0."""
    if ending.reason == "interrupted":
        # A launcher that sees one rank end tells the others to: they are about to.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        world.barrier()
    if world.main:
        summary = summarise(run.folder)
        show(run_table([summary]))
        _draw(summary, run.folder / "curves.png")
        print(f"run folder: {run.folder}")
        if ending.reason == "interrupted":
            print(f"continue with: natgrad train --resume {run.folder}")
        elif ending.reason == "unsaved":
            print(f"{UNSAVED} natgrad train --resume {run.folder}")
        elif ending.reason == "diverged":
            print(DIVERGED)
    if ending.by == signal.SIGTERM:
        return PREEMPTED
    return STATUS[ending.reason]


def _draw(summary: Summary, path: Path) -> None:
    """A figure is no reason to end with an error: `natgrad compare` draws it later."""
    try:
        draw([summary], path)
    except OSError as error:
        print(f"{path} could not be drawn ({error.strerror})", file=sys.stderr)


def _go_on(folder: Path, config: TrainConfig, world: World) -> int:
    """After a restart by torchrun: the run that this launch has begun."""
    run = runs.load(folder)
    if run.config != config:
        raise UserError(
            f"{folder} holds a run with other settings. Choose another --out."
        )
    if _complete(run):
        return 0
    if world.main:
        print(f"restarted: {folder} goes on", file=sys.stderr, flush=True)
    with held(folder, world):
        ending = Trainer(run, world, title=run.name).train(resume=True)
        return finish(run, ending, world)


def _complete(run: runs.Run) -> bool:
    if not run.metrics.is_file():
        return False
    ends = [each for each in read_metrics(run.metrics) if each["kind"] == "end"]
    return bool(ends) and ends[-1]["reason"] == "done"
