"""Every collective of a step, in the one order in which all ranks start them.

Note [One order]
    Ranks whose collectives, of whatever groups, start in different orders can wait for
    each other forever (NCCL). So the plan has them in one list. Reductions come in the
    order in which a forward and a backward make their items; a bucket leaves when this
    rank has all of its items and everything before it has left. What a rank does not
    make (a layer that it skips), or makes in another order (branches), only holds its
    buckets up until the step, where all that is left leaves. Where exchanges go by
    node, the second stage of a bucket follows the first stage of the next one, so that
    nobody waits for it while there is something else to send.

Control messages are part of the list: before the first reduction ranks compare what
they are about to send, after the last they ask whether some of it was late or void. If
it was, they send that again, which is not in the plan; nor is what is said once in a
run (that plans are equal, and in the first step the norms of weights in pieces).
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from natgrad.plan.buckets import Bucket, bucket_limit, make_buckets
from natgrad.plan.messages import (
    AGREE,
    CONTROL,
    WORD_BYTES,
    Event,
    Message,
    Stages,
    Wiring,
    mine,
    stages_of,
)
from natgrad.plan.shards import Crate, block_of, make_crates

if TYPE_CHECKING:
    from natgrad.plan.plan import Plan

NOT_OF_ITEMS = 7
"""Numbers of the verdict beside those of blocks and statistics."""


@dataclass(frozen=True, kw_only=True)
class Leg:
    """Items of one exchange that are sent together, in the order they are made.

    ``events`` say after what each of them is.
    """

    exchange: str
    names: tuple[str, ...]
    events: tuple[Event, ...] = ()


@dataclass(frozen=True)
class Departure:
    """A bucket that leaves: of which leg, in which collectives, and when it may."""

    leg: int
    bucket: Bucket | Crate
    stages: Stages
    after: Event


def reductions(
    plan: Plan, statistics: Collection[str], *, early: bool = True
) -> tuple[Leg, ...]:
    """What a step with these due statistics reduces: sums, then gradients.

    ``early``: the statistics of inputs leave in the forward, on a leg of their own, and
    else with the others.
    """
    wanted = frozenset(statistics)
    due = [s for s in plan.statistics if s.name in wanted]
    first = [s for s in due if early and s.kind == "A"]
    rest = [s for s in reversed(due) if not (early and s.kind == "A")]
    sums = "reduce_statistics"
    legs = [
        _leg(sums, [(s.name, ("forward", s.block)) for s in first]),
        _leg(sums, [(s.name, ("backward", s.block)) for s in rest]),
    ]
    legs = [leg for leg in legs if leg.names]
    gradients = plan.exchanges["reduce_gradients"]
    if gradients.items and not gradients.swaps:  # pieces move in the step, by pairs
        blocks = [b.name for b in reversed(plan.blocks)]
        made = [(name, ("backward", name)) for name in blocks]
        legs.append(_leg("reduce_gradients", made))
    return tuple(legs)


def _leg(exchange: str, made: Sequence[tuple[str, Event]]) -> Leg:
    names = tuple(name for name, _ in made)
    return Leg(exchange=exchange, names=names, events=tuple(e for _, e in made))


def departures(
    plan: Plan,
    legs: Sequence[Leg],
    wiring: Wiring,
    only: Container[int] | None = None,
) -> tuple[list[Departure], list[Departure]]:
    """The buckets of all legs in the order they leave, and those that follow them.

    Of groups of some of the ranks, those with none of ``only`` are left out.
    """
    first: list[Departure] = []
    second: list[Departure] = []
    for number, leg in enumerate(legs):
        exchange = plan.exchanges[leg.exchange]
        most = wiring.bucket_bytes // wiring.size(leg.exchange)
        ways: tuple[Sequence[Bucket | Crate], Sequence[Bucket]]
        if exchange.swaps:
            ways = make_crates(exchange, leg.names, most), ()
        else:
            limit = bucket_limit(exchange, leg.names, most)
            ways = make_buckets(exchange, leg.names, limit, only)
        place = {name: index for index, name in enumerate(leg.names)}
        for found, buckets in zip((first, second), ways, strict=True):
            for bucket in buckets:
                after = ("reduced", "")
                if found is first:
                    last = max(place[p.name] for p in bucket.parcels)
                    after = leg.events[last] if leg.events else ("", "")
                stages = stages_of(leg.exchange, bucket, wiring, after)
                found.append(Departure(number, bucket, stages, after))
    place = {block.name: index for index, block in enumerate(plan.blocks)}
    first.sort(key=lambda d: _when(d.after, place, len(plan.blocks)))
    return first, second


def _when(event: Event, place: dict[str, int], blocks: int) -> int:
    phase, block = event
    if phase == "forward":
        return place[block] - blocks
    return blocks - place[block] if phase == "backward" else 0


def in_order(leaving: Sequence[Departure]) -> Iterator[tuple[int, int]]:
    """Departure and stage, as they start. See Note [One order]."""
    deepest = max((len(d.stages) for d in leaving), default=0)
    for turn in range(len(leaving) + deepest - 1 if leaving else 0):
        for stage in range(deepest):
            index = turn - stage
            if 0 <= index < len(leaving) and stage < len(leaving[index].stages):
                yield index, stage


def flat(leaving: Sequence[Departure]) -> list[Message]:
    """The collectives of all ranks, in their order."""
    pairs = in_order(leaving)
    return [m for index, stage in pairs for m in leaving[index].stages[stage]]


def sequence(
    plan: Plan,
    wiring: Wiring | None = None,
    *,
    statistics: Collection[str] | None = None,
    inverses: Collection[str] | None = None,
    updates: Collection[str] | None = None,
    totals: Sequence[int] = (),
    facts: int = 0,
    early: bool = True,
    rank: int | None = None,
) -> tuple[Message, ...]:
    """Every collective of a step, in the order in which all ranks start them.

    Args:
        plan: The plan.
        wiring: How exchanges become collectives; None: as by default.
        statistics: Names of those that the step estimates; None: all.
        inverses: Names of those whose inverses are made and shared; None: all.
        updates: Names of the blocks that have a gradient; None: all.
        totals: Elements of the sums over ranks that lengths ask for: the KL clip's
            is twice the number of layers.
        facts: Numbers that a refresh policy adds to the verdict: a budget's.
        early: Whether the statistics of inputs leave in the forward, as they do unless
            backwards have failed to come.
        rank: Only those that this rank takes part in; None: all.
    """
    if plan.world == 1:
        return ()
    wiring = wiring or Wiring()
    blocks = [b.name for b in plan.blocks]
    due = _among((s.name for s in plan.statistics if not s.is_local), statistics)
    made = _among((s.name for s in plan.statistics), inverses)
    present = _among(blocks, updates)
    legs = reductions(plan, due, early=early)
    only = None if rank is None else (rank,)
    first, second = departures(plan, legs, wiring, only)
    world, each = plan.world, wiring.element_bytes
    found = [small(CONTROL, world, 2, WORD_BYTES, ("begin", ""))]
    found += flat(first)
    if legs:
        found.append(small(CONTROL, world, 2 * len(legs), WORD_BYTES, ("sent", "")))
    found += flat(second)
    if plan.exchanges["reduce_gradients"].swaps:
        after = ("reduced", "")
        found += _shares(plan, "reduce_gradients", blocks, wiring, after, only)
    verdict = NOT_OF_ITEMS + len(blocks) + 3 * len(due) + facts
    found.append(small(AGREE, world, verdict, WORD_BYTES, ("reduced", "")))
    if made:
        told = 3 * len(made)
        found.append(small(AGREE, world, told, WORD_BYTES, ("inverted", "")))
    after = ("agreed on inverses", "")
    found += _shares(plan, "share_inverses", made, wiring, after, only)
    for count in totals:
        found.append(small(AGREE, world, count, each, ("preconditioned", "")))
    found += _shares(plan, "share_updates", present, wiring, ("scaled", ""), only)
    return tuple(found if rank is None else mine(found, rank))


def _among(names: Iterable[str], wanted: Collection[str] | None) -> list[str]:
    chosen = None if wanted is None else frozenset(wanted)
    return [name for name in names if chosen is None or name in chosen]


def _shares(
    plan: Plan,
    exchange: str,
    names: Iterable[str],
    wiring: Wiring,
    after: Event,
    only: Container[int] | None,
) -> list[Message]:
    if plan.exchanges[exchange].swaps:
        blocks = frozenset(names)
        items = plan.exchanges[exchange].items
        names = (i.name for i in items if block_of(i.name) in blocks)
    leg = Leg(exchange=exchange, names=tuple(names))
    leaving, _ = departures(plan, [leg], wiring, only) if leg.names else ((), ())
    return [replace(m, after=after) for m in flat(leaving)]


def small(
    exchange: str, world: int, elements: int, size: int, after: Event = ("", "")
) -> Message:
    """A small sum, or maximum, over all ranks, on all ranks."""
    return Message(
        exchange=exchange,
        kind="all_reduce",
        ranks=tuple(range(world)),
        parts=((0, 0, elements),),
        element_bytes=size,
        after=after,
    )


def summary(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """A sequence as plain data: neighbours of one exchange, kind and size of group.

    ``collectives`` says how many they are; ``after`` is when the first may start.
    """
    rows: list[dict[str, Any]] = []
    for (exchange, kind, ranks), group in groupby(
        messages, key=lambda m: (m.exchange, m.kind, len(m.ranks))
    ):
        held = list(group)
        rows.append(
            {
                "exchange": exchange,
                "kind": kind,
                "ranks": ranks,
                "collectives": len(held),
                "bytes": sum(m.bytes for m in held),
                "padding": sum(m.padding for m in held),
                "after": " of ".join(part for part in held[0].after if part),
            }
        )
    return rows
