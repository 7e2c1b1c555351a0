"""Who owns which statistic and who preconditions which block.

A strategy is data: how many ranks precondition a block. The ranks form KAISA's grid,
whose columns hold that many ranks. A block goes to a column, its statistics to ranks
inside it: one worker a column is ``layer_wise``, one column is ``factor_wise``.
A placement says how blocks spread over columns and statistics over a column's ranks.
"""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from natgrad.plan.cost import CostModel
from natgrad.plan.spec import BlockSpec, StatisticSpec

Ranks = tuple[int, ...]
Job = tuple[str, float]


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """How many ranks precondition a block.

    Attributes:
        name: As shown and as accepted in place of the object.
        fraction: Workers a block as a fraction of the world, rounded, at least one.
        shard_plain: Whether a plain parameter has one worker instead of all ranks.
    """

    name: str
    fraction: float
    shard_plain: bool = False

    def workers(self, world: int) -> int:
        """Ranks that precondition a block."""
        return max(1, math.floor(self.fraction * world + 0.5))


def hybrid(fraction: float) -> Strategy:
    """KAISA's trade of memory for traffic: ``fraction`` of the world are workers."""
    if not 0 < fraction <= 1:
        raise ValueError(f"Invalid fraction={fraction}. Must be in (0, 1].")
    return Strategy(name=f"hybrid({fraction:g})", fraction=fraction)


FIRST_STRATEGY, FIRST_PLACEMENT = "factor_wise", "longest_first"
"""What holds unless others are given."""
STRATEGIES: dict[str, Strategy] = {
    s.name: s
    for s in (
        Strategy(name="spngd", fraction=0.0, shard_plain=True),
        Strategy(name="layer_wise", fraction=0.0),
        Strategy(name="factor_wise", fraction=1.0),
    )
}


def find_strategy(strategy: str | Strategy) -> Strategy:
    """The strategy of that name; ``"hybrid(0.5)"`` names ``hybrid(0.5)``."""
    if isinstance(strategy, Strategy):
        return strategy
    if strategy in STRATEGIES:
        return STRATEGIES[strategy]
    if match := re.fullmatch(
        r"hybrid\(([0-9.eE+-]+)\)", str(strategy).replace(" ", "")
    ):
        return hybrid(float(match[1]))
    legal = (*STRATEGIES, "hybrid(f)")
    raise ValueError(
        f"Invalid strategy={strategy!r}. Must be one of {legal}; KFAC and SPNGD also "
        "take 'auto'."
    )


def in_turn(jobs: Sequence[Job], loads: Sequence[float]) -> list[int]:
    """Job i to bin i modulo the number of bins."""
    return [i % len(loads) for i in range(len(jobs))]


def greedy(jobs: Sequence[Job], loads: Sequence[float]) -> list[int]:
    """The longest job first, each to the least loaded bin; ties by name and index."""
    heap = [(load, i) for i, load in enumerate(loads)]
    heapq.heapify(heap)
    bins = [0] * len(jobs)
    for i in sorted(range(len(jobs)), key=lambda i: (-jobs[i][1], jobs[i][0])):
        load, bins[i] = heap[0]
        heapq.heapreplace(heap, (load + jobs[i][1], bins[i]))
    return bins


@dataclass(frozen=True, kw_only=True)
class Placement:
    """How jobs spread over bins.

    Attributes:
        spread: From jobs (name, seconds) and the bins' loads to a bin for each job.
        whole_layers: Whether a layer's statistics stay together while there are at
            least as many layers as ranks, as Osawa et al. do.
    """

    spread: Callable[[Sequence[Job], Sequence[float]], list[int]]
    whole_layers: bool


PLACEMENTS: dict[str, Placement] = {
    "round_robin": Placement(spread=in_turn, whole_layers=True),
    "longest_first": Placement(spread=greedy, whole_layers=False),
}


def find_placement(placement: str) -> Placement:
    """The placement of that name."""
    if placement not in PLACEMENTS:
        legal = tuple(PLACEMENTS)
        raise ValueError(f"Invalid placement={placement!r}. Must be one of {legal}.")
    return PLACEMENTS[placement]


