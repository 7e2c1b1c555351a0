"""What moves between ranks, derived from owners and workers alone.

Bytes are payload, counted where they enter and leave a rank:

- *sent* by a rank: once each item it hands over, however many ranks get it. What
  stays on the rank (an item reduced to this rank only) is not sent.
- *received* by a rank: each reduced item it is given, each shared item it gets.
- *wire*: over all ranks together, what a bandwidth-optimal algorithm puts on the
  links: a reduction moves ``(world - 1) e`` to its first destination and ``e`` more to
  each other, a share ``e`` to each receiver. An all-reduce is ``2 (world - 1) e``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from natgrad.plan.cost import inverse_elements
from natgrad.plan.loads import Tally
from natgrad.plan.shards import piece_name
from natgrad.plan.spec import BlockSpec
from natgrad.plan.strategies import Ranks

EXCHANGES = (
    "reduce_statistics",
    "reduce_gradients",
    "share_inverses",
    "share_updates",
)
SWAPPED = ("reduce_gradients", "share_updates")


@dataclass(frozen=True, kw_only=True)
class Item:
    """One tensor that moves.

    In a reduction all sources contribute and all destinations get the sum. In a share
    the sources hold the same tensor and the destinations that are not sources get it.
    """

    name: str
    elements: int
    sources: Ranks
    destinations: Ranks

    @property
    def routes(self) -> list[tuple[int, Ranks]]:
        """Of a share: each source with the ranks it serves, its row of the grid.

        Receivers, in order, are divided evenly among the sources, in order.
        """
        sources = set(self.sources)
        others = [rank for rank in self.destinations if rank not in sources]
        cuts = [-(-i * len(others) // len(sources)) for i in range(len(sources) + 1)]
        pairs = zip(self.sources, cuts, cuts[1:], strict=False)
        return [(s, tuple(others[a:b])) for s, a, b in pairs if b > a]


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One planned movement of items. ``reduces``: sums to destinations, else copies.

    ``swaps``: by all-to-alls among all ranks; see Note [Pieces] in `shards`.
    """

    name: str
    reduces: bool
    world: int
    items: tuple[Item, ...]
    swaps: bool = False
    _index: dict[str, Item] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_index", {item.name: item for item in self.items})

    def select(self, names: Iterable[str]) -> list[Item]:
        """The items of these names; a name that never moves here is left out."""
        return [self._index[name] for name in names if name in self._index]

    def elements(self, names: Iterable[str] | None = None) -> int:
        """Payload elements of all items, or of those named."""
        return sum(item.elements for item in self._items(names))

    def wire(self, names: Iterable[str] | None = None) -> int:
        """Elements on the links, all ranks together, as defined in the module."""
        return sum(self._wire(item) for item in self._items(names))

    def volumes(
        self, names: Iterable[str] | None = None
    ) -> tuple[list[int], list[int]]:
        """Elements sent and received by each rank, as defined in the module."""
        sent, received = Tally(self.world, 0), Tally(self.world, 0)
        for item in self._items(names):
            count = _count_reduction if self.reduces else _count_share
            count(item, sent, received)
        return sent.totals(), received.totals()

    def _items(self, names: Iterable[str] | None) -> Sequence[Item]:
        return self.items if names is None else self.select(names)

    def _wire(self, item: Item) -> int:
        if self.reduces:
            hops = len(item.sources) - 1 + len(item.destinations) - 1
        else:
            hops = len(set(item.destinations) - set(item.sources))
        return hops * item.elements


def _count_reduction(item: Item, sent: Tally[int], received: Tally[int]) -> None:
    if len(item.sources) == 1 and item.sources == item.destinations:
        return
    sent.add(item.sources, item.elements)
    received.add(item.destinations, item.elements)
    if len(item.destinations) == 1:
        sent.add(item.destinations, -item.elements)


def _count_share(item: Item, sent: Tally[int], received: Tally[int]) -> None:
    sent.add(tuple(source for source, _ in item.routes), item.elements)
    received.add(item.destinations, item.elements)
    overlap = set(item.sources) & set(item.destinations)
    received.add(tuple(overlap), -item.elements)


def derive_exchanges(
    blocks: Sequence[BlockSpec],
    owners: Mapping[str, int],
    workers: Mapping[str, Ranks],
    world: int,
    *,
    gradients: str = "own",
    inverse: str = "eigen",
) -> dict[str, Exchange]:
    """All four exchanges that owners and workers imply, by name.

    Statistics are summed to their owner, but for those that it makes of the gradient,
    which it gets as a worker; gradients to a block's workers (nothing with
    ``gradients="ddp"``); an inverse goes from its owner to the block's other workers;
    an update from the workers to all others. Items that need not move are left out.
    With ``gradients="sharded"`` the pieces of gradients go to workers, and those of
    updates to the ranks that hold them: see Note [Pieces] in `shards`.
    """
    everyone = tuple(range(world))
    statistics = [spec for block in blocks for spec in block.statistics]
    # a second moment in the eigenbases (S) is estimated on every rank
    everywhere = {s.block for s in statistics if s.kind == "S"}
    needed = {
        b.name: everyone if b.name in everywhere else workers[b.name] for b in blocks
    }
    items = {
        "reduce_statistics": [
            _item(s.name, s.packed, everyone, (owners[s.name],))
            for s in statistics
            if not s.is_local
        ],
        "reduce_gradients": [
            _item(b.name, b.elements, everyone, workers[b.name])
            for b in blocks
            if gradients == "own"
        ]
        + _pieces(blocks, workers, back=False),
        "share_inverses": [
            _item(s.name, size, (owners[s.name],), needed[s.block])
            for s, size in ((s, inverse_elements(s, inverse)) for s in statistics)
            if needed[s.block] != (owners[s.name],)
        ],
        "share_updates": [
            _item(b.name, b.elements, workers[b.name], everyone)
            for b in blocks
            if len(workers[b.name]) < world and gradients != "sharded"
        ]
        + _pieces(blocks, workers, back=True),
    }
    swaps = SWAPPED if gradients == "sharded" else ()
    return {n: _exchange(n, world, items[n], n in swaps) for n in EXCHANGES}


def _pieces(
    blocks: Sequence[BlockSpec], workers: Mapping[str, Ranks], *, back: bool
) -> list[Item]:
    """Those of gradients that workers lack, or of updates that holders lack."""
    found: list[Item] = []
    for block in blocks:
        for i, cut in enumerate(() if block.elementwise else block.cuts):
            for j, piece in enumerate(cut.pieces):
                ends = (piece.ranks, workers[block.name])[:: -1 if back else 1]
                if not set(ends[1]) <= set(ends[0]):
                    name = piece_name(block.name, i, j)
                    found.append(_item(name, piece.elements, *ends))
    return found


def _item(name: str, elements: int, sources: Ranks, destinations: Ranks) -> Item:
    return Item(
        name=name, elements=elements, sources=sources, destinations=destinations
    )


def _exchange(name: str, world: int, items: list[Item], swaps: bool) -> Exchange:
    reduces = name.startswith("reduce") and not swaps
    return Exchange(
        name=name, reduces=reduces, world=world, items=tuple(items), swaps=swaps
    )
