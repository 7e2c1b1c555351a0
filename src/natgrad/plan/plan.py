"""The plan: pure data saying who owns, who works and what moves."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from natgrad.plan.check import check_plan
from natgrad.plan.cost import CostModel
from natgrad.plan.describe import describe_plan
from natgrad.plan.exchange import Exchange, derive_exchanges
from natgrad.plan.loads import Tally, inversion_loads, precondition_loads
from natgrad.plan.memory import Keeps, memory_of
from natgrad.plan.messages import Message, Wiring
from natgrad.plan.sequence import sequence, summary
from natgrad.plan.shards import cut_up
from natgrad.plan.spec import FLOAT_BYTES, BlockSpec, StatisticSpec
from natgrad.plan.strategies import (
    FIRST_PLACEMENT,
    FIRST_STRATEGY,
    Ranks,
    Strategy,
    assign,
    find_placement,
    find_strategy,
)

if TYPE_CHECKING:
    from torch import nn

GRADIENTS = ("own", "ddp", "sharded")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Owners, workers and exchanges of a model's blocks on ``world`` ranks.

    Attributes:
        world: Number of ranks.
        blocks: The model's blocks, in the model's order.
        owners: Statistic name to the rank that holds and inverts it.
        workers: Block name to the sorted ranks that precondition it.
        exchanges: What moves, by name: reduce_statistics, reduce_gradients,
            share_inverses, share_updates.
        strategy, placement, gradients, inverse: What the plan was made from.
        cost: The cost model. It decided the owners but is not part of the digest.
    """

    world: int
    blocks: tuple[BlockSpec, ...]
    owners: Mapping[str, int]
    workers: Mapping[str, Ranks]
    exchanges: Mapping[str, Exchange]
    strategy: str
    placement: str
    gradients: str
    inverse: str
    cost: CostModel

    @cached_property
    def statistics(self) -> tuple[StatisticSpec, ...]:
        """All statistics, in the order of their blocks."""
        return tuple(spec for block in self.blocks for spec in block.statistics)

    @property
    def layers(self) -> int:
        """Number of blocks that have statistics."""
        return sum(bool(block.statistics) for block in self.blocks)

    @property
    def statistics_bytes(self) -> int:
        """Bytes of all statistics as whole float32 matrices, as papers count them."""
        return FLOAT_BYTES * sum(spec.elements for spec in self.statistics)

    def keepers(self, block: str) -> Ranks:
        """The ranks that have a block's inverses: its workers, or all if it has an S.

        Every rank estimates S in the eigenbases of A and G.
        """
        if f"{block}/S" in self.owners:
            return tuple(range(self.world))
        return self.workers[block]

    def parts_kept(self, statistic: str, rank: int) -> tuple[str, ...]:
        """What a rank keeps of a statistic: its owner all, those with inverses these.

        Of ``"average"``, ``"inverse"`` and ``"history"``, as they are saved.
        """
        if self.owners[statistic] == rank:
            return ("average", "inverse", "history")
        block = statistic.rpartition("/")[0]
        return ("inverse",) if rank in self.keepers(block) else ()

    def check(self) -> None:
        """Raise ValueError unless every rank gets what it needs, exactly once."""
        check_plan(self)

    def digest(self) -> str:
        """SHA-256 of all that ranks must agree on; equal plans have equal digests."""
        names = ("world", "strategy", "placement", "gradients", "inverse")
        content: dict[str, Any] = {name: getattr(self, name) for name in names}
        content["blocks"] = [asdict(block) for block in self.blocks]
        content["owners"] = dict(self.owners)
        content["workers"] = {k: list(v) for k, v in self.workers.items()}
        content["exchanges"] = {k: _totals(x) for k, x in self.exchanges.items()}
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def sequence(self, wiring: Wiring | None = None, **step: Any) -> Sequence[Message]:
        """Every collective of a step, in the order in which all ranks start them.

        The step is as `natgrad.plan.sequence.sequence` takes it; by default one that
        refreshes everything.
        """
        return sequence(self, wiring, **step)

    def ranks(self, keeps: Keeps | None = None) -> list[dict[str, Any]]:
        """What each rank holds and does.

        ``statistics`` is how many it owns, ``elements`` their size as whole matrices,
        ``seconds`` its modelled work when everything is refreshed. Float32 bytes that
        it keeps between steps, by a method that ``keeps`` describes (K-FAC's running
        averages if None): ``bytes`` of averages, packed, ``history_bytes``,
        ``inverse_bytes`` and ``moment_bytes``, as in `memory_of`. ``sent`` and
        ``received`` are its float32 bytes when everything is refreshed, by exchange.
        """
        held = self._held()
        kept = memory_of(self, keeps or Keeps())
        moved = {name: x.volumes() for name, x in self.exchanges.items()}
        return [
            {
                "rank": rank,
                **held[rank],
                "bytes": kept[rank]["statistics"],
                "history_bytes": kept[rank]["history"],
                "inverse_bytes": kept[rank]["inverses"],
                "moment_bytes": kept[rank]["moments"],
                "sent": {k: FLOAT_BYTES * v[0][rank] for k, v in moved.items()},
                "received": {k: FLOAT_BYTES * v[1][rank] for k, v in moved.items()},
            }
            for rank in range(self.world)
        ]

    def _held(self) -> list[dict[str, Any]]:
        counts, elements = Tally(self.world, 0), Tally(self.world, 0)
        for spec in self.statistics:
            owner = (self.owners[spec.name],)
            counts.add(owner, 1)
            elements.add(owner, spec.elements)
        spent = zip(inversion_loads(self), precondition_loads(self), strict=True)
        held = zip(counts.totals(), elements.totals(), map(sum, spent), strict=True)
        names = "statistics", "elements", "seconds"
        return [dict(zip(names, each, strict=True)) for each in held]

    def _by_all(self, block: BlockSpec) -> bool:
        return len(self.workers[block.name]) == self.world

    def to_dict(self, keeps: Keeps | None = None) -> dict[str, Any]:
        """The plan as plain data: totals, blocks, exchanges, ``ranks()``.

        ``sequence`` has the collectives of a step that refreshes everything, those
        that rank 0 takes part in, in order, neighbours of one kind together.
        """
        return {
            "world": self.world,
            "strategy": self.strategy,
            "placement": self.placement,
            "gradients": self.gradients,
            "inverse": self.inverse,
            "digest": self.digest(),
            "layers": self.layers,
            "statistics_bytes": self.statistics_bytes,
            "blocks": [self._block_dict(block) for block in self.blocks],
            "exchanges": {k: _totals(x) for k, x in self.exchanges.items()},
            "sequence": summary(self.sequence(rank=0)),
            "ranks": self.ranks(keeps),
        }

    def _block_dict(self, block: BlockSpec) -> dict[str, Any]:
        workers = "all" if self._by_all(block) else list(self.workers[block.name])
        owners = {spec.kind: self.owners[spec.name] for spec in block.statistics}
        return {**asdict(block), "owners": owners, "workers": workers}

    def describe(self, keeps: Keeps | None = None) -> str:
        """A readable table: bytes held, bytes moved, work by rank, imbalance."""
        return describe_plan(self.to_dict(keeps))


