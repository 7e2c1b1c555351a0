"""The records of a run's diagnostics, as tables over steps."""

from collections.abc import Sequence
from typing import Any

from natgrad_lab.train.records import Record

COLUMNS = 240
"""More looks than this are thinned out: a page holds no more pixels."""


def thin(records: Sequence[Record], most: int = COLUMNS) -> list[Record]:
    """At most ``most`` of the records, evenly, with the first and the last."""
    if len(records) <= most:
        return list(records)
    last = len(records) - 1
    return [records[round(i * last / (most - 1))] for i in range(most)]


def layers(records: Sequence[Record]) -> list[str]:
    """The blocks that have statistics, in the model's order."""
    return [name for name, b in records[-1]["blocks"].items() if "largest" in b]


def column(records: Sequence[Record], layer: str, key: str) -> list[Any]:
    """One quantity of one layer at every look; None where it is not known."""
    return [r["blocks"].get(layer, {}).get(key) for r in records]


def family(kind: str) -> str:
    """A, G, or the normalisation layers' statistics together."""
    return kind if kind in ("A", "G") else "norm"


def percentiles(values: Sequence[float], shares: Sequence[float]) -> list[float]:
    """Between the two nearest values, linearly."""
    ordered = sorted(values)
    found: list[float] = []
    for share in shares:
        at = share * (len(ordered) - 1)
        low = int(at)
        high = min(low + 1, len(ordered) - 1)
        found.append(ordered[low] + (at - low) * (ordered[high] - ordered[low]))
    return found


def mean_seconds(records: Sequence[Record]) -> dict[str, float]:
    """Seconds a step by phase, over all looks but the first, which only begins."""
    later = records[1:] or records
    steps = sum(r["steps"] for r in later)
    return {
        phase: sum(r["seconds"][phase] * r["steps"] for r in later) / steps
        for phase in later[-1]["seconds"]
    }


def change_rates(records: Sequence[Record]) -> dict[str, list[list[float]]]:
    """By family: a row a look, the step and {5, 25, 50, 75, 95}th percentiles.

    Over all layers, of how much a statistic had changed when it was refreshed (Osawa et
    al. 2019, eq. 19 and Figure 5); only statistics refreshed since the look before.
    """
    shares = (0.05, 0.25, 0.5, 0.75, 0.95)
    result: dict[str, list[list[float]]] = {}
    for record in records:
        found: dict[str, list[float]] = {}
        for s in record["statistics"].values():
            if s["refreshed"] and s["change"] is not None:
                found.setdefault(family(s["kind"]), []).append(s["change"])
        for kind, values in found.items():
            row = [record["step"], *percentiles(values, shares)]
            result.setdefault(kind, []).append(row)
    return result


def statistics_bytes(records: Sequence[Record]) -> list[Record]:
    """Bytes of statistics estimated a step, by family (SP-NGD, Figure 6).

    A rank hands them over once; on one rank they are what it would hand over.
    """
    rows: list[Record] = []
    for record in records:
        row: Record = {"step": record["step"], "A": 0.0, "G": 0.0, "norm": 0.0}
        for s in record["statistics"].values():
            size = s["refreshed"] * s["packed_bytes"] / record["steps"]
            row[family(s["kind"])] += size
        rows.append(row)
    return rows
