"""The plan: pure data saying who owns, who works and what moves."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from natgrad.plan.cost import CostModel, inverse_elements
from natgrad.plan.describe import describe_plan
from natgrad.plan.exchange import Exchange, derive_exchanges
from natgrad.plan.spec import BlockSpec, StatisticSpec
from natgrad.plan.strategies import (
    Ranks,
    Strategy,
    assign,
    find_placement,
    find_strategy,
)

if TYPE_CHECKING:
    from torch import nn

GRADIENTS = ("own", "ddp")
FLOAT_BYTES = 4


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
        """Bytes of all statistics as held: whole matrices in float32."""
        return FLOAT_BYTES * sum(spec.elements for spec in self.statistics)

    def keepers(self, block: str) -> Ranks:
        """The ranks that have a block's inverses: its workers, or all if it has an S.

        Every rank estimates S in the eigenbases of A and G.
        """
        if f"{block}/S" in self.owners:
            return tuple(range(self.world))
        return self.workers[block]

    def check(self) -> None:
        """Raise ValueError unless every rank gets what it needs, exactly once."""
        _check_ranks(self)
        _check_statistics(self)
        _check_updates(self)

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

    def ranks(self) -> list[dict[str, Any]]:
        """What each rank holds and does.

        ``statistics`` is how many it owns, ``elements`` and ``bytes`` their size as
        whole float32 matrices, ``inverse_bytes`` the inverses it keeps for the blocks
        it works on, ``seconds`` its modelled work when everything is refreshed,
        ``sent`` and ``received`` its float32 bytes then, by exchange.
        """
        held = self._held()
        moved = {name: x.volumes() for name, x in self.exchanges.items()}
        return [
            {
                "rank": rank,
                **held[rank],
                "sent": {k: FLOAT_BYTES * v[0][rank] for k, v in moved.items()},
                "received": {k: FLOAT_BYTES * v[1][rank] for k, v in moved.items()},
            }
            for rank in range(self.world)
        ]

    def _held(self) -> list[dict[str, Any]]:
        held = [_load(self, []) for _ in range(self.world)]
        for spec in self.statistics:
            mine = held[self.owners[spec.name]]
            mine["statistics"] += 1
            mine["elements"] += spec.elements
            mine["bytes"] += FLOAT_BYTES * spec.elements
            mine["seconds"] += self.cost.invert(spec)
        columns: dict[Ranks, list[BlockSpec]] = {}
        for block in self.blocks:
            columns.setdefault(self.workers[block.name], []).append(block)
        for ranks, blocks in columns.items():
            load = _load(self, blocks)
            for rank in ranks:
                for key, value in load.items():
                    held[rank][key] += value
        return held

    def _by_all(self, block: BlockSpec) -> bool:
        return len(self.workers[block.name]) == self.world

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data: totals, blocks, exchanges and ``ranks()``."""
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
            "ranks": self.ranks(),
        }

    def _block_dict(self, block: BlockSpec) -> dict[str, Any]:
        workers = "all" if self._by_all(block) else list(self.workers[block.name])
        owners = {spec.kind: self.owners[spec.name] for spec in block.statistics}
        return {**asdict(block), "owners": owners, "workers": workers}

    def describe(self) -> str:
        """A readable table: bytes held, bytes moved, work by rank, imbalance."""
        return describe_plan(self.to_dict())


def _load(plan: Plan, blocks: Sequence[BlockSpec]) -> dict[str, Any]:
    """What preconditioning these blocks adds to a rank."""
    specs = [spec for block in blocks for spec in block.statistics]
    inverse = sum(inverse_elements(spec, plan.inverse) for spec in specs)
    return {
        "statistics": 0,
        "elements": 0,
        "bytes": 0,
        "inverse_bytes": FLOAT_BYTES * inverse,
        "seconds": sum(map(plan.cost.precondition, blocks)),
    }


def _totals(exchange: Exchange) -> dict[str, int]:
    return {
        "items": len(exchange.items),
        "elements": exchange.elements(),
        "bytes": FLOAT_BYTES * exchange.elements(),
        "wire_bytes": FLOAT_BYTES * exchange.wire(),
    }


