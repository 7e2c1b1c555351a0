"""Bytes on each rank and in each step, and the check that they fit."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from natgrad import Budget, Options, Rule
from natgrad.layers import Block
from natgrad.plan import (
    FLOAT_BYTES,
    Keeps,
    Plan,
    memory_of,
    size_text,
)
from natgrad_lab.errors import UserError
from natgrad_lab.simulate.work import Work

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_size(text: str) -> int:
    """Bytes: ``16G``, ``512 MiB`` or ``1000000``; units are powers of 1024."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*([KMGT]?)(?:i?B)?\s*", text, re.IGNORECASE)
    if match is None:
        raise UserError(f"Invalid memory={text!r}. Must be like 16G, 512M or 1000000.")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def keeps_of(options: Options, ruled: Sequence[tuple[str, Block]] = ()) -> Keeps:
    """What a method keeps between steps; ``ruled`` are blocks with their own rules."""
    statistics, inverses = options.refresh.mean_intervals()
    return Keeps(
        decay=options.factor_decay,
        waits=inverses > statistics,
        changes=isinstance(options.refresh, Budget),
        history=0 if options.refresh.tolerance is None else 2,
        moments=options.rule.adapts + _has_mean(options.rule, options),
        row_moments=options.rule.moment_shape((1, 2, 3)) == (1, 2, 1),
        rest_moments=options.fallback.adapts,
        of_blocks={b.name: _moments(b, options) for _, b in ruled} if ruled else None,
    )


def _moments(block: Block, options: Options) -> int:
    """Elements of a block's second moment, and of its averaged gradient in bases."""
    spec = block.spec
    shape = block.rule.moment_shape((spec.stack, spec.rows, spec.cols))
    mean = spec.elements * _has_mean(block.rule, options)
    return mean + (math.prod(shape) if shape else 0)


def _has_mean(rule: Rule, options: Options) -> bool:
    return rule.projects and options.average.has_newest


def memory_by_rank(
    plan: Plan,
    work: Work,
    batch: int,
    *,
    keeps: Keeps | None = None,
    sharded: bool,
    cut: bool = False,
) -> list[dict[str, int]]:
    """Float32 bytes by rank: curvature as planned, the rest of training, activations.

    ``momentum`` is on all ranks for all weights, or, ``sharded`` as by SPNGD and Polar,
    on those that update a weight; ``cut`` as the weight is, of a model that is itself
    sharded, of which weights and gradients are pieces. ``activations`` counts every
    layer's output once, for ``batch`` examples: an estimate from above for inference,
    from below with temporaries.
    """
    weights = [FLOAT_BYTES * work.parameters] * plan.world
    if plan.gradients == "sharded":
        weights = weights_of(plan)
    momentum = momentum_of(plan, sharded=sharded, cut=cut)
    active = FLOAT_BYTES * batch * work.elements
    kept = memory_of(plan, keeps or Keeps())
    rows = [
        {
            **mine,
            "momentum": own,
            "weights": held,
            "gradients": held,
            "activations": active,
        }
        for mine, own, held in zip(kept, momentum, weights, strict=True)
    ]
    return [row | {"total": sum(row.values())} for row in rows]


def momentum_of(plan: Plan, *, sharded: bool, cut: bool = False) -> list[int]:
    """Float32 bytes of momentum by rank; arguments as of `memory_by_rank`."""
    if cut and plan.gradients == "sharded":
        return weights_of(plan)
    if not sharded:
        return [FLOAT_BYTES * sum(b.elements for b in plan.blocks)] * plan.world
    elements = [0] * plan.world
    for block in plan.blocks:
        for rank in plan.workers[block.name]:
            alone = block.elementwise and block.cuts
            elements[rank] += block.held(rank) if alone else block.elements
    return [FLOAT_BYTES * count for count in elements]


def weights_of(plan: Plan) -> list[int]:
    """Float32 bytes of a sharded model's weights by rank."""
    ranks = range(plan.world)
    return [FLOAT_BYTES * sum(b.held(rank) for b in plan.blocks) for rank in ranks]


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


def exchange_bytes(
    plan: Plan, statistics: float = 1, inverses: float = 1
) -> dict[str, dict[str, Any]]:
    """Payload by exchange: packed or whole, full or half precision.

    In a step in which all is due; ``mean`` is of a step, packed, if statistics are
    estimated and inverses made every so many steps.
    """
    whole = {spec.name: spec.elements for spec in plan.statistics}
    moments = {spec.name for spec in plan.statistics if spec.kind == "S"}
    intervals = {"reduce_statistics": statistics, "share_inverses": inverses}
    table: dict[str, dict[str, Any]] = {}
    for name, exchange in plan.exchanges.items():
        packed = dense = exchange.elements()
        symmetric = name == "share_inverses" and plan.inverse == "factored"
        if symmetric or name == "reduce_statistics":
            dense = sum(whole[item.name] for item in exchange.items)
        interval = intervals.get(name, 1)
        mean = sum(
            # An S is used, and shared, as soon as it is estimated.
            item.elements / (statistics if item.name in moments else interval)
            for item in exchange.items
        )
        table[name] = {
            "items": len(exchange.items),
            "packed": 4 * packed,
            "packed_half": 2 * packed,
            "whole": 4 * dense,
            "whole_half": 2 * dense,
            "mean": 4 * mean,
            "mean_half": 2 * mean,
        }
    return table
