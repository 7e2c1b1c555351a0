"""Plain-text tables of what is registered and what was refreshed."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from torch import nn

from natgrad.factors.pace import described, rates, refresh_seconds
from natgrad.layers import Block

if TYPE_CHECKING:
    from natgrad.engine.engine import Engine

HEADER = ("parameter", "block", "statistics", "bytes", "note")


def registration_table(engine: "Engine") -> str:
    """Every parameter: its block kind, factor sizes and bytes, or why it has none."""
    block_of = {id(p): b for b in engine.blocks for p in b.parameters}
    element = engine.like.element_size()
    rows = [
        _row(name, p, block_of.get(id(p)), element)
        for name, p in engine.model.named_parameters()
    ]
    covered = sum(p.numel() for b in engine.blocks if b.kind for p in b.parameters)
    total = sum(p.numel() for p in engine.model.parameters())
    blocks = sum(b.kind is not None for b in engine.blocks)
    size = sum(s.spec.packed for s in engine.statistics.states.values()) * element
    summary = (
        f"{blocks} blocks, {covered:,} of {total:,} parameters preconditioned, "
        f"{_bytes(size)} of statistics. {_expected(engine)}"
    )
    account = engine.statistics.account
    if account is not None:
        summary += f"\n{account.summary()['says']}"
    return f"{_table([HEADER, *rows])}\n{summary}"


def _expected(engine: "Engine") -> str:
    """What a refresh of everything will take, and what takes longest of it."""
    statistics, plan = engine.statistics, engine.plan
    seconds = refresh_seconds(plan.statistics, plan.owners, statistics.cost)
    slowest = max(plan.statistics, key=statistics.cost.invert)
    return (
        f"Inverting all of them is expected to take {seconds:.2g} s, "
        f"{statistics.cost.invert(slowest):.2g} s of it for {slowest.name} "
        f"(built-in rates {rates(engine.like.device)})."
    )


def refresh_summary(engine: "Engine") -> dict[str, Any]:
    """Counts by statistic, the share of bytes refreshed, and what a budget says."""
    account = engine.statistics.account
    states = engine.statistics.states.values()
    done = sum(s.spec.packed * s.timing.refreshed for s in states)
    every = sum(s.spec.packed * (s.timing.refreshed + s.timing.skipped) for s in states)
    return {
        "statistics": {
            s.spec.name: {
                "refreshed": s.timing.refreshed,
                "skipped": s.timing.skipped,
                "inverted": s.timing.inverted,
                "interval": s.timing.interval,
            }
            for s in states
        },
        "reduction_rate": done / every if every else 0.0,
        **({} if account is None else {"budget": account.summary()}),
        "last": asdict(engine.statistics.last),
    }


def _row(
    name: str, p: nn.Parameter, block: Block | None, element: int
) -> tuple[str, ...]:
    if block is None:
        return name, "-", "", "", "frozen" if not p.requires_grad else "not trained"
    if block.kind is None:
        return name, "-", "", "", block.reason
    specs = block.spec.statistics
    sizes = ", ".join(f"{s.kind} {described(s)}" for s in specs)
    size = sum(s.packed for s in specs) * element
    cut = [f"{s.kind} kept as {s.parts} diagonal blocks" for s in specs if s.parts > 1]
    note = "; ".join((*cut, block.note) if block.note else cut)
    first = p is block.parameters[0]
    return name, block.kind.name, sizes, _bytes(size) if first else "", note


def _table(rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def _bytes(count: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024  # pyright: ignore[reportAssignmentType]
    return f"{count:.1f} GiB"
