"""A training process that ends itself at a chosen point, once: for torchrun to restart.

Usage: victim.py FOLDER FAULTS ARGUMENT..., where FAULTS is JSON: a list of
``[rank, step, where]``. Each happens once in all restarts; files in FOLDER keep count.
The arguments are those of ``natgrad``.
"""

import functools
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

import natgrad.distributed.loads
from natgrad.distributed import watchdog
from natgrad_lab import cli
from natgrad_lab.train import checkpoint, loop, objective, snapshot, storage


class Faults:
    """What is still to happen on this rank."""

    def __init__(self, folder: Path, faults: list[list[Any]]) -> None:
        self._folder, self._faults, self.step = folder, faults, 0
        self._rank = int(os.environ.get("RANK", "0"))

    def at(self, where: str) -> None:
        """Die here if it is time."""
        for number, (rank, step, place) in enumerate(self._faults):
            due = rank == self._rank and step <= self.step and place == where
            if due and self._first(number):
                self._act(where)

    def _first(self, number: int) -> bool:
        try:
            (self._folder / f"done-{number}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _act(self, where: str) -> None:
        if where == "hang":
            time.sleep(600)
        elif where == "raise":
            raise ValueError("raised on purpose")
        elif where == "stop":
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            os.kill(os.getpid(), signal.SIGKILL)


def patch(module: Any, name: str, before: Any) -> None:
    """Call something first."""
    inner = getattr(module, name)

    @functools.wraps(inner)
    def outer(*args: Any, **kwargs: Any) -> Any:
        before(*args)
        return inner(*args, **kwargs)

    setattr(module, name, outer)


def install(faults: Faults) -> None:
    """Put the points at which a process can die into the code that it runs."""

    def stepping(trainer: Any) -> None:
        faults.step = trainer.step
        for where in ("data", "raise", "hang", "stop"):
            faults.at(where)

    def forward(_: Any, outputs: torch.Tensor, labels: Any) -> None:
        faults.at("forward")
        if outputs.requires_grad:
            outputs.register_hook(lambda g: faults.at("backward"))

    patch(loop.Trainer, "_one_step", stepping)
    patch(objective.Classes, "loss", forward)
    patch(natgrad.distributed.loads.Load, "_close", lambda *_: faults.at("exchange"))
    patch(storage.Writer, "write_data", lambda *_: faults.at("save"))
    patch(storage.Writer, "finish", lambda *_: faults.at("commit"))
    patch(checkpoint, "write_whole", lambda *_: faults.at("latest"))
    patch(snapshot, "load_optimizer", lambda *_: faults.at("load"))


def train(folder: Path, faults: list[list[Any]], words: list[str]) -> int:
    """Train with faults; the exit status."""
    (
        watchdog.PULSE_SECONDS,
        watchdog.PATIENCE_SECONDS,
    ) = 0.2, 1.0
    torch.set_num_threads(1)
    install(Faults(folder, faults))
    return cli.main(words)


if __name__ == "__main__":
    notes, listed, *arguments = sys.argv[1:]
    sys.exit(train(Path(notes), json.loads(listed), arguments))
