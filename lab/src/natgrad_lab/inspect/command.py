"""`natgrad inspect RUN`: one page on every layer of a run."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from natgrad_lab.inspect.flags import find_flags
from natgrad_lab.inspect.page import build
from natgrad_lab.train import run as runs
from natgrad_lab.train.options import rule_of
from natgrad_lab.train.records import read_looks


@dataclass(frozen=True, kw_only=True)
class Inspect:
    """Write one HTML page on every layer of a run, and say what needs attention."""

    run: Annotated[Path, tyro.conf.Positional]
    """A run folder, trained with --diagnostics."""
    out: Path | None = None
    """Where the page goes. None: inspect.html in the run folder."""


def main(arguments: Sequence[str]) -> int:
    """Parse, read, write."""
    asked = tyro.cli(Inspect, prog="natgrad inspect", args=list(arguments))
    run = runs.load(asked.run)
    records = read_looks(asked.run)
    label, bounded = run.config.optimizer.label, rule_of(run.config).natural
    page = build(run.name, label, records, bounded=bounded)
    out = asked.out or asked.run / "inspect.html"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page, encoding="utf-8")
    for flag in find_flags(records):
        print(f"{flag.level}: {flag.title}. {flag.text}")
    print(f"page: {out}")
    return 0
