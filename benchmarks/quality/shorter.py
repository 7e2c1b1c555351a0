"""Whole schedules of `Polar` that are shorter than the best rival's."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt

from benchmarks.common import markdown_table
from benchmarks.quality.readme import COLUMNS, ends
from benchmarks.quality.report import TITLES, Record, Setting, shown

OURS = next(iter(COLUMNS))
TEXT = """## Shorter schedules

Each row compares two whole schedules, both to a rate of zero: the best rival's, and a
shorter one of `Polar` with as many examples in a step. Means, ranges and numbers of
seeds; the seed that chose a rate counts only where no other was run.
"""


class Pair(NamedTuple):
    """The best rival's ends, and those of `Polar` after fewer steps."""

    protocol: str
    batch: int
    rival: str
    steps: int
    theirs: list[float]
    fewer: int
    ours: list[float]


def pairs(settings: dict[Setting, dict[str, list[Record]]]) -> Iterator[Pair]:
    """All of one protocol and batch, the longest schedule first."""
    by_method = {
        setting: {
            column: ends([r for name in names for r in contenders.get(name, ())])
            for column, names in COLUMNS.items()
        }
        for setting, contenders in settings.items()
    }
    for (protocol, steps, batch), columns in by_method.items():
        known = {n: v for n, v in columns.items() if v and n != OURS}
        if not known:
            continue
        rival = min(known, key=lambda n: statistics.mean(known[n]))
        for (other, fewer, size), found in by_method.items():
            if (other, size) == (protocol, batch) and fewer <= steps and found[OURS]:
                yield Pair(
                    *(protocol, batch, rival, steps, known[rival], fewer, found[OURS])
                )


def spread(protocol: str, values: Sequence[float]) -> str:
    """Mean, range and number."""
    low, high = sorted(shown(protocol, v) for v in (min(values), max(values)))
    mean = shown(protocol, statistics.mean(values))
    return f"{mean} ({low} to {high}), n = {len(values)}" if values[1:] else mean


def section(found: Sequence[Pair]) -> str:
    """A row for each shorter schedule."""
    rows = [
        [
            f"{TITLES[pair.protocol].partition(',')[0]}, {pair.batch:,}",
            f"{pair.rival}: {spread(pair.protocol, pair.theirs)}",
            str(pair.steps),
            spread(pair.protocol, pair.ours),
            f"{pair.fewer}, {pair.fewer / pair.steps:.2f} of them",
        ]
        for pair in found
        if pair.fewer < pair.steps
    ]
    heads = ("batch", "best rival", "in steps", "`Polar`", "in steps")
    return f"{TEXT}\n{markdown_table(heads, rows)}\n"


def figure(found: Sequence[Pair], path: Path) -> None:
    """How far `Polar` is ahead of the best rival, over the part of its steps."""
    fig, axis = plt.subplots(figsize=(6.4, 3.8))
    lines: dict[tuple[str, int, int], list[tuple[float, float]]] = {}
    for pair in found:
        best = statistics.mean(pair.theirs)
        ahead = 100 * (best - statistics.mean(pair.ours)) / best
        key = (pair.protocol, pair.batch, pair.steps)
        lines.setdefault(key, []).append((pair.fewer / pair.steps, ahead))
    for (protocol, batch, steps), points in sorted(lines.items()):
        name = TITLES[protocol].partition(",")[0]
        x, y = zip(*sorted(points), strict=True)
        axis.plot(x, y, "o-", label=f"{name}, batch {batch:,}, {steps} steps")
    axis.axhline(0, color="black", linewidth=0.8)
    axis.set_xlabel("steps of Polar over the best rival's")
    axis.set_ylabel("less loss or error at the end, %")
    axis.legend(fontsize=7)
    fig.tight_layout()
    fig.savefig(path, dpi=110)
    plt.close(fig)
