"""README's table of results, between its two comments, from the ledger."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.common import markdown_table
from benchmarks.quality.report import (
    TUNED_WITH,
    Record,
    Setting,
    by_setting,
    shown,
)

README = Path(__file__).parents[2] / "README.md"
BEGIN, END = "<!-- python -m benchmarks.quality report -->", "<!-- end -->"
SHOWN: dict[Setting, tuple[str, str]] = {
    ("airbench", 60, 10000): (
        "CIFAR-10 speedrun network, a quarter of its width: test accuracy, %",
        "10,000 images, 60",
    ),
    ("language", 100, 96): (
        "byte transformer, 4 layers of 128, Python sources: held-out nats a byte",
        "12,288 tokens, 100",
    ),
    ("autoencoder", 400, 256): (
        "deep tanh autoencoder, digits: held-out loss",
        "256 images, 400",
    ),
    ("resnet", 180, 4096): (
        "ResNet-8 of width 8, CIFAR-10: test accuracy, %",
        "4,096 images, 180",
    ),
    ("vit", 300, 1000): (
        "vision transformer, 4 blocks of 64, CIFAR-10: test accuracy, %",
        "1,000 images, 300",
    ),
}
"""Settings of the table: what is trained and judged, and its batch and steps."""
COLUMNS = {
    "`Polar`": ("polar",),
    "Muon": ("muon", "muon-0.8"),
    "SOAP-Muon": ("soap-muon", "soap-muon-0.8"),
    "Newton-Muon": ("newton-muon", "newton-muon-0.8"),
    "PMuon": ("pmuon", "pmuon-0.8"),
    "SOAP": ("soap",),
    "Adam": ("adam",),
}
"""Columns, and the contenders of each: a method at the momenta that were tried."""


def ends(runs: Sequence[Record]) -> list[float]:
    """Values at the end, of the rate and momentum with most seeds, the best of these.

    The seed that chose the rate counts only where no other was run.
    """
    kept: dict[tuple[str, float], list[float]] = {}
    for r in [r for r in runs if r["seed"] != TUNED_WITH] or runs:
        kept.setdefault((r["contender"], r["lr"]), []).append(r["value"])
    chosen = min(kept.values(), key=lambda v: (-len(v), statistics.mean(v)), default=[])
    return sorted(chosen)


def _overlap(one: Sequence[float], other: Sequence[float]) -> bool:
    return one[0] <= other[-1] and other[0] <= one[-1]


def _cells(protocol: str, columns: Sequence[Sequence[float]]) -> list[str]:
    best = min(filter(None, columns), key=statistics.mean)
    cells = []
    for values in columns:
        if not values:
            cells.append("-")
            continue
        mean = statistics.mean(values)
        mark = "**" if len(best) > 1 and _overlap(values, best) else ""
        cells.append(f"{mark}{shown(protocol, mean)}{mark} ({len(values)})")
    return cells


def table(records: Iterable[Record]) -> str:
    """One row a setting, one column a method: mean at the end (number of seeds)."""
    found = by_setting(records)
    rows = []
    for setting, (title, size) in SHOWN.items():
        runs = [
            ends([r for name in names for r in found[setting].get(name, ())])
            for names in COLUMNS.values()
        ]
        rows.append([title, size, *_cells(setting[0], runs)])
    return markdown_table(("at the end of training", "batch, steps", *COLUMNS), rows)


def replaced(text: str, records: Iterable[Record]) -> str:
    """A page with the present table between its comments."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table(records)}\n{END}{after}"
