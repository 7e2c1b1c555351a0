"""The long form of the fault tests, in pieces of minutes that can be run on any day.

    python -m tests.faults.soak            # the next pieces, until all are done
    python -m tests.faults.soak --for 8    # no new piece after 8 minutes
    python -m tests.faults.soak --report   # write benchmarks/results/soak.md

Each piece appends a line to ``runs/soak.jsonl``: what was injected, how many runs were
lost, how many ranks diverged, and with which code: git's digest of ``src``. A piece
that is there for the code as it is now is not run again; one of other code, or of code
that was not committed, does not count.
"""

import argparse
import errno
import functools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tests.faults.agent import Agent, Fault, preload
from tests.faults.arguments import KINDS, search
from tests.faults.launch import ROOT, arguments, torchrun
from tests.faults.left import SLOPE, all_hooks, is_flat, left_behind, rss, slope
from tests.faults.poison import METHODS, PLACES, Poison, train_poisoned
from tests.faults.states import VARIANTS, search_states
from tests.world import run_world

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

RESULTS = Path("runs/soak.jsonl")
REPORT = Path("benchmarks/results/soak.md")
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
        curvature=CurvatureConfig(damping=0.1, norm="unit", decay=0.9),
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
    "killed": (killed, 20),
    "hung": (hung, 4),
    "fewer": (fewer, 3),
    "torchrun": (under_torchrun, 1),
    "long": (long_run, 1),
    "arguments": (random_arguments, 12),
    "states": (random_states, 8),
}
WORDS = {
    "numbers": "NaN, Inf in batch, activation, gradient, statistic, inverse; 2 ranks, "
    "SPNGD, KFAC under DDP, the same in float16 with GradScaler",
    "damaged": "checkpoint files changed, cut or lost",
    "full": "saves on a full disk",
    "killed": "kill -9 at 8 points of a step and a save, errors, SIGTERM; 2 ranks",
    "hung": "a rank that stands still",
    "fewer": "kill -9 and fewer ranks after it: 4, 2, 1",
    "torchrun": "kill -9 under torchrun itself",
}


def done(digest: str) -> list[Result]:
    """What was run so far with this code, each piece once."""
    if not RESULTS.is_file():
        return []
    found = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    own = {(r["part"], r["piece"]): r for r in found if r.get("digest") == digest}
    return [r for r in own.values() if r["piece"] < PARTS[r["part"]][1]]


def run_pieces(minutes: float, only: list[str]) -> None:
    """Every piece that is not done, until the time is over."""
    end = time.monotonic() + 60 * minutes
    known = {(r["part"], r["piece"]) for r in done(code())}
    for part, (function, pieces) in PARTS.items():
        for piece in range(pieces):
            if (part, piece) in known or (only and part not in only):
                continue
            if time.monotonic() > end:
                return
            if not code():
                sys.exit("The soak runs committed code: commit src and tests/faults.")
            run_piece(part, piece, function)


def run_piece(part: str, piece: int, function: Callable[[int], Result]) -> None:
    """One piece, kept with the code that it was run with."""
    began, digest, commit = time.monotonic(), code(), _git("rev-parse", "HEAD")[:9]
    result = {"part": part, "piece": piece, **function(piece)}
    # changed meanwhile: then nobody knows which code it was
    result["digest"] = digest if digest == code() else ""
    result["commit"] = commit
    result["seconds"] = round(time.monotonic() - began, 1)
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("a") as file:
        file.write(json.dumps(result) + "\n")
    print(json.dumps(result), flush=True)


def code() -> str:
    """Git's digest of the sources that are run; empty if files differ from it."""
    if _git("status", "--porcelain", "--", "src", "tests/faults"):
        return ""
    return _git("rev-parse", "HEAD:src")[:12]


