"""`natgrad doctor`: is this cluster, with this backend, fit for what natgrad does?"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import tyro
from rich.table import Table

from natgrad_lab.console import show
from natgrad_lab.doctor.examine import Finding, examine
from natgrad_lab.errors import UserError
from natgrad_lab.train.processes import processes


@dataclass(frozen=True, kw_only=True)
class DoctorCommand:
    """Try every exchange between ranks, and say what is fit for use.

    Under torchrun in its processes, and else in processes that it starts.
    """

    world: int = 4
    """Processes to start, if torchrun has not."""
    death: bool = True
    """End the last rank, as the last check, and see whether the others name it."""


def main(arguments: Sequence[str]) -> int:
    """Examine; the status is 1 if something is not fit."""
    asked = tyro.cli(DoctorCommand, prog="natgrad doctor", args=list(arguments))
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return _start(asked)
    torch.set_num_threads(1)
    with processes(timeout=60.0) as world:
        found: list[Finding] = []
        for each in examine(world, death=asked.death):
            found.append(each)
            if world.main:
                _say(f"{each.check}: {'fit' if each.good else 'NOT fit'}")
        if world.main:
            show(table(found))
        status = int(not all(each.good for each in found))
        sys.stdout.flush()
        if asked.death:
            # a group that has lost a rank cannot be taken down in order
            os._exit(status if world.main else 0)
    return status


def _start(asked: DoctorCommand) -> int:
    if asked.world < 2:
        raise UserError(f"Invalid world={asked.world}. Must be >= 2.")
    _say(f"starting {asked.world} processes")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launch += ["--nproc-per-node", str(asked.world), "-m", "natgrad_lab", "doctor"]
    launch += [] if asked.death else ["--no-death"]
    return subprocess.run(launch, check=False).returncode


def _say(line: str) -> None:
    """The checks take a while: how far they are."""
    print(line, file=sys.stderr, flush=True)


def table(found: Sequence[Finding]) -> Table:
    """A row a finding."""
    rows = Table("check", "fit", "what was seen")
    for each in found:
        rows.add_row(each.check, "yes" if each.good else "NO", each.detail)
    return rows
