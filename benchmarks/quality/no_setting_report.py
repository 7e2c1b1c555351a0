"""The tables of `benchmarks.quality.no_setting`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]


def final(record: Record) -> float:
    """The last training loss; infinite where it is not a number."""
    last = record["curve"][-1][2]
    return last if math.isfinite(last) else math.inf


def reached(record: Record, value: float) -> tuple[int, float] | None:
    """The first look with a training loss at or below a value: steps, CPU seconds."""
    found = (c for c in record["curve"] if c[2] <= value)
    return next(((c[0], c[1]) for c in found), None)


def table(runs: Sequence[Record], rates: Mapping[str, Sequence[Any]]) -> str:
    """Markdown, a table for each task."""
    tasks = dict.fromkeys(r["task"] for r in runs)
    lines: list[str] = []
    for task in tasks:
        mine = [r for r in runs if r["task"] == task]
        lines += [*_task(task, mine, rates), ""]
    return "\n".join(lines)


def _task(
    task: str, runs: Sequence[Record], rates: Mapping[str, Sequence[Any]]
) -> list[str]:
    chosen: dict[str, Record] = {}
    trials: dict[str, int] = {}
    for name in rates:
        first = [r for r in runs if r["contender"] == name and r["seed"] == 0]
        if first:
            chosen[name], trials[name] = min(first, key=final), len(first)
    steps = next(iter(chosen.values()))["steps"]
    decibels = task == "picture"
    more = " 30 dB: step, s | 40 dB: step, s |" if decibels else ""
    lines = [
        f"**{task}**, {steps} steps",
        "",
        "| contender | trials | best setting | training loss | test error | CPU s | "
        f"final loss of the best rival: step, s |{more} other seeds: loss |",
        "|---|---|---|---|---|---|---|---|" + ("---|---|" if decibels else ""),
    ]
    rivals = [r for name, r in chosen.items() if name != "auto"]
    goal = min(map(final, rivals), default=0.0)
    for name, r in chosen.items():
        _, seconds, loss, error = r["curve"][-1]
        seeds = [
            f"{final(s):.3g}"
            for s in runs
            if s["contender"] == name and s["seed"] and s["rate"] == r["rate"]
        ]
        cells = [
            name,
            str(trials[name]),
            str(r["rate"]),
            f"{loss:.3g}",
            f"{error:.3g}",
            f"{seconds:.1f}",
            _place(reached(r, goal)),
        ]
        if decibels:
            cells += [_place(reached(r, 10 ** (-db / 10))) for db in (30, 40)]
        lines.append("| " + " | ".join([*cells, ", ".join(seeds) or "not run"]) + " |")
    return lines


def _place(found: tuple[int, float] | None) -> str:
    return f"{found[0]}, {found[1]:.1f}" if found else "not reached"