def _git(*words: str) -> str:
    command = ["git", "-C", str(ROOT), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout[
        :-1
    ]


def report() -> str:
    """The results of the code as it is now, as a page."""
    digest = code()
    results = done(digest)
    lines = [
        "# Soak: faults, a long run, random arguments",
        "",
        "From `make soak` (`tests/faults/soak.py`, which says what each part does). "
        f"torch {torch.__version__.split('+')[0]}, gloo, one machine with two cores.",
        "",
        "| faults | injected | runs lost | ranks or curves that diverged |",
        "|---|---|---|---|",
    ]
    total = Counter[str]()
    for part, words in WORDS.items():
        mine = [r for r in results if r["part"] == part]
        sums = {k: sum(r[k] for r in mine) for k in ("faults", "lost", "diverged")}
        total.update(sums)
        if mine:
            lines.append(
                f"| {words} | {sums['faults']} | {sums['lost']} | {sums['diverged']} |"
            )
    lines.append(f"| all | {total['faults']} | {total['lost']} | {total['diverged']} |")
    lines += ["", *_long_words(results), *_random_words(results)]
    lines += _open_words(results, digest)
    return "\n".join(lines) + "\n"


def _open_words(results: list[Result], digest: str) -> list[str]:
    """Of which code this page is, and what it does not show."""
    words: list[str] = []
    known = Counter(r["part"] for r in results)
    left = {part: n - known[part] for part, (_, n) in PARTS.items() if n > known[part]}
    if left:
        listed = ", ".join(f"{part} ({n})" for part, n in left.items())
        words += ["", f"**Incomplete.** Pieces that were not run: {listed}."]
    if not digest:
        return [*words, "", "The code is not committed: nothing counts."]
    commits = ", ".join(sorted({r["commit"] for r in results})) or "none"
    minutes = sum(r["seconds"] for r in results) / 60
    return [
        *words,
        "",
        f"All with the same code: `git rev-parse HEAD:src` begins with {digest}, at "
        f"the commits {commits}. {minutes:.0f} minutes in all.",
    ]


def _long_words(results: list[Result]) -> list[str]:
    words: list[str] = []
    for r in results:
        if r["part"] == "long":
            words += [
                f"{r['steps']:,} steps of training (SPNGD, an MLP on digits, one "
                f"process, checkpoints on the way): {r['rss'][1]} MB resident after "
                f"2,200 steps, {r['rss'][2]} MB at the end, {r['slope']:+.2f} MB in "
                f"10,000 steps by least squares. Before and after: threads "
                f"{r['before']['threads']} and {r['after']['threads']}, open files "
                f"{r['before']['files']} and {r['after']['files']}, child processes "
                f"{r['before']['processes']} and {r['after']['processes']}; "
                f"{r['hooks']} hooks of any kind left on modules, parameters and the "
                f"optimizer. More than {SLOPE:g} MB in 10,000 steps, or any growth of "
                "the others, would count as lost.",
                "",
            ]
    return words


def _random_words(results: list[Result]) -> list[str]:
    words: list[str] = []
    for part, what in (
        ("arguments", "constructor arguments"),
        ("states", "state dicts"),
    ):
        mine = [r for r in results if r["part"] == part]
        tried, works = (sum(r[k] for r in mine) for k in ("examples", "works"))
        if mine:
            words.append(
                f"- {tried:,} random {what}: {works:,} accepted and working, "
                f"{tried - works:,} refused with a message that names what is wrong, "
                "0 else."
            )
    return words


def main() -> int:
    """Run pieces, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--for", dest="minutes", type=float, default=1e9)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--report", action="store_true")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if not asked.report:
        preload()
        run_pieces(asked.minutes, asked.only)
    results = done(code())
    missing = sum(pieces for _, pieces in PARTS.values()) - len(results)
    REPORT.write_text(report())
    print(f"{REPORT} is written; {missing} pieces are still to be run.")
    return int(any(r["lost"] or r["diverged"] for r in results))


if __name__ == "__main__":
    if shutil.which("ps") is None:
        sys.exit("The soak needs ps.")
    sys.exit(main())
