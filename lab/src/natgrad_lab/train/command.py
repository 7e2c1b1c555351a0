"""`natgrad train`: start or resume a run, on one process or under torchrun."""

import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from natgrad_lab.errors import UserError
from natgrad_lab.recipes import find
from natgrad_lab.report.curves import draw
from natgrad_lab.report.summary import Summary, summarise
from natgrad_lab.report.table import run_table, show
from natgrad_lab.train import run as runs
from natgrad_lab.train.config import TrainConfig
from natgrad_lab.train.loop import Ending, Trainer
from natgrad_lab.train.metrics import read_metrics
from natgrad_lab.train.processes import World, processes

USAGE = """usage: natgrad train RECIPE [--setting value ...]
       natgrad train --resume RUN

`natgrad recipes` lists the recipes, `natgrad train RECIPE --help` shows every setting.
With several processes: torchrun --nproc-per-node N -m natgrad_lab train RECIPE ...
Exit status: 0 done, 3 diverged, 4 done but not saved, 75 saved after SIGTERM, 130 saved
after Ctrl-C (--resume continues both)."""
DIVERGED = "the loss is not finite: lower the learning rate or raise the damping"
UNSAVED = "the last checkpoint could not be written: make room and resume with:"
STATUS = {"done": 0, "diverged": 3, "unsaved": 4, "interrupted": 130}
PREEMPTED = 75
"""After SIGTERM: sysexits' EX_TEMPFAIL, for a scheduler that starts it again."""


@dataclass(frozen=True, kw_only=True)
class Resume:
    """Continue an interrupted run exactly where its last checkpoint is."""

    resume: Path
    """The run's folder."""


def main(arguments: Sequence[str]) -> int:
    """Parse, train, report."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if arguments else 2
    if arguments[0].split("=")[0] == "--resume":
        asked = tyro.cli(Resume, prog="natgrad train", args=list(arguments))
        return _resume(asked.resume)
    if arguments[0].startswith("-"):
        raise UserError(f"Expected a recipe or --resume, not {arguments[0]!r}.")
    name = arguments[0]
    config = parse(name, arguments[1:])
    with processes(config.timeout) as world:
        folder = Path(world.share(str(runs.choose_folder(name, config.out))))
        if world.any(world.main and runs.launched_here(folder)):
            return _go_on(folder, config, world)
        run = start(folder, name, config, world)
        return finish(run, Trainer(run, world, title=name).train(), world)


def parse(name: str, arguments: Sequence[str]) -> TrainConfig:
    """A recipe's settings with overrides from the command line."""
    recipe = find(name)
    return tyro.cli(
        TrainConfig,
        default=recipe.config,
        prog=f"natgrad train {name}",
        description=f"{recipe.source}. {recipe.published}",
        args=list(arguments),
    )


def start(folder: Path, name: str, config: TrainConfig, world: World) -> runs.Run:
    """Rank 0 creates the folder; a failure there is raised on every rank."""
    problem = ""
    if world.main:
        try:
            runs.create(folder, name, config)
        except (UserError, OSError) as error:
            problem = str(error)
    problem = world.share(problem)
    if problem:
        raise UserError(problem)
    return runs.Run(folder=folder, name=name, config=config)


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


def _resume(folder: Path) -> int:
    run = runs.load(folder)
    if _complete(run):
        print(f"{folder} is complete: nothing to resume.")
        show(run_table([summarise(folder)]))
        return 0
    with processes(run.config.timeout) as world:
        ending = Trainer(run, world, title=run.name).train(resume=True)
        return finish(run, ending, world)


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
    return finish(run, Trainer(run, world, title=run.name).train(resume=True), world)


def _complete(run: runs.Run) -> bool:
    if not run.metrics.is_file():
        return False
    ends = [each for each in read_metrics(run.metrics) if each["kind"] == "end"]
    return bool(ends) and ends[-1]["reason"] == "done"
