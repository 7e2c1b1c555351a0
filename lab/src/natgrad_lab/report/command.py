"""`natgrad compare RUN...`: a table and one figure."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from natgrad_lab.console import show
from natgrad_lab.errors import UserError
from natgrad_lab.report.curves import draw
from natgrad_lab.report.summary import summarise
from natgrad_lab.report.table import run_table


@dataclass(frozen=True, kw_only=True)
class Compare:
    """Put runs side by side: a table and one figure."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Run folders."""
    targets: tuple[float, ...] = ()
    """Accuracies in percent to report steps and seconds to. None: the runs' own."""
    figure: Path = Path("compare.png")
    """Where the figure goes."""


def main(arguments: Sequence[str]) -> int:
    """Parse, print, draw."""
    asked = tyro.cli(Compare, prog="natgrad compare", args=list(arguments))
    if not asked.runs:
        raise UserError("Nothing to compare. Give at least one run folder.")
    for target in asked.targets:
        if not 0 < target <= 100:
            raise UserError(f"Invalid targets={target}. Must be in (0, 100].")
    summaries = [summarise(folder, asked.targets) for folder in asked.runs]
    show(run_table(summaries))
    print(f"figure: {draw(summaries, asked.figure)}")
    return 0
