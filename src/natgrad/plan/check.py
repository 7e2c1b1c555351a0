"""The proof that a plan is sound: every rank gets what it needs, exactly once."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING

from natgrad.plan.exchange import Exchange, Item
from natgrad.plan.shards import covers, piece_name
from natgrad.plan.strategies import Ranks

if TYPE_CHECKING:
    from natgrad.plan.plan import Plan


def check_plan(plan: Plan) -> None:
    """Raise ValueError unless every rank gets what it needs, exactly once."""
    _check_ranks(plan)
    _check_statistics(plan)
    _check_updates(plan)


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
        if spec.is_local:
            if owner not in workers or spec.name in reduced:
                raise ValueError(
                    f"Statistic {spec.name!r} is made of the reduced gradient, which "
                    f"its owner {owner} does not get."
                )
        elif spec.name not in reduced or reduced[spec.name].destinations != (owner,):
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
    if plan.gradients == "sharded":
        return _check_pieces(plan)
    shared = _once(plan.exchanges["share_updates"])
    reduced = _once(plan.exchanges["reduce_gradients"])
    for block in plan.blocks:
        workers = plan.workers[block.name]
        served = list(workers)
        if item := shared.get(block.name):
            served += [rank for _, ranks in item.routes for rank in ranks]
        if sorted(served) != list(range(plan.world)) or (
            item and item.sources != workers
        ):
            raise ValueError(f"The update of {block.name!r} is not given once to each.")
        gradient = reduced.get(block.name)
        if plan.gradients == "own" and (
            gradient is None or gradient.destinations != workers
        ):
            raise ValueError(f"The gradient of {block.name!r} misses a worker.")


def _check_pieces(plan: Plan) -> None:
    """A worker gets each piece of a gradient once, a holder each of its update."""
    there = _once(plan.exchanges["reduce_gradients"])
    back = _once(plan.exchanges["share_updates"])
    for block in plan.blocks:
        workers = plan.workers[block.name]
        for i, cut in enumerate(block.cuts):
            if not covers(cut):
                raise ValueError(
                    f"The pieces of {block.name!r} are not each entry of it once."
                )
            for j, piece in enumerate(() if block.elementwise else cut.pieces):
                name = piece_name(block.name, i, j)
                for what, items, sources, ends in (
                    ("gradient", there, piece.ranks, workers),
                    ("update", back, workers, piece.ranks),
                ):
                    item = items.pop(name, None)
                    served = list(set(sources) & set(ends))
                    if item is not None:
                        served += [rank for _, ranks in item.routes for rank in ranks]
                    sent = item is None or (
                        (item.sources, item.elements) == (sources, piece.elements)
                    )
                    if sorted(served) != sorted(ends) or not sent:
                        raise ValueError(
                            f"The {what} of {name!r} is not given once to each of "
                            f"{ends}."
                        )
    if there or back:
        name = next(iter({**there, **back}))
        raise ValueError(f"{name!r} moves and is no piece of a matrix.")


def _once(exchange: Exchange) -> dict[str, Item]:
    items = {item.name: item for item in exchange.items}
    if len(items) < len(exchange.items):
        counts = Counter(item.name for item in exchange.items)
        name = counts.most_common(1)[0][0]
        raise ValueError(f"{exchange.name} moves {name!r} more than once.")
    return items
