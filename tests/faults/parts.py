"""What the soak does: each part is a function of the number of a piece.

A part returns how many faults were injected, how many runs were lost and how many ranks
or curves diverged.
"""

import errno
import functools
import os
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tests.faults.agent import Agent, Fault
from tests.faults.arguments import KINDS, search
from tests.faults.cells import CELLS, run_cell, run_sharded
from tests.faults.launch import arguments, torchrun
from tests.faults.left import all_hooks, is_flat, left_behind, rss, slope
from tests.faults.poison import METHODS, PLACES, Poison, train_poisoned
from tests.faults.states import VARIANTS, search_states
from tests.support.world import run_world

from natgrad_lab.train import run as runs
from natgrad_lab.train import storage
from natgrad_lab.train.checkpoint import Checkpoints
from natgrad_lab.train.config import (
    CurvatureConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    RefreshConfig,
    TrainConfig,
)
from natgrad_lab.train.loop import Trainer
from natgrad_lab.train.processes import World

Result = dict[str, Any]
STEPS = 16
POINTS = ("data", "forward", "backward", "exchange", "save", "commit", "latest", "load")


# -- ranks that are killed, hang, fail or are told to go -------------------------------


def killed(number: int) -> Result:
    """A run to which seven things happen, against one to which nothing does."""
    source = random.Random(number)
    recipe = ("digits-spngd", "digits-kfac")[number % 2]
    kinds = source.sample([*POINTS, "raise", "stop"], 7)
    faults = [_fault(source, 1 + 2 * i, kind) for i, kind in enumerate(kinds)]
    with tempfile.TemporaryDirectory() as folder:
        words = arguments(recipe, Path(folder) / "run", steps=STEPS)
        outcome = Agent(words=words, faults=faults, restarts=20).run()
    happened = outcome.restarts == len(faults)
    return {
        "faults": outcome.restarts,
        "lost": int(outcome.status != 0 or not happened),
        "diverged": int(outcome.losses != calm(recipe, STEPS)),
        "kinds": kinds,
    }


def _fault(source: random.Random, step: int, kind: str) -> Fault:
    """To a rank that does such a thing, from a step on; a load is before any step."""
    rank = 0 if kind in ("commit", "latest") else source.randrange(2)
    return rank, 0 if kind == "load" else step, kind


@functools.cache
def calm(recipe: str, steps: int) -> dict[int, float]:
    """The losses of a run on two ranks to which nothing happens."""
    with tempfile.TemporaryDirectory() as folder:
        words = arguments(recipe, Path(folder) / "run", steps=steps)
        outcome = Agent(words=words).run()
    assert outcome.status == 0, outcome.printed
    assert list(outcome.losses) == list(range(1, steps + 1))
    return outcome.losses


