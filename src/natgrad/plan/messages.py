"""The collectives that move a bucket: pure data, which executor and simulator read.

A bucket of kind ``reduce`` is a reduce-scatter-v and one of kind ``gather`` an
all-gather-v. Each is sent in one of two ways:

- *rooted*: a reduce to, or a broadcast from, each rank that has a part; no padding and
  no copy, but as many collectives as there are such ranks;
- *padded*: one reduce-scatter, or all-gather, of equal parts as long as the longest;
  where most of that would be padding (fewer ranks have a part than take part), one
  all-reduce instead, to which the others give zeros if it is a gather. That is one
  collective a bucket and group, however many ranks have a part.

With ``nodes`` a bucket of the whole world goes by node. A sum is made within each node,
by whoever has the receiver's place there, and then between the ranks of one place; what
is shared goes between the ranks of the giver's place, and then within each node.

The pieces of a sharded model move in all-to-alls of all ranks, whatever the way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Literal

from natgrad.plan.buckets import Bucket
from natgrad.plan.hosts import rails_of
from natgrad.plan.shards import Crate
from natgrad.plan.spec import FLOAT_BYTES
from natgrad.plan.strategies import Ranks

Part = tuple[int, int, int]
"""A rank, and where its part of a buffer starts and stops."""
Event = tuple[str, str]
"""A phase of the step, and the block whose turn in it is over ("": all of them)."""
Way = Literal["rooted", "padded"]
WAYS: tuple[Way, ...] = ("rooted", "padded")
CONTROL, AGREE = "control", "agree"
WORD_BYTES = 8
BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True, kw_only=True)
class Message:
    """One collective: what it is of, its kind, among whom, and how long.

    Attributes:
        exchange: whose items it moves; or "control" and "agree", small sums that all
            ranks take part in: the first on the CPU, the second of what the step finds.
        kind: "reduce", "reduce_scatter", "all_reduce", "broadcast", "all_gather",
            "all_to_all".
        ranks: who takes part.
        shares: whether parts are given by their rank, or else sums are given to it.
        parts: of the bucket's buffer, with the rank that gets them (of a reduction) or
            gives them; a rank may have several. Of an all-reduce one, of no rank.
        to: of an all-to-all: who gets each part.
        element_bytes: of what is sent.
        after: when it may start. It is not compared.
    """

    exchange: str
    kind: str
    ranks: Ranks
    parts: tuple[Part, ...]
    shares: bool = False
    to: Ranks = ()
    element_bytes: int = FLOAT_BYTES
    after: Event = field(default=("", ""), compare=False)

    @property
    def elements(self) -> int:
        """Of all parts, without padding."""
        return sum(stop - start for _, start, stop in self.parts)

    @property
    def bytes(self) -> int:
        """Of all parts, without padding."""
        return self.element_bytes * self.elements

    @property
    def longest(self) -> int:
        """Elements of the rank that has the most."""
        each = Counter[int]()
        for rank, start, stop in self.parts:
            each[rank] += stop - start
        return max(each.values())

    def splits(self, rank: int) -> tuple[list[int], list[int]]:
        """Of an all-to-all: elements that a rank sends to each, and gets from each."""
        to, of = [0] * len(self.ranks), [0] * len(self.ranks)
        for (source, start, stop), destination in zip(self.parts, self.to, strict=True):
            if source == rank:
                to[destination] = stop - start
            if destination == rank:
                of[source] = stop - start
        return to, of

    @property
    def padding(self) -> int:
        """Bytes of the equal parts that are beyond the parts' own."""
        if self.kind not in ("reduce_scatter", "all_gather"):
            return 0
        whole = len(self.ranks) * self.longest
        return self.element_bytes * (whole - self.elements)


@dataclass(frozen=True, kw_only=True)
class Wiring:
    """How the exchanges of a plan become collectives.

    Attributes:
        bucket_bytes: items are sent together up to this size.
        element_bytes: of an element that is exchanged; ``sent_bytes`` of what is sent
            of it, by exchange, where that is in half precision.
        nodes: the ranks of each node if exchanges go by node; (): they do not.
        way: "rooted" or "padded".
    """

    bucket_bytes: int = BUCKET_BYTES
    element_bytes: int = FLOAT_BYTES
    sent_bytes: Mapping[str, int] = field(default_factory=dict[str, int])
    nodes: tuple[Ranks, ...] = ()
    way: Way = "rooted"

    def size(self, exchange: str) -> int:
        """Bytes of an element as an exchange sends it."""
        return self.sent_bytes.get(exchange, self.element_bytes)


Stages = tuple[tuple[Message, ...], ...]


