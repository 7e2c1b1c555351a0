"""Seconds of inversion by rank, and the least that any placement can reach."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from natgrad.plan.plan import Plan


def loads_of(plan: Plan) -> list[float]:
    """Seconds of inversion by rank, when everything is due."""
    loads = [0.0] * plan.world
    for spec in plan.statistics:
        loads[plan.owners[spec.name]] += plan.cost.invert(spec)
    return loads


def lower_bound(plan: Plan) -> float:
    """No placement of whole factors does better: max(total / world, largest)."""
    seconds = [plan.cost.invert(spec) for spec in plan.statistics]
    return max(sum(seconds) / plan.world, max(seconds, default=0.0))
