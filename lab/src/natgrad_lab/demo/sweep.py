"""The sweep that the demo's rates are from: ``python -m natgrad_lab.demo.sweep``.

Every contender has five rates, on seed 0; its best one is then run on three other
seeds. Everything is kept in ``sweep.json``, which the demo reads its rates from. What
is there already is not run again.
"""

import json
import math
import statistics
from pathlib import Path
from typing import Any

import torch

from natgrad_lab.demo.race import CONTENDERS, race
from natgrad_lab.demo.tasks import TASKS

KEPT = Path(__file__).with_name("sweep.json")
SWEPT, FINAL = 0, (1, 2, 3)


def records() -> list[dict[str, Any]]:
    """All runs: task, contender, rate, seed, final value and seconds."""
    return json.loads(KEPT.read_text()) if KEPT.is_file() else []


def best_rate(task: str, contender: str) -> float | None:
    """The rate with the lowest final value in the sweep; None if it finds its own."""
    if not CONTENDERS[contender].rates:
        return None
    found = {r["rate"]: r["final"] for r in _of(task, contender, (SWEPT,))}
    return min(found, key=lambda rate: found[rate])


def _of(task: str, contender: str, seeds: tuple[int, ...]) -> list[dict[str, Any]]:
    return [
        r
        for r in records()
        if (r["task"], r["contender"]) == (task, contender) and r["seed"] in seeds
    ]


def _run(task: str, contender: str, rate: float | None, seed: int) -> None:
    known = [(r["rate"], r["seed"]) for r in _of(task, contender, (seed,))]
    if (rate, seed) in known:
        return
    done = race(TASKS[task], CONTENDERS[contender], rate, seed)
    record = {
        "task": task,
        "contender": contender,
        "rate": rate,
        "seed": seed,
        "final": done.final if math.isfinite(done.final) else 1e30,
        "seconds": round(done.seconds[-1], 2),
        "steps": done.steps,
        "values": [round(x, 6) if math.isfinite(x) else 1e30 for x in done.values],
    }
    lines = [json.dumps(each) for each in [*records(), record]]
    KEPT.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    said = f"{task}, {contender}, rate {rate}, seed {seed}: {done.final:.4g}"
    print(said, flush=True)


def table() -> str:
    """Final values of three seeds at the best rate, as Markdown."""
    lines = ["| | " + " | ".join(TASKS) + " |", "|---|" + "---|" * len(TASKS)]
    for name in CONTENDERS:
        cells = [_cell(task, name) for task in TASKS]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(task: str, contender: str) -> str:
    rate = best_rate(task, contender)
    found = [r["final"] for r in _of(task, contender, FINAL) if r["rate"] == rate]
    if not found:
        return "-"
    mean, low, high = statistics.fmean(found), min(found), max(found)
    return f"{mean:.3g} ({low:.3g} to {high:.3g})"


def main() -> None:
    """Run what is missing, and print the table."""
    torch.set_num_threads(1)
    for task in TASKS:
        for name, contender in CONTENDERS.items():
            for rate in contender.rates:
                _run(task, name, rate, SWEPT)
            for seed in FINAL:
                _run(task, name, best_rate(task, name), seed)
    print(table())


if __name__ == "__main__":
    main()
