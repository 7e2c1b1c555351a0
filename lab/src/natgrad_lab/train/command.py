"""`natgrad train`: start or resume a run, on one process or under torchrun.

What trains is imported when it is clear that there will be training: help is fast.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from natgrad_lab.errors import UserError
from natgrad_lab.recipes import find
from natgrad_lab.train.config import TrainConfig

USAGE = """usage: natgrad train RECIPE [--setting value ...]
       natgrad train --resume RUN

`natgrad recipes` lists the recipes, `natgrad train RECIPE --help` shows every setting.
With several processes: torchrun --nproc-per-node N -m natgrad_lab train RECIPE ...
Exit status: 0 done, 3 diverged, 4 done but not saved, 75 saved after SIGTERM, 130 saved
after Ctrl-C (--resume continues both)."""


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
        from natgrad_lab.train import session

        return session.resume(asked.resume)
    if arguments[0].startswith("-"):
        raise UserError(f"Expected a recipe or --resume, not {arguments[0]!r}.")
    config = parse(arguments[0], arguments[1:])
    from natgrad_lab.train import session

    return session.begin(arguments[0], config)


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