def hung(number: int) -> Result:
    """A rank that stands still; it is named, and the run goes on."""
    recipe = ("digits-spngd", "digits-kfac")[number // 2 % 2]
    with tempfile.TemporaryDirectory() as folder:
        words = arguments(recipe, Path(folder) / "run", steps=STEPS, timeout=10)
        faults = [(number % 2, 3, "hang")]
        outcome = Agent(words=words, faults=faults, timeout=60.0).run()
    named = f"but rank {number % 2} is stuck" in outcome.printed
    return {
        "faults": outcome.restarts,
        "lost": int(outcome.status != 0 or not named),
        "diverged": int(outcome.losses != calm(recipe, STEPS)),
    }


def fewer(number: int) -> Result:
    """Four ranks, then two, then one."""
    source = random.Random(number)
    faults = [
        (source.randrange(4), 3, source.choice(POINTS[:4])),
        (source.randrange(2), 9, source.choice(POINTS[:4])),
    ]
    with tempfile.TemporaryDirectory() as folder:
        words = arguments("digits-spngd", Path(folder) / "run", steps=STEPS)
        outcome = Agent(words=words, faults=faults, ranks=(4, 2, 1)).run()
    known = calm("digits-spngd", STEPS)
    away = [abs(x - known[s]) / x for s, x in outcome.losses.items()]
    return {
        "faults": outcome.restarts,
        "lost": int(outcome.status != 0),
        "diverged": int(len(away) != STEPS or max(away) > 1e-5),
    }


def under_torchrun(number: int) -> Result:
    """The same by torchrun itself: three kills."""
    source = random.Random(number)
    faults = [
        (source.randrange(2), 2 + 4 * i, source.choice(POINTS[:5])) for i in (0, 1, 2)
    ]
    with tempfile.TemporaryDirectory() as folder:
        words = arguments("digits-spngd", Path(folder) / "run", steps=STEPS)
        outcome = torchrun(words, faults, timeout=400.0)
    return {
        "faults": outcome.restarts,
        "lost": int(outcome.status != 0),
        "diverged": int(outcome.losses != calm("digits-spngd", STEPS)),
    }


# -- numbers ---------------------------------------------------------------------------


def numbers(number: int) -> Result:
    """Forty values that are not finite, on one rank or both, in one run."""
    source = random.Random(number)
    poisons = [
        Poison(
            step=i,
            place=source.choice(PLACES),
            value=source.choice([float("nan"), float("inf"), float("-inf")]),
            rank=source.choice([0, 1, None]),
        )
        for i in range(40)
    ]
    method = METHODS[number % len(METHODS)]
    ranks = run_world(2, train_poisoned, method, poisons, timeout=400)
    alike = all(r["alike"] for r in ranks) and ranks[0]["digest"] == ranks[1]["digest"]
    return {
        "faults": len(poisons),
        "lost": sum(not r["finite"] for r in ranks),
        "diverged": int(not alike or ranks[0]["health"] != ranks[1]["health"]),
        "kinds": [p.place for p in poisons],
    }


# -- files -----------------------------------------------------------------------------


def damaged(number: int) -> Result:
    """Forty checkpoints that are changed, cut off or lost: the one before is used."""
    source, lost = random.Random(number), 0
    for _ in range(40):
        with tempfile.TemporaryDirectory() as folder:
            checkpoints = Checkpoints(Path(folder), World())
            for step in (1, 2):
                checkpoints.save(step, {"x": torch.full((50,), float(step)), "n": step})
            checkpoints.wait()
            spoil(Path(folder) / "step-00000002", source)
            state, _ = checkpoints.load()
            good = state["n"] == state["step"] == state["x"][0] == 1
            # a change where nothing is stored does no harm
            lost += not (good or bool((state["x"] == 2).all()))
    return {"faults": 40, "lost": lost, "diverged": 0}


def spoil(folder: Path, source: random.Random) -> None:
    """Something bad to a random file of ours."""
    files = [p for p in folder.iterdir() if p.name != ".metadata"]
    path = source.choice(sorted(files))
    content = bytearray(path.read_bytes())
    how = source.choice(["flip", "cut", "lose", "empty", "random"])
    at = source.randrange(len(content))
    if how == "lose":
        path.unlink()
        return
    if how == "flip":
        content[at] ^= 1 << source.randrange(8)
    elif how == "cut":
        del content[at:]
    elif how == "empty":
        content.clear()
    else:
        content[at : at + 64] = source.randbytes(64)
    path.write_bytes(content)


def full(number: int) -> Result:
    """Thirty saves on a disk that is full at some call; the run and the rest go on."""
    source, lost = random.Random(number), 0
    names = ["fsync", "replace", "rename", "write"]
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(Path(folder), World())
        checkpoints.save(1, {"n": 1, "x": torch.ones(10)})
        last = 1 if not checkpoints.wait() else 0
        for step in range(2, 32):
            with _failing(source.choice(names), source.randrange(3)):
                checkpoints.save(step, {"n": step, "x": torch.full((10,), float(step))})
                problem = checkpoints.wait()
            last = last if problem else step
            lost += checkpoints.load()[0]["n"] != last
            assert not list(Path(folder).glob("*.partial"))
    return {"faults": 30, "lost": lost, "diverged": 0}


class _failing:
    """Inside, the n-th call of something raises as a full disk does."""

    def __init__(self, name: str, after: int) -> None:
        owner: Any = {"fsync": os, "write": storage.FileSystemWriter}.get(name, Path)
        self._target = (owner, "write_data" if name == "write" else name)
        self._left = after if name in ("fsync",) else 0

    def __enter__(self) -> None:
        self._kept = getattr(*self._target)

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._left == 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            self._left -= 1
            return self._kept(*args, **kwargs)

        setattr(*self._target, call)

    def __exit__(self, *error: object) -> None:
        setattr(*self._target, self._kept)


# -- a long run ------------------------------------------------------------------------


def long_run(number: int) -> Result:
    """20,000 steps: memory, threads, files and processes at the start and the end."""
    config = TrainConfig(
        steps=20_000,
        batch=8,
        log_every=50,
        evaluate_every=1000.0,
        checkpoint_every=2.0,
        threads=1,
        model=ModelConfig(name="mlp"),
        data=DataConfig(augment=False),
        optimizer=OptimizerConfig(name="spngd", lr=1e-3),
        curvature=CurvatureConfig(damping=0.1, norm="unit", factor_decay=0.9),
        refresh=RefreshConfig(statistics=5, inverses=20),
    )
    seen: list[tuple[int, float]] = []
    before = left_behind()
    with tempfile.TemporaryDirectory() as folder:
        run = runs.create(Path(folder) / "run", "soak", config)
        trainer = Trainer(run, World(), show=False)
        inner = trainer._one_step

        def step() -> None:
            inner()
            if trainer.step % 200 == 0:
                seen.append((trainer.step, rss()))

        trainer._one_step = step  # type: ignore[method-assign]
        ending = trainer.train()
        kept = sorted(p.name for p in (Path(folder) / "run" / "checkpoints").iterdir())
        hooks = all_hooks(trainer.model, trainer.method.optimizer)
    after = left_behind()
    late = [(s, r) for s, r in seen if s > 2000]
    rate = slope(late)
    well = ending.reason == "done" and hooks == 0 and len(kept) == 3
    return {
        "faults": 0,
        "lost": int(not (well and is_flat(rate, before, after))),
        "diverged": 0,
        "steps": ending.step,
        "slope": rate,
        "rss": [round(seen[0][1], 1), round(late[0][1], 1), round(late[-1][1], 1)],
        "before": before,
        "after": after,
        "hooks": hooks,
    }


# -- arguments -------------------------------------------------------------------------


def random_arguments(number: int) -> Result:
    """5,000 sets of constructor arguments; lost if a legal choice never worked."""
    counts = search([*KINDS][number % len(KINDS)], 5000, number)
    lost = len(counts["untried"])
    return {"faults": 0, "lost": lost, "diverged": 0, "examples": 5000, **counts}


def random_states(number: int) -> Result:
    """5,000 state dicts."""
    counts = search_states([*VARIANTS][number % len(VARIANTS)], 5000, number)
    return {"faults": 0, "lost": 0, "diverged": 0, "examples": 5000, **counts}


PARTS: dict[str, tuple[Callable[[int], Result], int]] = {
    "numbers": (numbers, 6),
    "damaged": (damaged, 2),
    "full": (full, 2),
    "cells": (run_cell, len(CELLS)),
    "sharded": (run_sharded, 15),
    "killed": (killed, 30),
    "hung": (hung, 4),
    "fewer": (fewer, 3),
    "torchrun": (under_torchrun, 1),
    "long": (long_run, 1),
    "arguments": (random_arguments, 12),
    "states": (random_states, 8),
}
