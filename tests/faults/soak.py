"""The long form of the fault tests, in pieces of minutes that can be run on any day.

    python -m tests.faults.soak            # the next pieces, until all are done
    python -m tests.faults.soak --for 8    # no new piece after 8 minutes
    python -m tests.faults.soak --report   # write benchmarks/results/soak.md

Each piece appends a line to ``runs/soak.jsonl``: what was injected, how many runs were
lost and how many ranks diverged. Pieces that are there are not run again.
"""

import argparse
import errno
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tests.faults import arguments as searches
from tests.faults.agent import Agent, preload
from tests.faults.launch import arguments, torchrun
from tests.faults.poison import PLACES, Poison, train_poisoned
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
STEPS = 12
POINTS = ("data", "forward", "backward", "exchange", "save", "commit", "latest", "load")


# -- ranks that are killed, hang, fail or are told to go -------------------------------


def killed(number: int) -> Result:
    """A run to which four things happen, against one to which nothing does."""
    source = random.Random(number)
    recipe = source.choice(["digits-spngd", "digits-kfac"])
    kinds = [source.choice([*POINTS, "raise", "stop"]) for _ in range(4)]
    faults = [
        (0 if kind in ("commit", "latest") else source.randrange(2), 1 + 2 * i, kind)
        for i, kind in enumerate(kinds)
    ]
    with tempfile.TemporaryDirectory() as folder:
        calm = Agent(words=arguments(recipe, Path(folder) / "calm", steps=STEPS)).run()
        words = arguments(recipe, Path(folder) / "run", steps=STEPS)
        outcome = Agent(words=words, faults=faults, restarts=20).run()
    same = outcome.losses == calm.losses and len(calm.losses) == STEPS
    return {
        "faults": outcome.restarts,
        "lost": int(outcome.status != 0),
        "diverged": int(not same),
        "kinds": kinds,
    }


def hung(number: int) -> Result:
    """A rank that stands still; it is named, and the run goes on."""
    with tempfile.TemporaryDirectory() as folder:
        words = arguments("digits-spngd", Path(folder) / "run", steps=8, timeout=3)
        faults = [(number % 2, 3, "hang")]
        outcome = Agent(words=words, faults=faults, timeout=60.0).run()
    named = f"but rank {number % 2} is stuck" in outcome.printed
    return {
        "faults": outcome.restarts,
        "lost": int(outcome.status != 0 or not named),
        "diverged": int(len(outcome.losses) != 8),
    }


def fewer(number: int) -> Result:
    """Four ranks, then two, then one."""
    source = random.Random(number)
    faults = [
        (source.randrange(4), 3, source.choice(POINTS[:4])),
        (source.randrange(2), 9, source.choice(POINTS[:4])),
    ]
    with tempfile.TemporaryDirectory() as folder:
        calm = Agent(
            words=arguments("digits-spngd", Path(folder) / "a", steps=12)
        ).run()
        words = arguments("digits-spngd", Path(folder) / "b", steps=12)
        outcome = Agent(words=words, faults=faults, ranks=(4, 2, 1)).run()
    away = [abs(x - calm.losses[s]) / x for s, x in outcome.losses.items()]
    return {
        "faults": outcome.restarts,
        "lost": int(outcome.status != 0),
        "diverged": int(len(away) != 12 or max(away) > 1e-5),
    }


