"""Which statistics are due how often: the refresh policies a simulation knows.

A policy is a list of kinds of step, each with its share of all steps and with the
fraction of statistics that is estimated, and inverted, in such a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from natgrad_lab.errors import UserError
from natgrad_lab.train.metrics import read_metrics


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of step: ``share`` of all steps; fractions of statistics due in it."""

    share: float
    estimated: float
    inverted: float

    def __post_init__(self) -> None:
        for name in ("share", "estimated", "inverted"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise ValueError(f"Invalid {name}={value}. Must be in [0, 1].")


Policy = tuple[Kind, ...]


def every(statistics: int = 1, inverses: int = 1) -> Policy:
    """Estimate every ``statistics`` steps, invert every ``inverses`` steps.

    An inverse waits for an estimate, so it is not made more often than that.
    """
    for name, value in (("statistics", statistics), ("inverses", inverses)):
        if value < 1:
            raise ValueError(f"Invalid {name}={value}. Must be >= 1.")
    both = 1 / max(statistics, inverses)
    kinds = (
        Kind(share=both, estimated=1.0, inverted=1.0),
        Kind(share=1 / statistics - both, estimated=1.0, inverted=0.0),
        Kind(share=1 - 1 / statistics, estimated=0.0, inverted=0.0),
    )
    return tuple(kind for kind in kinds if kind.share > 0)


def reduced(rate: float) -> Policy:
    """Each step refreshes this fraction of the statistics (SP-NGD, Table 2)."""
    return (Kind(share=1.0, estimated=rate, inverted=rate),)


def replay(path: Path) -> Policy:
    """The refreshes that a run recorded, from its ``metrics.jsonl`` or run folder.

    Records hold the share of statistics' bytes refreshed since the start; differences
    give the share between records. Shares are kept to a percent.
    """
    file = path / "metrics.jsonl" if path.is_dir() else path
    if not file.is_file():
        raise UserError(
            f"{file} does not exist. Give a run folder or its metrics.jsonl."
        )
    records = [r for r in read_metrics(file) if r.get("reduction") is not None]
    if not records:
        raise UserError(f"{file} records no refreshes: was the run made with K-FAC?")
    steps = [(int(r["step"]), float(r["reduction"])) for r in records]
    return _from_totals(steps)


def _from_totals(totals: Sequence[tuple[int, float]]) -> Policy:
    shares: Counter[float] = Counter()
    last_step, last_sum = 0, 0.0
    for step, rate in totals:
        count, total = step - last_step, rate * step
        if count > 0:
            share = min(1.0, max(0.0, (total - last_sum) / count))
            shares[round(share, 2)] += count
        last_step, last_sum = step, total
    every_step = sum(shares.values())
    return tuple(
        Kind(share=count / every_step, estimated=rate, inverted=rate)
        for rate, count in sorted(shares.items())
    )
