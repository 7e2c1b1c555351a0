"""Modelled seconds of a plan's phases.

The formulas are those of `profile`; a step is taken phase by phase, without overlap.
``natgrad simulate`` adds the overlap.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from natgrad.plan.autotune.profile import Collective, HardwareProfile
from natgrad.plan.buckets import Bucket, bucket_limit, make_buckets
from natgrad.plan.exchange import Exchange, Item
from natgrad.plan.loads import inversion_loads, precondition_loads
from natgrad.plan.messages import AGREE, BUCKET_BYTES, CONTROL, Message, Wiring
from natgrad.plan.plan import Plan
from natgrad.plan.sequence import Departure, Leg, departures
from natgrad.plan.shards import Crate, make_crates
from natgrad.plan.spec import FLOAT_BYTES

Weights = Mapping[str, float]

AGREEMENTS = 2
"""Small sums that all ranks wait for in every step: the verdict and the KL clip."""
CONTROLS = 2
"""Control messages of a step; those of exchanges that were measured are in these."""


def exchange_seconds(
    plan: Plan,
    name: str,
    profile: HardwareProfile,
    *,
    names: Iterable[str] | None = None,
    weights: Weights | None = None,
    element_bytes: int = FLOAT_BYTES,
    bucket_bytes: int = BUCKET_BYTES,
) -> float:
    """Seconds of one exchange, or of its items ``names``, with nothing beside it.

    ``weights`` scale items: the probability that a statistic is due.
    """
    exchange = plan.exchanges[name]
    items = exchange.items if names is None else exchange.select(names)
    sizes = [
        (i, element_bytes * i.elements * (1.0 if weights is None else weights[i.name]))
        for i in items
    ]
    sizes = [(item, size) for item, size in sizes if size > 0]
    if plan.world == 1 or not sizes:
        return 0.0
    if is_measured(profile, plan.world):
        return _measured(exchange, sizes, profile, element_bytes)
    leg = Leg(exchange=name, names=tuple(item.name for item, _ in sizes))
    wiring = Wiring(
        bucket_bytes=bucket_bytes, element_bytes=element_bytes, way=profile.way
    )
    return legs_seconds(plan, [leg], wiring, profile, weights)


def legs_seconds(
    plan: Plan,
    legs: Sequence[Leg],
    wiring: Wiring,
    profile: HardwareProfile,
    weights: Weights | None = None,
) -> float:
    """Seconds of the collectives of some legs, by the formula, one after another.

    Groups of some of the ranks work side by side: the rank with the most to do counts.
    """
    # of groups of some of the ranks, one of each column: the others do the same
    only = frozenset(ranks[0] for ranks in plan.workers.values())
    wiring = scaled(plan, legs, wiring, weights)
    first, second = departures(plan, legs, wiring, only)
    whole, some = 0.0, Counter[int]()
    for departure in (*first, *second):
        seconds = departure_seconds(departure, profile, weights)
        ranks = departure.bucket.ranks
        if len(ranks) == plan.world:
            whole += seconds
        else:
            some.update({rank: seconds for rank in ranks if rank in only})
    return whole + max(some.values(), default=0.0)


def scaled(
    plan: Plan, legs: Sequence[Leg], wiring: Wiring, weights: Weights | None
) -> Wiring:
    """Wiring whose buckets hold as many items as they do if only a share is due."""
    if weights is None:
        return wiring
    items = [i for x in legs for i in plan.exchanges[x.exchange].select(x.names)]
    size = sum(item.elements for item in items)
    due = sum(item.elements * weights.get(item.name, 1.0) for item in items)
    share = due / size if due else 1.0
    return replace(wiring, bucket_bytes=int(wiring.bucket_bytes / share))


def departure_seconds(
    departure: Departure, profile: HardwareProfile, weights: Weights | None = None
) -> float:
    """Seconds of the collectives that move a bucket, by the formula."""
    parcels = departure.bucket.parcels
    size = sum(p.elements for p in parcels)
    due = size if weights is None else 0.0
    if weights is not None:
        due = sum(p.elements * weights.get(p.name, 1.0) for p in parcels)
    messages = (m for stage in departure.stages for m in stage)
    return sum(message_seconds(m, profile, due / size) for m in messages)


def message_seconds(
    message: Message, profile: HardwareProfile, share: float = 1.0
) -> float:
    """Seconds of one collective by the formula, if only a share of it is sent.

    A small sum takes a tree's steps, whatever the machine does with large ones.
    """
    ranks = message.ranks
    if message.exchange in (CONTROL, AGREE):
        return profile.small(len(ranks))
    if message.kind == "all_to_all":
        near, far = _ends(message, profile.nodes(len(ranks))[0])
        each = share * message.element_bytes
        return profile.swap(each * near, each * far, len(ranks))
    size, stride = share * (message.bytes + message.padding), ranks[1] - ranks[0]
    one = profile.move(size, len(ranks))
    if stride > 1:
        one = profile.move_strided(size, len(ranks), stride)
    return 2 * one if message.kind == "all_reduce" else one


def _ends(message: Message, inside: int) -> tuple[int, int]:
    """Elements at the busiest rank from or to its node, at the busiest node from or to
    others."""
    near, far = Counter[tuple[str, int]](), Counter[tuple[str, int]]()
    for (source, start, stop), to in zip(message.parts, message.to, strict=True):
        same = source // inside == to // inside
        for way, rank in (("out", source), ("in", to)):
            busy, place = (near, rank) if same else (far, rank // inside)
            busy[way, place] += stop - start
    return max(near.values(), default=0), max(far.values(), default=0)


def is_measured(profile: HardwareProfile, world: int) -> bool:
    """Whether exchanges between all ranks of this world were measured."""
    return profile.collective("reduce", world) is not None


def _measured(
    exchange: Exchange,
    sizes: Sequence[tuple[Item, float]],
    profile: HardwareProfile,
    element_bytes: int,
) -> float:
    """The buckets that the library sends, each for what was measured.

    Groups of some of the ranks work side by side: the rank with the most to do counts.
    """
    names = [item.name for item, _ in sizes]
    limit = bucket_limit(exchange, names, BUCKET_BYTES // element_bytes)
    if exchange.swaps:
        most = BUCKET_BYTES // element_bytes
        buckets: Sequence[Bucket | Crate] = make_crates(exchange, names, most)
    else:
        first, second = make_buckets(exchange, names, limit)
        buckets = first + second
    size = {item.name: size for item, size in sizes}
    busy = [0.0] * exchange.world
    for bucket in buckets:
        if len(bucket.ranks) > 1:
            seconds = _bucket_seconds(bucket, size, profile, exchange.world)
            for rank in bucket.ranks:
                busy[rank] += seconds
    kinds = {bucket.kind for bucket in buckets}
    begin = [nearest(profile, kind, exchange.world).begin for kind in kinds]
    return max(begin, default=0.0) + max(busy)


def _bucket_seconds(
    bucket: Bucket | Crate, size: Weights, profile: HardwareProfile, world: int
) -> float:
    ranks, items = len(bucket.ranks), len(bucket.parcels)
    calls = 1
    if isinstance(bucket, Bucket) and bucket.kind != "all_reduce":
        calls = len(bucket.segments)
    moved = sum(size[parcel.name] for parcel in bucket.parcels)
    # Other groups use the same cores meanwhile.
    crowd = profile.slowdown(world) / profile.slowdown(ranks)
    return crowd * nearest(profile, bucket.kind, ranks)(calls, items, moved)


def nearest(profile: HardwareProfile, kind: str, ranks: int) -> Collective:
    """What was measured of this kind between the nearest number of ranks."""
    found = [c for c in profile.collectives if c.kind == kind]
    if not found and kind == "all_to_all":  # of a profile made before these were
        return nearest(profile, "gather", ranks)
    if not found:
        return Collective(kind=kind, ranks=ranks)
    return min(found, key=lambda c: (abs(c.ranks - ranks), c.ranks))


def agree_seconds(profile: HardwareProfile, world: int) -> float:
    """Seconds of one small sum that all ranks wait for."""
    if world == 1:
        return 0.0
    if is_measured(profile, world):
        return nearest(profile, "agree", world).begin
    return profile.small(world)


def added_seconds(
    plan: Plan,
    profile: HardwareProfile,
    statistics: float,
    inverses: float,
    *,
    half: Collection[str] = (),
) -> dict[str, float]:
    """Mean seconds a step that a plan adds to forward and backward, by phase.

    Statistics are reduced every ``statistics`` steps, inverted every ``inverses``.
    Estimating them is not in it. ``half`` names exchanges in half precision.
    """
    invert = max(profile.finish(inversion_loads(plan)))
    precondition = max(profile.finish(precondition_loads(plan)))
    own = profile.slowdown(plan.world) * profile.block * len(plan.blocks)
    agree = agree_seconds(profile, plan.world)
    small = AGREEMENTS + (0 if is_measured(profile, plan.world) else CONTROLS)

    def moved(name: str, names: Sequence[str] | None = None) -> float:
        size = FLOAT_BYTES // 2 if name in half else FLOAT_BYTES
        return exchange_seconds(plan, name, profile, names=names, element_bytes=size)

    # an S is used, and shared, as soon as it is estimated
    moments = [s.name for s in plan.statistics if s.kind == "S"]
    rest = [s.name for s in plan.statistics if s.kind != "S"]
    often, seldom = moved("share_inverses", moments), moved("share_inverses", rest)
    return {
        "reduce_statistics": moved("reduce_statistics") / statistics,
        "invert": (invert + agree) / inverses,
        "share_inverses": often / statistics + seldom / inverses,
        "precondition": precondition,
        "reduce_gradients": moved("reduce_gradients"),
        "share_updates": moved("share_updates"),
        "overhead": own + small * agree,
    }
