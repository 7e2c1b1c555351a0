"""Which statistics are due how often: the refresh policies a simulation knows.

A policy is a list of kinds of step, each with its share of all steps and with what is
estimated, and inverted, in such a step: a fraction of every statistic, or, replayed
from a run, the statistics by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from natgrad_lab.errors import UserError
from natgrad_lab.train.records import read_metrics
from natgrad_lab.train.refreshes import recorded


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of step: ``share`` of all steps; fractions of statistics due in it.

    ``named``, if given, are those estimated and those inverted; fractions are then
    only shown.
    """

    share: float
    estimated: float
    inverted: float
    named: tuple[frozenset[str], frozenset[str]] | None = None

    def __post_init__(self) -> None:
        for name in ("share", "estimated", "inverted"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise ValueError(f"Invalid {name}={value}. Must be in [0, 1].")

    def estimates(self, name: str) -> float:
        """How much of a statistic is estimated in such a step."""
        return self.estimated if self.named is None else float(name in self.named[0])

    def inverts(self, name: str) -> float:
        """How much of a statistic is inverted in such a step.

        Of an S there is nothing to invert: it is used as soon as it is estimated.
        """
        if name.endswith("/S"):
            return self.estimates(name)
        return self.inverted if self.named is None else float(name in self.named[1])


Policy = tuple[Kind, ...]

MOST_KINDS = 200
"""A replay of more different steps than these takes every so manieth of them."""


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

    Each step refreshes the statistics that it did in the run. Runs recorded without
    names hold the share of statistics' bytes refreshed since the start; differences
    give the share between records, kept to a percent.
    """
    file = path / "metrics.jsonl" if path.is_dir() else path
    if not file.is_file():
        raise UserError(
            f"{file} does not exist. Give a run folder or its metrics.jsonl."
        )
    everything = read_metrics(file)
    if steps := recorded(everything):
        return _from_names(list(steps.values()))
    records = [r for r in everything if r.get("reduction") is not None]
    if not records:
        raise UserError(f"{file} records no refreshes: was the run made with K-FAC?")
    steps = [(int(r["step"]), float(r["reduction"])) for r in records]
    return _from_totals(steps)


def _from_names(steps: Sequence[tuple[frozenset[str], frozenset[str]]]) -> Policy:
    known = len(frozenset().union(*(names for step in steps for names in step))) or 1
    counts = Counter(steps)
    if len(counts) > MOST_KINDS:
        stride = -(-len(steps) // MOST_KINDS)
        counts = Counter(steps[::stride])
    total = sum(counts.values())
    return tuple(
        Kind(
            share=count / total,
            estimated=len(estimated) / known,
            inverted=len(inverted) / known,
            named=(estimated, inverted),
        )
        for (estimated, inverted), count in counts.items()
    )


def require_names(policy: Policy, known: Collection[str]) -> None:
    """Raise if a replayed run refreshed statistics that the model does not have."""
    named = [names for kind in policy if kind.named for names in kind.named]
    strange = sorted(frozenset().union(*named) - frozenset(known))
    if strange:
        raise UserError(
            f"The run refreshed {strange[0]} and {len(strange) - 1} more statistics "
            "that this model does not have. Must be the run's own --model and --norm."
        )


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
