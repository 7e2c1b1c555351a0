"""Bytes that a run keeps on each rank between steps, as the library keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from natgrad.plan.cost import keeps_basis
from natgrad.plan.loads import Tally
from natgrad.plan.spec import FLOAT_BYTES, BlockSpec, StatisticSpec

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
        moments: Tensors of its size that a block with A or G has besides: a second
            moment (of a rule that adapts), and the averaged gradient in its bases.
        row_moments: Whether it has a number for each row besides (NorMuon's).
        rest_moments: Whether parameters without statistics have second moments (of a
            fallback that adapts).
        of_blocks: Elements of both by block name, if rules differ.
    """

    decay: float = 0.95
    waits: bool = True
    changes: bool = False
    history: int = 0
    moments: int = 0
    row_moments: bool = False
    rest_moments: bool = False
    of_blocks: Mapping[str, int] | None = None

    def averages(self, spec: StatisticSpec) -> bool:
        """Whether the owner has an average between steps. An S is used at once."""
        if self.decay or self.changes:
            return True
        return self.waits and spec.kind != "S"

    def moment(self, block: BlockSpec) -> int:
        """Elements of the moments that the block's workers have."""
        if self.of_blocks is not None:
            return self.of_blocks.get(block.name, 0)
        if not block.statistics:
            return block.elements * self.rest_moments
        if not {s.kind for s in block.statistics} <= FACTORS:
            return 0
        rows = block.stack * block.rows * self.row_moments
        return block.elements * self.moments + rows


def inverse_kept(spec: StatisticSpec, inverse: str) -> int:
    """Elements of an inverse in memory: whole, or eigenvectors and eigenvalues.

    Of what is packed the triangle, and of a triangular root a zero.
    """
    if spec.packing:
        return spec.packed + (spec.stack if spec.packing == "upper" else 0)
    vectors = keeps_basis(spec, inverse)
    return spec.elements + (spec.stack * spec.size if vectors else 0)


def memory_of(plan: Plan, keeps: Keeps) -> list[dict[str, int]]:
    """Float32 bytes by rank.

    ``statistics`` are packed averages and ``history`` packed inverses, on owners;
    ``inverses`` are on owners and on all that precondition by them, ``moments`` on a
    block's workers.
    """
    averages, history, inverses, moments = (Tally(plan.world, 0) for _ in PARTS)
    for spec in plan.statistics:
        owner = (plan.owners[spec.name],)
        averages.add(owner, spec.packed * keeps.averages(spec))
        history.add(owner, spec.packed * keeps.history)
    for block in plan.blocks:
        kept = sum(inverse_kept(spec, plan.inverse) for spec in block.statistics)
        inverses.add(plan.keepers(block.name), kept)
        moment = keeps.moment(block)
        if moment and block.elementwise and block.cuts:  # as the parameter is cut
            for rank in range(plan.world):
                moments.add((rank,), block.held(rank))
        else:
            moments.add(plan.workers[block.name], moment)
    columns = (x.totals() for x in (averages, history, inverses, moments))
    return [
        {part: FLOAT_BYTES * n for part, n in zip(PARTS, row, strict=True)}
        for row in zip(*columns, strict=True)
    ]