def under_torchrun(number: int) -> Result:
    """The same by torchrun itself: three kills."""
    source = random.Random(number)
    faults = [
        (source.randrange(2), 2 + 4 * i, source.choice(POINTS[:5])) for i in (0, 1, 2)
    ]
    with tempfile.TemporaryDirectory() as folder:
        calm = Agent(
            words=arguments("digits-spngd", Path(folder) / "a", steps=14)
        ).run()
        words = arguments("digits-spngd", Path(folder) / "b", steps=14)
        outcome = torchrun(words, faults, timeout=400.0)
    return {
        "faults": outcome.restarts,
        "lost": int(outcome.status != 0),
        "diverged": int(outcome.losses != calm.losses),
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
    method = "spngd" if number % 2 else "ddp"
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
            lost += checkpoints.load()[0]["n"] not in (last, step)
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
    before = _left_behind()
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
        hooks = sum(
            len(m._forward_hooks) + len(m._backward_hooks)
            for m in trainer.model.modules()
        )
    after = _left_behind()
    late = [(s, r) for s, r in seen if s > 2000]
    return {
        "faults": 0,
        "lost": int(ending.reason != "done" or hooks > 0 or len(kept) != 3),
        "diverged": 0,
        "steps": ending.step,
        "slope": slope(late),
        "rss": [round(seen[0][1], 1), round(late[0][1], 1), round(late[-1][1], 1)],
        "before": before,
        "after": after,
        "hooks": hooks,
    }


def rss() -> float:
    """Resident memory of this process in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def slope(points: list[tuple[int, float]]) -> float:
    """MB in 10,000 steps, by least squares."""
    x = torch.tensor([float(s) for s, _ in points], dtype=torch.float64)
    y = torch.tensor([r for _, r in points], dtype=torch.float64)
    x, y = x - x.mean(), y - y.mean()
    return float((x * y).sum() / x.square().sum()) * 10_000


def _left_behind() -> dict[str, int]:
    children = subprocess.run(
        ["ps", "--no-headers", "--ppid", str(os.getpid()), "-o", "comm"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.split()
    return {
        "threads": threading.active_count(),
        "files": len(os.listdir("/proc/self/fd")),
        "processes": len([c for c in children if c != "ps"]),
    }


# -- arguments -------------------------------------------------------------------------


def random_arguments(number: int) -> Result:
    """5,000 sets of constructor arguments."""
    kind = ("KFAC", "SPNGD")[number % 2]
    counts = searches.search_quickly(kind, 5000, number)
    return {"faults": 0, "lost": 0, "diverged": 0, "examples": 5000, **counts}


def random_states(number: int) -> Result:
    """5,000 state dicts."""
    kind = ("KFAC", "SPNGD")[number % 2]
    counts = searches.search_states_quickly(kind, 5000, number)
    return {"faults": 0, "lost": 0, "diverged": 0, "examples": 5000, **counts}


PARTS: dict[str, tuple[Callable[[int], Result], int]] = {
    "numbers": (numbers, 4),
    "damaged": (damaged, 2),
    "full": (full, 2),
    "killed": (killed, 8),
    "hung": (hung, 2),
    "fewer": (fewer, 2),
    "torchrun": (under_torchrun, 1),
    "long": (long_run, 1),
    "arguments": (random_arguments, 12),
    "states": (random_states, 8),
}
WORDS = {
    "numbers": "NaN, Inf in batch, activation, gradient, statistic, inverse; 2 ranks",
    "damaged": "checkpoint files changed, cut or lost",
    "full": "saves on a full disk",
    "killed": "kill -9 at 8 points of a step and a save, errors, SIGTERM; 2 ranks",
    "hung": "a rank that stands still",
    "fewer": "kill -9 and fewer ranks after it: 4, 2, 1",
    "torchrun": "kill -9 under torchrun itself",
}


def done() -> list[Result]:
    """What was run so far."""
    if not RESULTS.is_file():
        return []
    return [json.loads(line) for line in RESULTS.read_text().splitlines()]


def run_pieces(minutes: float, only: list[str]) -> None:
    """Every piece that is not done, until the time is over."""
    end = time.monotonic() + 60 * minutes
    known = {(r["part"], r["piece"]) for r in done()}
    for part, (function, pieces) in PARTS.items():
        for piece in range(pieces):
            if (part, piece) in known or (only and part not in only):
                continue
            if time.monotonic() > end:
                return
            began = time.monotonic()
            commit = _commit()
            result = {"part": part, "piece": piece, **function(piece)}
            result["commit"] = commit if commit == _commit() else ""
            result["seconds"] = round(time.monotonic() - began, 1)
            RESULTS.parent.mkdir(exist_ok=True)
            with RESULTS.open("a") as file:
                file.write(json.dumps(result) + "\n")
            print(json.dumps(result), flush=True)


def report() -> str:
    """The results as a page."""
    results = done()
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
    lines += _open_words(results)
    return "\n".join(lines) + "\n"


def _open_words(results: list[Result]) -> list[str]:
    """What this page does not show: pieces that were not run, and on which code."""
    words: list[str] = []
    known = Counter(r["part"] for r in results)
    left = {part: n - known[part] for part, (_, n) in PARTS.items() if n > known[part]}
    if left:
        listed = ", ".join(f"{part} ({n})" for part, n in left.items())
        words += ["", f"**Incomplete.** Pieces that were not run: {listed}."]
    commits = sorted({r.get("commit", "") for r in results})
    if "" in commits:
        words += [
            "",
            "Pieces without a commit were run while the code was still being changed; "
            "they are not a result of the code as it is committed.",
        ]
    named = [each for each in commits if each]
    return words + (["", f"Commits: {', '.join(named)}."] if named else [])


def _commit() -> str:
    """The commit that is run, or nothing if files differ from it."""
    state = runs.git_state()
    return "" if state is None or state["dirty"] else state["commit"][:9]


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
                f"{r['hooks']} hooks left on the model.",
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
    missing = sum(pieces for _, pieces in PARTS.values()) - len(done())
    REPORT.write_text(report())
    print(f"{REPORT} is written; {missing} pieces are still to be run.")
    return int(any(r["lost"] or r["diverged"] for r in done()))


if __name__ == "__main__":
    if shutil.which("ps") is None:
        sys.exit("The soak needs ps.")
    sys.exit(main())
