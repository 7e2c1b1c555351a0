"""Bytes on each rank, and the check that they fit."""

from __future__ import annotations

import re
from typing import Any

from natgrad.plan import Plan
from natgrad.plan.describe import size_text
from natgrad.plan.plan import FLOAT_BYTES
from natgrad_lab.errors import UserError
from natgrad_lab.simulate.work import Work

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_size(text: str) -> int:
    """Bytes: ``16G``, ``512 MiB`` or ``1000000``; units are powers of 1024."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*([KMGT]?)(?:i?B)?\s*", text, re.IGNORECASE)
    if match is None:
        raise UserError(f"Invalid memory={text!r}. Must be like 16G, 512M or 1000000.")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def memory_by_rank(plan: Plan, work: Work, batch: int) -> list[dict[str, int]]:
    """Float32 bytes by rank: curvature as planned, the rest of training, activations.

    ``momentum`` is on all ranks for all weights, or with ``spngd`` on the one rank that
    updates a weight. ``activations`` counts every layer's output once, for ``batch``
    examples: an estimate from above for inference, from below with temporaries.
    """
    weights = FLOAT_BYTES * work.parameters
    momentum = [0] * plan.world
    for block in plan.blocks:
        if plan.strategy == "spngd":
            for rank in plan.workers[block.name]:
                momentum[rank] += FLOAT_BYTES * block.elements
    if plan.strategy != "spngd":
        momentum = [weights] * plan.world
    fixed = {
        "weights": weights,
        "gradients": weights,
        "activations": FLOAT_BYTES * batch * work.elements,
    }
    rows = [
        {
            "statistics": rank["bytes"],
            "inverses": rank["inverse_bytes"],
            "momentum": momentum[rank["rank"]],
            **fixed,
        }
        for rank in plan.ranks()
    ]
    return [row | {"total": sum(row.values())} for row in rows]


def require_fit(rows: list[dict[str, int]], memory: int) -> None:
    """Raise, with the numbers, if some rank needs more than ``memory`` bytes."""
    over = [rank for rank, row in enumerate(rows) if row["total"] > memory]
    if not over:
        return
    worst = max(over, key=lambda rank: rows[rank]["total"])
    parts = ", ".join(
        f"{name} {size_text(value)}"
        for name, value in rows[worst].items()
        if name != "total"
    )
    raise UserError(
        f"{len(over)} of {len(rows)} ranks need more than {size_text(memory)}: rank "
        f"{worst} needs {size_text(rows[worst]['total'])} ({parts})."
    )


def exchange_bytes(plan: Plan) -> dict[str, dict[str, Any]]:
    """Payload by exchange, when all is due: packed or whole, full or half precision."""
    whole = {spec.name: spec.elements for spec in plan.statistics}
    table: dict[str, dict[str, Any]] = {}
    for name, exchange in plan.exchanges.items():
        packed = exchange.elements()
        dense = packed
        if name == "reduce_statistics":
            dense = sum(whole[item.name] for item in exchange.items)
        if name == "share_inverses" and plan.inverse == "factored":
            dense = sum(whole[item.name] for item in exchange.items)
        table[name] = {
            "items": len(exchange.items),
            "packed": 4 * packed,
            "packed_half": 2 * packed,
            "whole": 4 * dense,
            "whole_half": 2 * dense,
        }
    return table
