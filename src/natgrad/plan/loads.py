"""A number for each rank: what it inverts, preconditions, keeps or sends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from natgrad.plan.strategies import Ranks

if TYPE_CHECKING:
    from natgrad.plan.plan import Plan

N = TypeVar("N", int, float)


class Tally(Generic[N]):
    """A number for each rank, where adding to everyone costs one operation."""

    def __init__(self, world: int, zero: N) -> None:
        self._world, self._all, self._some = world, zero, [zero] * world

    def add(self, ranks: Ranks, value: N) -> None:
        """Let the numbers of these ranks grow."""
        if len(ranks) == self._world:
            self._all += value
        else:
            for rank in ranks:
                self._some[rank] += value

    def totals(self) -> list[N]:
        """The numbers, by rank."""
        return [self._all + value for value in self._some]


def inversion_loads(plan: Plan) -> list[float]:
    """Seconds of inversion by rank, when everything is due."""
    seconds = Tally(plan.world, 0.0)
    for spec in plan.statistics:
        seconds.add((plan.owners[spec.name],), plan.cost.invert(spec))
    return seconds.totals()


def precondition_loads(plan: Plan) -> list[float]:
    """Seconds of preconditioning by rank, in every step."""
    seconds = Tally(plan.world, 0.0)
    for block in plan.blocks:
        seconds.add(plan.workers[block.name], plan.cost.precondition(block))
    return seconds.totals()