def _check_ranks(plan: Plan) -> None:
    names = Counter(block.name for block in plan.blocks)
    names.update(spec.name for spec in plan.statistics)
    for name, count in names.items():
        if count > 1:
            raise ValueError(f"The name {name!r} is used {count} times. Must be once.")
    groups: dict[Ranks, str] = {}
    for name, ranks in plan.workers.items():
        groups.setdefault(ranks, f"workers of {name!r}")
    for exchange in plan.exchanges.values():
        for item in exchange.items:
            for ranks in (item.sources, item.destinations):
                groups.setdefault(ranks, f"{exchange.name} of {item.name!r}")
    for ranks, what in groups.items():
        ordered = all(a < b for a, b in pairwise(ranks))
        if not (ranks and ordered and ranks[0] >= 0 and ranks[-1] < plan.world):
            raise ValueError(
                f"Invalid ranks {ranks} in {what}. Must be sorted, distinct and in "
                f"[0, {plan.world})."
            )


def _check_statistics(plan: Plan) -> None:
    reduced = _once(plan.exchanges["reduce_statistics"])
    shared = _once(plan.exchanges["share_inverses"])
    for spec in plan.statistics:
        owner, workers = plan.owners.get(spec.name), plan.workers[spec.block]
        if spec.name not in reduced or reduced[spec.name].destinations != (owner,):
            raise ValueError(f"Statistic {spec.name!r} does not reach its one owner.")
        item = shared.get(spec.name)
        got = {owner} | set(item.destinations if item else ())
        if not got.issuperset(workers) or (item and item.sources != (owner,)):
            late = sorted(set(workers) - got)
            raise ValueError(
                f"Ranks {late} work on {spec.block!r} without the inverse of "
                f"{spec.name!r} from its owner {owner}."
            )


def _check_updates(plan: Plan) -> None:
    shared = _once(plan.exchanges["share_updates"])
    reduced = _once(plan.exchanges["reduce_gradients"])
    for block in plan.blocks:
        workers = plan.workers[block.name]
        served = list(workers)
        if item := shared.get(block.name):
            served += [rank for _, ranks in item.legs for rank in ranks]
        if sorted(served) != list(range(plan.world)) or (
            item and item.sources != workers
        ):
            raise ValueError(f"The update of {block.name!r} is not given once to each.")
        gradient = reduced.get(block.name)
        if plan.gradients == "own" and (
            gradient is None or gradient.destinations != workers
        ):
            raise ValueError(f"The gradient of {block.name!r} misses a worker.")


def _once(exchange: Exchange) -> dict[str, Any]:
    items = {item.name: item for item in exchange.items}
    if len(items) < len(exchange.items):
        counts = Counter(item.name for item in exchange.items)
        name = counts.most_common(1)[0][0]
        raise ValueError(f"{exchange.name} moves {name!r} more than once.")
    return items


def make_plan(
    model: nn.Module | Sequence[BlockSpec],
    *,
    world: int,
    strategy: str | Strategy = "factor_wise",
    placement: str = "longest_first",
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
        gradients: "own" if the library reduces gradients, "ddp" if that is done.
        inverse: "eigen" or "factored": what is computed and shared.
    """
    if world < 1:
        raise ValueError(f"Invalid world={world}. Must be >= 1.")
    if gradients not in GRADIENTS:
        raise ValueError(f"Invalid gradients={gradients!r}. Must be in {GRADIENTS}.")
    if not isinstance(costs, CostModel):
        costs = CostModel(inverse=inverse, measured=costs or {})
    chosen, blocks = find_strategy(strategy), _blocks_of(model, norm)
    owners, workers = assign(chosen, find_placement(placement), blocks, world, costs)
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


def _blocks_of(
    model: nn.Module | Sequence[BlockSpec], norm: str
) -> tuple[BlockSpec, ...]:
    if isinstance(model, Sequence):
        return tuple(model)
    from natgrad.layers import find_blocks

    return tuple(block.spec for block in find_blocks(model, norm=norm))