def stages_of(
    exchange: str, bucket: Bucket | Crate, wiring: Wiring, after: Event = ("", "")
) -> Stages:
    """The collectives of all ranks that move a bucket, each stage after the last.

    Within a stage each rank takes part in those that name it, in this order.
    """
    if len(bucket.ranks) == 1:
        return ()
    make = _Make(exchange, wiring, after)
    if isinstance(bucket, Crate):
        return ((make.all_to_all(bucket),),)
    parts = [(peer, s.start, s.stop) for peer, s in bucket.segments]
    world = sum(len(node) for node in wiring.nodes)
    if wiring.nodes and len(bucket.ranks) == world:
        by_node = {"reduce": _sum_by_node, "gather": _share_by_node}
        return by_node.get(bucket.kind, _all_reduce_by_node)(make, parts)
    if bucket.kind == "all_reduce":
        whole = (0, 0, bucket.elements)
        return ((make.one("all_reduce", False, bucket.ranks, whole),),)
    return (make.each(bucket.kind, bucket.ranks, parts),)


def mine(messages: Iterable[Message], rank: int) -> list[Message]:
    """Those that a rank takes part in."""
    return [m for m in messages if rank in m.ranks]


@dataclass(frozen=True)
class _Make:
    exchange: str
    wiring: Wiring
    after: Event

    def one(self, kind: str, shares: bool, ranks: Ranks, *parts: Part) -> Message:
        return Message(
            exchange=self.exchange,
            kind=kind,
            ranks=ranks,
            parts=parts,
            shares=shares,
            element_bytes=self.wiring.size(self.exchange),
            after=self.after,
        )

    def all_to_all(self, crate: Crate) -> Message:
        ends = [0, *accumulate(crate.flows.values())]
        flows = zip(crate.flows, pairwise(ends), strict=True)
        parts = [(source, start, stop) for (source, _), (start, stop) in flows]
        message = self.one(crate.kind, True, crate.ranks, *parts)
        return replace(message, to=tuple(to for _, to in crate.flows))

    def each(
        self, kind: str, ranks: Ranks, parts: Sequence[Part]
    ) -> tuple[Message, ...]:
        """Of one group: a sum to, or what is given by, each part's rank."""
        parts = [part for part in parts if part[2] > part[1]]
        if not parts or len(ranks) == 1:
            return ()
        shares = kind == "gather"
        if self.wiring.way == "padded" and len(parts) > 1:
            padded = "all_gather" if shares else "reduce_scatter"
            message = self.one(padded, shares, ranks, *parts)
            # an all-reduce moves everything twice
            if len(ranks) * message.longest > 2 * message.elements:
                message = replace(message, kind="all_reduce")
            return (message,)
        rooted = "broadcast" if shares else "reduce"
        return tuple(self.one(rooted, shares, ranks, part) for part in parts)


def _places(nodes: Sequence[Ranks]) -> dict[int, int]:
    return {rank: place for node in nodes for place, rank in enumerate(node)}


def _at_place(parts: Sequence[Part], nodes: Sequence[Ranks], place: int) -> list[Part]:
    places = _places(nodes)
    return [part for part in parts if places[part[0]] == place]


def _within(make: _Make, kind: str, parts: Sequence[Part]) -> tuple[Message, ...]:
    """In every node, by whoever has the place of each part's rank there."""
    nodes, places = make.wiring.nodes, _places(make.wiring.nodes)
    return tuple(
        message
        for node in nodes
        for message in make.each(
            kind, tuple(sorted(node)), [(node[places[r]], a, b) for r, a, b in parts]
        )
    )


def _between(make: _Make, kind: str, parts: Sequence[Part]) -> tuple[Message, ...]:
    """Among the ranks of each place, the parts whose rank has it."""
    nodes = make.wiring.nodes
    return tuple(
        message
        for place, rail in enumerate(rails_of(nodes))
        for message in make.each(kind, rail, _at_place(parts, nodes, place))
    )


def _sum_by_node(make: _Make, parts: Sequence[Part]) -> Stages:
    return _within(make, "reduce", parts), _between(make, "reduce", parts)


def _share_by_node(make: _Make, parts: Sequence[Part]) -> Stages:
    return _between(make, "gather", parts), _within(make, "gather", parts)


def _all_reduce_by_node(make: _Make, parts: Sequence[Part]) -> Stages:
    """Each rank of a node sums a chunk there, then with its peers elsewhere."""
    nodes = make.wiring.nodes
    chunks = _chunks(nodes[0], parts[-1][2])
    rails = rails_of(nodes)
    sums = tuple(
        make.one("all_reduce", False, rails[place], (0, a, b))
        for place, (_, a, b) in enumerate(chunks)
        if b > a
    )
    return _within(make, "reduce", chunks), sums, _within(make, "gather", chunks)


def _chunks(node: Ranks, elements: int) -> list[Part]:
    """Equal parts for the ranks of a node, the first ones an element longer."""
    each, more = divmod(elements, len(node))
    cuts = [place * each + min(place, more) for place in range(len(node) + 1)]
    return [(r, a, b) for r, a, b in zip(node, cuts, cuts[1:], strict=False)]