def _totals(exchange: Exchange) -> dict[str, int]:
    return {
        "items": len(exchange.items),
        "elements": exchange.elements(),
        "bytes": FLOAT_BYTES * exchange.elements(),
        "wire_bytes": FLOAT_BYTES * exchange.wire(),
    }


def make_plan(
    model: nn.Module | Sequence[BlockSpec],
    *,
    world: int,
    strategy: str | Strategy = FIRST_STRATEGY,
    placement: str = FIRST_PLACEMENT,
    norm: str = "unit",
    costs: CostModel | Mapping[str, float] | None = None,
    gradients: str = "own",
    inverse: str = "eigen",
) -> Plan:
    """Plan a model's step on ``world`` ranks. No process is needed.

    Args:
        model: A module (may be on the meta device) or the specs of its blocks.
        world: Number of ranks.
        strategy: "spngd", "layer_wise", "factor_wise", "hybrid(f)" or its object.
        placement: "longest_first" (by cost) or "round_robin" (the papers').
        norm: Statistic of normalisation layers, when ``model`` is a module.
        costs: A cost model, or measured seconds by statistic name.
        gradients: "own" if the library reduces gradients, "ddp" if that is done,
            "sharded" if they arrive averaged and in pieces, as under `fully_shard`:
            of blocks without ``cuts``, a ``world``-th of the rows on each rank.
        inverse: "eigen" or "factored": what is computed and shared.
    """
    if world < 1:
        raise ValueError(f"Invalid world={world}. Must be >= 1.")
    if gradients not in GRADIENTS:
        raise ValueError(f"Invalid gradients={gradients!r}. Must be in {GRADIENTS}.")
    if not isinstance(costs, CostModel):
        costs = CostModel(inverse=inverse, measured=costs or {})
    chosen, blocks = find_strategy(strategy), _blocks_of(model, norm)
    sharded = gradients == "sharded"
    if sharded:
        blocks = tuple(b if b.cuts else _cut_by_rows(b, world) for b in blocks)
    owners, workers = assign(
        chosen, find_placement(placement), blocks, world, costs, sharded=sharded
    )
    exchanges = derive_exchanges(
        blocks, owners, workers, world, gradients=gradients, inverse=inverse
    )
    return Plan(
        world=world,
        blocks=blocks,
        owners=owners,
        workers=workers,
        exchanges=exchanges,
        strategy=chosen.name,
        placement=placement,
        gradients=gradients,
        inverse=inverse,
        cost=costs,
    )


def _cut_by_rows(block: BlockSpec, world: int) -> BlockSpec:
    """As `fully_shard` cuts a weight, and the bias that is its last column."""
    if block.elementwise:
        shapes = [(block.cols,)]
    else:
        shapes = [(block.stack * block.rows, block.cols)]
    cuts = tuple(cut_up(shape, [world], range(world), [0]) for shape in shapes)
    return replace(block, cuts=cuts)


def _blocks_of(
    model: nn.Module | Sequence[BlockSpec], norm: str
) -> tuple[BlockSpec, ...]:
    if isinstance(model, Sequence):
        return tuple(model)
    from natgrad.layers import LayerOptions, find_blocks

    return tuple(block.spec for block in find_blocks(model, LayerOptions(norm=norm)))
