"""Which items travel together: an exchange cut into buckets, the same on all ranks.

Three kinds of bucket move everything:

- ``reduce``: each item is summed over all ranks to one rank, its peer
  (reduce-scatter-v);
- ``all_reduce``: each item is summed over all ranks to all ranks;
- ``gather``: each item goes from one rank of a group, its peer, to the rest of the
  group (all-gather-v).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from natgrad.plan.exchange import Exchange, Item
from natgrad.plan.strategies import Ranks

BUCKETS = 8
LEAST_BUCKET = 2**16


@dataclass(frozen=True, kw_only=True)
class Parcel:
    """One item on its way: to ``peer`` if reduced, from ``peer`` if gathered."""

    name: str
    elements: int
    kind: str
    ranks: Ranks
    peer: int = 0


@dataclass(frozen=True)
class Bucket:
    """Parcels of one kind and group, side by side in one buffer, ordered by peer."""

    parcels: tuple[Parcel, ...]

    @property
    def kind(self) -> str:
        return self.parcels[0].kind

    @property
    def ranks(self) -> Ranks:
        """The ranks that take part."""
        return self.parcels[0].ranks

    @cached_property
    def slots(self) -> dict[str, slice]:
        """Where each item lies in the buffer."""
        slots: dict[str, slice] = {}
        end = 0
        for parcel in self.parcels:
            slots[parcel.name] = slice(end, end + parcel.elements)
            end += parcel.elements
        return slots

    @property
    def elements(self) -> int:
        """Length of the buffer."""
        return self.slots[self.parcels[-1].name].stop

    @cached_property
    def segments(self) -> list[tuple[int, slice]]:
        """Each peer with its contiguous part of the buffer."""
        parts: list[tuple[int, slice]] = []
        for peer, group in groupby(self.parcels, key=lambda p: p.peer):
            own = [self.slots[parcel.name] for parcel in group]
            parts.append((peer, slice(own[0].start, own[-1].stop)))
        return parts

    def put_by(self, rank: int) -> list[str]:
        """Names of the items to which a rank contributes."""
        if self.kind == "gather":
            return [p.name for p in self.parcels if p.peer == rank]
        return [p.name for p in self.parcels]

    def volume(self, rank: int) -> tuple[int, int]:
        """Elements that a rank of the group sends and receives, as in `exchange`."""
        if len(self.ranks) == 1:
            return 0, 0
        mine = sum(p.elements for p in self.parcels if p.peer == rank)
        if self.kind == "all_reduce":
            return self.elements, self.elements
        others = self.elements - mine
        return (others, mine) if self.kind == "reduce" else (mine, others)


def bucket_limit(exchange: Exchange, names: Iterable[str], most: int) -> int:
    """Elements per bucket of these items may have, if ``most`` is what the user allows.

    A small model's items would all fit in one bucket, which leaves when the backward
    is over: an exchange has at least `BUCKETS` of them unless they would be tiny.
    """
    whole = exchange.elements(tuple(names))
    return min(max(1, most), max(whole // BUCKETS, LEAST_BUCKET))


def make_buckets(
    exchange: Exchange,
    names: Iterable[str],
    limit: int,
    only: Container[int] | None = None,
) -> tuple[tuple[Bucket, ...], tuple[Bucket, ...]]:
    """The buckets of the named items, and those that must follow them.

    A bucket has at most ``limit`` elements, or one item. Names come in the order in
    which their items will be ready; buckets are in the order of their last item.
    A sum for some of the ranks goes to one of them first, which the second buckets
    then spread: ``(world - 1) e`` and ``(destinations - 1) e`` on the wire. Of groups
    of some of the ranks, those with none of ``only`` are left out.
    """
    items = exchange.select(names)
    if not exchange.reduces:
        first, second = _shares(items), list[Parcel]()
    else:
        first, second = _reductions(items, exchange.world)
    return _fill(_among(first, only), limit), _fill(_among(second, only), limit)


def _among(parcels: list[Parcel], only: Container[int] | None) -> list[Parcel]:
    if only is None:
        return parcels
    return [p for p in parcels if any(rank in only for rank in p.ranks)]


def _shares(items: Sequence[Item]) -> list[Parcel]:
    parcels: list[Parcel] = []
    for item in items:
        for source, receivers in item.routes:
            ranks = tuple(sorted((source, *receivers)))
            parcels.append(_parcel(item, "gather", ranks, source))
    return parcels


def _reductions(items: Sequence[Item], world: int) -> tuple[list[Parcel], list[Parcel]]:
    everyone = tuple(range(world))
    first: list[Parcel] = []
    second: list[Parcel] = []
    loads: Counter[int] = Counter()
    for item in items:
        if len(item.destinations) == world:
            first.append(_parcel(item, "all_reduce", everyone))
            continue
        lead = min(item.destinations, key=lambda rank: (loads[rank], rank))
        loads[lead] += item.elements
        first.append(_parcel(item, "reduce", everyone, lead))
        if len(item.destinations) > 1:
            second.append(_parcel(item, "gather", item.destinations, lead))
    return first, second


def _parcel(item: Item, kind: str, ranks: Ranks, peer: int = 0) -> Parcel:
    return Parcel(
        name=item.name, elements=item.elements, kind=kind, ranks=ranks, peer=peer
    )


def _fill(parcels: Sequence[Parcel], limit: int) -> tuple[Bucket, ...]:
    """Cut the parcels of each kind and group, in order, into buckets."""
    open_: dict[tuple[str, Ranks], list[tuple[int, Parcel]]] = {}
    full: list[list[tuple[int, Parcel]]] = []
    for entry in enumerate(parcels):
        parcel = entry[1]
        held = open_.setdefault((parcel.kind, parcel.ranks), [])
        if held and sum(p.elements for _, p in held) + parcel.elements > limit:
            full.append(held.copy())
            held.clear()
        held.append(entry)
    full += open_.values()
    full.sort(key=lambda held: held[-1][0])
    by_peer = (sorted((p for _, p in held), key=lambda p: p.peer) for held in full)
    return tuple(Bucket(tuple(held)) for held in by_peer)