def grid(world: int, workers: int) -> list[Ranks]:
    """Columns of ``workers`` ranks that together cover the world.

    With c columns, column j is j, j + c, j + 2c, ..., so that a row is c neighbours
    and the updates of every step stay near. When ``workers`` does not divide the
    world, columns overlap: a short one borrows the ranks after its first.
    """
    count = -(-world // workers)
    return [_column(world, workers, count, j) for j in range(count)]


def _column(world: int, workers: int, count: int, j: int) -> Ranks:
    ranks = list(range(j, world, count))
    if len(ranks) < workers:
        taken = set(ranks)
        after = (r % world for r in range(j + 1, j + world))
        ranks += [r for r in after if r not in taken][: workers - len(ranks)]
    return tuple(sorted(ranks))


def assign(
    strategy: Strategy,
    placement: Placement,
    blocks: Sequence[BlockSpec],
    world: int,
    cost: CostModel,
    *,
    sharded: bool = False,
) -> tuple[dict[str, int], dict[str, Ranks]]:
    """Owners (statistic name to rank) and workers (block name to sorted ranks).

    ``sharded``: ranks have parameters in pieces. One worker has the whole matrix then,
    whatever the strategy; all work on their pieces of what is elementwise.
    """
    if sharded:
        strategy = replace(strategy, fraction=0.0, shard_plain=True)
    columns = grid(world, strategy.workers(world))
    layers = [block for block in blocks if block.statistics]
    homes = _columns_of(layers, columns, placement, cost)
    workers = {b.name: columns[home] for b, home in zip(layers, homes, strict=True)}
    owners: dict[str, int] = {}
    loads = [0.0] * world
    for home, ranks in enumerate(columns):
        mine = [b for b, h in zip(layers, homes, strict=True) if h == home]
        owners |= _owners_in(ranks, mine, placement, cost, loads)
    stay = [block for block in blocks if sharded and block.elementwise]
    held = {block.name for block in (*layers, *stay)}
    plain = [block for block in blocks if block.name not in held]
    workers |= _plain_workers(strategy, placement, plain, layers, workers, world)
    return owners, workers | {b.name: tuple(range(world)) for b in stay}


def _columns_of(
    layers: Sequence[BlockSpec],
    columns: Sequence[Ranks],
    placement: Placement,
    cost: CostModel,
) -> list[int]:
    # All of a column precondition; its inversions are divided among its ranks.
    def seconds(block: BlockSpec) -> float:
        invert = sum(cost.invert(spec) for spec in block.statistics)
        return invert / len(columns[0]) + cost.precondition(block)

    jobs = [(block.name, seconds(block)) for block in layers]
    return placement.spread(jobs, [0.0] * len(columns))


def _owners_in(
    ranks: Ranks,
    layers: Sequence[BlockSpec],
    placement: Placement,
    cost: CostModel,
    loads: list[float],
) -> dict[str, int]:
    """Spread the statistics of a column's layers over its ranks, adding to loads."""
    whole = placement.whole_layers and len(layers) >= len(ranks)
    units: list[tuple[StatisticSpec, ...]] = (
        [b.statistics for b in layers]
        if whole
        else [(spec,) for b in layers for spec in b.statistics]
    )
    jobs = [(unit[0].name, sum(map(cost.invert, unit))) for unit in units]
    bins = placement.spread(jobs, [loads[rank] for rank in ranks])
    for (_, seconds), i in zip(jobs, bins, strict=True):
        loads[ranks[i]] += seconds
    chosen = zip(units, bins, strict=True)
    return {spec.name: ranks[i] for unit, i in chosen for spec in unit}


def _plain_workers(
    strategy: Strategy,
    placement: Placement,
    plain: Sequence[BlockSpec],
    layers: Sequence[BlockSpec],
    workers: dict[str, Ranks],
    world: int,
) -> dict[str, Ranks]:
    if not strategy.shard_plain:
        everyone = tuple(range(world))
        return {block.name: everyone for block in plain}
    loads = [0.0] * world
    for block in layers:
        loads[workers[block.name][0]] += block.elements
    bins = placement.spread([(b.name, float(b.elements)) for b in plain], loads)
    return {block.name: (rank,) for block, rank in zip(plain, bins, strict=True)}
