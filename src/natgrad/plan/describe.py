"""Readable tables: of a plan, and what tables are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def size_text(count: float) -> str:
    """Bytes with a binary unit: ``1536`` is ``1.5 KiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table whose columns are as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def describe_plan(plan: Mapping[str, Any], limit: int = 16) -> str:
    """Render ``Plan.to_dict()``: totals, exchanges, the collectives of a step
    and up to ``limit`` ranks."""
    parts = [*_totals(plan), "", *_exchanges(plan), ""]
    parts += [*_sequence(plan, limit), ""] if plan["sequence"] else []
    return "\n".join([*parts, *_ranks(plan, limit)])


def _totals(plan: Mapping[str, Any]) -> list[str]:
    seconds = [rank["seconds"] for rank in plan["ranks"]]
    mean = sum(seconds) / len(seconds)
    imbalance = max(seconds) / mean if mean else 1.0
    size = size_text(plan["statistics_bytes"])
    return [
        f"{plan['strategy']} on {plan['world']} ranks, placed {plan['placement']}",
        f"{plan['layers']} layers, {len(plan['blocks'])} blocks, "
        f"statistics {size} as whole matrices",
        f"slowest rank {max(seconds):.3g} s, mean {mean:.3g} s, "
        f"imbalance {imbalance:.2f}",
    ]


def _exchanges(plan: Mapping[str, Any]) -> list[str]:
    rows = [f"{'exchange':<18}{'items':>7}{'payload':>13}{'on the wire':>13}"]
    for name, x in plan["exchanges"].items():
        payload, wire = size_text(x["bytes"]), size_text(x["wire_bytes"])
        rows.append(f"{name:<18}{x['items']:>7}{payload:>13}{wire:>13}")
    return rows


def _sequence(plan: Mapping[str, Any], limit: int) -> list[str]:
    rows = plan["sequence"]
    total = sum(row["collectives"] for row in rows)
    padded = any(row["padding"] for row in rows)
    found = [
        f"{total} collectives of rank 0 in a step that refreshes all, in order",
        f"{'exchange':<18}{'kind':<14}{'count':>6}{'ranks':>6}{'payload':>11}"
        + (f"{'padding':>11}  after" if padded else "  after"),
    ]
    for row in rows[:limit]:
        padding = f"{size_text(row['padding']):>11}" if padded else ""
        found.append(
            f"{row['exchange']:<18}{row['kind']:<14}{row['collectives']:>6}"
            f"{row['ranks']:>6}{size_text(row['bytes']):>11}{padding}  {row['after']}"
        )
    left = len(rows) - limit
    return [*found, f"({left} more rows are not shown)"] if left > 0 else found


def _ranks(plan: Mapping[str, Any], limit: int) -> list[str]:
    ranks = plan["ranks"]
    shown = ranks
    if len(ranks) > limit:
        # The slowest say where the time goes, the idlest what is wasted.
        order = sorted(ranks, key=lambda r: (-r["seconds"], r["rank"]))
        shown = order[: limit - limit // 2] + order[len(order) - limit // 2 :]
    heads = ("statistics", "held", "inverses", "sent", "received", "seconds")
    rows = [f"{'rank':>6}" + "".join(f"{head:>12}" for head in heads)]
    rows += [_rank(rank) for rank in shown]
    left = len(ranks) - len(shown)
    return [*rows, f"({left} ranks between these are not shown)"] if left else rows


def _rank(rank: Mapping[str, Any]) -> str:
    cells = [
        str(rank["statistics"]),
        size_text(rank["bytes"]),
        size_text(rank["inverse_bytes"]),
        size_text(sum(rank["sent"].values())),
        size_text(sum(rank["received"].values())),
        f"{rank['seconds']:.3g}",
    ]
    return f"{rank['rank']:>6}" + "".join(f"{cell:>12}" for cell in cells)
