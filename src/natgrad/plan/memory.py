"""Bytes that a run keeps on each rank between steps, as the library keeps them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from natgrad.plan.cost import keeps_basis
from natgrad.plan.spec import FLOAT_BYTES, BlockSpec, StatisticSpec
from natgrad.plan.strategies import Ranks

if TYPE_CHECKING:
    from natgrad.plan.plan import Plan

PARTS: tuple[str, ...] = ("statistics", "history", "inverses", "moments")
FACTORS = frozenset(("A", "G", "R", "L", "S"))


@dataclass(frozen=True, kw_only=True)
class Keeps:
    """What a method keeps of its statistics; the default is K-FAC's.

    Attributes:
        decay: Of the running averages. 0: an estimate is kept until it is inverted.
        waits: Whether estimates wait for an inversion in a later step.
        changes: Whether averages are kept in any case, to see how they change (Budget).
        history: Damped inverses kept to judge staleness by: 2 with Adaptive.
        moments, rest_moments: Whether blocks with A or G, and parameters without
            statistics, have second moments (rule and fallback that adapt).
        of_blocks: Elements of second moments by block name, if rules differ.
    """

    decay: float = 0.95
    waits: bool = True
    changes: bool = False
    history: int = 0
    moments: bool = False
    rest_moments: bool = False
    of_blocks: Mapping[str, int] | None = None

    def averages(self, spec: StatisticSpec) -> bool:
        """Whether the owner has an average between steps. An S is used at once."""
        if self.decay or self.changes:
            return True
        return self.waits and spec.kind != "S"

    def moment(self, block: BlockSpec) -> int:
        """Elements of the second moment that the block's workers have."""
        if self.of_blocks is not None:
            return self.of_blocks.get(block.name, 0)
        has = self.rest_moments
        if block.statistics:
            has = self.moments and {s.kind for s in block.statistics} <= FACTORS
        return block.elements if has else 0


def inverse_kept(spec: StatisticSpec, inverse: str) -> int:
    """Elements of an inverse in memory: whole, or eigenvectors and eigenvalues."""
    vectors = keeps_basis(spec, inverse)
    return spec.elements + (spec.stack * spec.size if vectors else 0)


def memory_of(plan: Plan, keeps: Keeps) -> list[dict[str, int]]:
    """Float32 bytes by rank.

    ``statistics`` are packed averages and ``history`` packed inverses, on owners;
    ``inverses`` are on owners and on all that precondition by them, ``moments`` on a
    block's workers.
    """
    rows = [dict.fromkeys(PARTS, 0) for _ in range(plan.world)]
    for spec in plan.statistics:
        mine = rows[plan.owners[spec.name]]
        mine["statistics"] += FLOAT_BYTES * spec.packed * keeps.averages(spec)
        mine["history"] += FLOAT_BYTES * spec.packed * keeps.history
    groups: dict[Ranks, dict[str, int]] = {}
    for block in plan.blocks:
        _add(groups, plan.keepers(block.name), "inverses", _inverses(plan, block))
        moment = keeps.moment(block)
        if moment and block.elementwise and block.cuts:  # as the parameter is cut
            for rank, row in enumerate(rows):
                row["moments"] += FLOAT_BYTES * block.held(rank)
            continue
        _add(groups, plan.workers[block.name], "moments", moment)
    for ranks, parts in groups.items():
        for rank in ranks:
            for part, elements in parts.items():
                rows[rank][part] += FLOAT_BYTES * elements
    return rows


def momentum_of(plan: Plan, *, sharded: bool, cut: bool = False) -> list[int]:
    """Float32 bytes of momentum by rank: on all ranks for all weights, or sharded:
    on the ranks that update a weight, as in SPNGD and Polar.

    ``cut``: of a sharded model, as each weight is, where it is one of updates.
    """
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
    """Float32 bytes of weights by rank: of a sharded model, of its pieces."""
    if plan.gradients != "sharded":
        return [FLOAT_BYTES * sum(b.elements for b in plan.blocks)] * plan.world
    ranks = range(plan.world)
    return [FLOAT_BYTES * sum(b.held(rank) for b in plan.blocks) for rank in ranks]


def _inverses(plan: Plan, block: BlockSpec) -> int:
    specs: Sequence[StatisticSpec] = block.statistics
    return sum(inverse_kept(spec, plan.inverse) for spec in specs)


def _add(
    groups: dict[Ranks, dict[str, int]], ranks: Ranks, part: str, elements: int
) -> None:
    if elements:
        parts = groups.setdefault(ranks, {})
        parts[part] = parts.get(part, 0) + elements
