"""Sharded parameters: gradients move to workers, and updates back, in pieces.

Note [Pieces]
Under `fully_shard` and tensor parallelism a gradient arrives averaged, cut into boxes:
each rank has one, or none where there are more ranks than rows; several may have the
same. A rule needs the whole matrix, so the boxes,
*pieces*, of its gradient go to the matrix's worker, and those of its update go back to
the ranks that hold them. Both are an exchange of items, one for each piece; what many
pairs of ranks have for each other leaves together, in all-to-alls that stand in the
plan's sequence as all other collectives do. A parameter whose
rule takes each entry alone (Adam, Plain) stays where it is: every rank works on its
piece, and nothing moves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from natgrad.plan.exchange import Exchange, Item

Ranks = tuple[int, ...]
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Where it begins, and its sizes."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A box of a parameter, and the ranks that hold it: several where it is copied."""

    ranks: Ranks
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def elements(self) -> int:
        """How many the box has."""
        return prod(self.sizes)

    @property
    def box(self) -> tuple[slice, ...]:
        """Where it is in the whole parameter."""
        pairs = zip(self.offsets, self.sizes, strict=True)
        return tuple(slice(start, start + size) for start, size in pairs)


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A parameter of this shape in pieces; empty ones are left out."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    def on(self, rank: int) -> int:
        """Elements that a rank has of it."""
        return sum(p.elements for p in self.pieces if rank in p.ranks)

    @cached_property
    def copies(self) -> int:
        """How many ranks hold each piece: what a sum over all ranks counts."""
        return max((len(piece.ranks) for piece in self.pieces), default=1)


def box_of(
    shape: Sequence[int],
    mesh: Sequence[int],
    place: Sequence[int],
    dims: Sequence[int],
    order: Sequence[int] = (),
) -> Box:
    """What the rank at a place of a mesh has of a parameter, as `torch.chunk` cuts it.

    ``dims`` has for each axis the dim that it cuts, -1 for none; ``order`` the axes in
    the order in which they cut, if that is not their own.
    """
    offsets, sizes = [0] * len(shape), list(shape)
    for i in order or range(len(mesh)):
        dim = dims[i]
        if dim >= 0:
            each = -(-sizes[dim] // mesh[i])
            start = min(sizes[dim], place[i] * each)
            offsets[dim] += start
            sizes[dim] = min(each, sizes[dim] - start)
    return tuple(offsets), tuple(sizes)


def joined(shape: Sequence[int], boxes: Iterable[tuple[int, Box]]) -> Cut:
    """The cut in which ranks have these boxes."""
    held: dict[Box, list[int]] = {}
    for rank, box in boxes:
        held.setdefault(box, []).append(rank)
    pieces = (
        Piece(ranks=tuple(sorted(who)), offsets=box[0], sizes=box[1])
        for box, who in held.items()
        if prod(box[1])
    )
    return Cut(shape=tuple(shape), pieces=tuple(pieces))


def cut_up(
    shape: Sequence[int], mesh: Sequence[int], ranks: Sequence[int], dims: Sequence[int]
) -> Cut:
    """A parameter as `torch.chunk` cuts it, along each axis of a mesh in turn.

    Args:
        shape: the parameter's.
        mesh: how many ranks each axis has.
        ranks: all of them, the last axis running fastest.
        dims: for each axis the dim that it cuts; -1: each rank of it has a copy.
    """
    places = zip(ranks, product(*map(range, mesh)), strict=True)
    return joined(
        shape, ((rank, box_of(shape, mesh, place, dims)) for rank, place in places)
    )


def piece_name(block: str, parameter: int, piece: int) -> str:
    """What an item is called that is a piece of a block's first or second parameter."""
    return f"{block}#{parameter}.{piece}"


def block_of(piece: str) -> str:
    """The block that a piece of this name is of."""
    return piece.rpartition("#")[0]


@dataclass(frozen=True, kw_only=True)
class Move:
    """An item from one rank to another."""

    name: str
    elements: int
    source: int
    destination: int


@dataclass(frozen=True)
class Crate:
    """Moves that one all-to-all makes: what a `Bucket` is to other collectives."""

    parcels: tuple[Move, ...]
    world: int
    kind: ClassVar[str] = "all_to_all"

    @property
    def ranks(self) -> Ranks:
        """All of them take part, with nothing to send or to get too."""
        return tuple(range(self.world))

    def sent_by(self, rank: int) -> list[Move]:
        """What a rank hands over, in the order of its buffer."""
        mine = (m for m in self.parcels if m.source == rank)
        return sorted(mine, key=lambda m: m.destination)

    def got_by(self, rank: int) -> list[Move]:
        """What a rank gets, in the order of its buffer."""
        mine = (m for m in self.parcels if m.destination == rank)
        return sorted(mine, key=lambda m: m.source)

    @cached_property
    def flows(self) -> dict[tuple[int, int], int]:
        """Elements from one rank to another, of the pairs that have any, in order."""
        found = Counter[tuple[int, int]]()
        for m in self.parcels:
            found[m.source, m.destination] += m.elements
        return dict(sorted(found.items()))

    def put_by(self, rank: int) -> list[str]:
        """Names of the items that a rank hands over."""
        return [*dict.fromkeys(m.name for m in self.sent_by(rank))]

    def volume(self, rank: int) -> tuple[int, int]:
        """Elements that a rank sends and receives, as in `natgrad.plan.exchange`."""
        sent = {m.name: m.elements for m in self.sent_by(rank)}
        return sum(sent.values()), sum(m.elements for m in self.got_by(rank))


def make_crates(
    exchange: Exchange, names: Iterable[str], limit: int
) -> tuple[Crate, ...]:
    """The named items in order, in all-to-alls of at most ``limit`` elements per rank.

    Or of one item. The ranks together may send that much for each of them.
    """
    crates: list[Crate] = []
    held: list[Move] = []
    size, most = 0, max(1, limit) * exchange.world
    for item in exchange.select(names):
        moves = _moves(item)
        more = sum(m.elements for m in moves)
        if held and size + more > most:
            crates.append(Crate(tuple(held), exchange.world))
            held, size = [], 0
        held += moves
        size += more
    return (*crates, Crate(tuple(held), exchange.world)) if held else tuple(crates)


def _moves(item: Item) -> list[Move]:
    return [
        Move(
            name=item.name, elements=item.elements, source=source, destination=receiver
        )
        for source, receivers in item.routes
        for receiver in receivers
    ]


def covers(cut: Cut) -> bool:
    """Whether the pieces are the whole parameter, each entry once."""
    if sum(p.elements for p in cut.pieces) != prod(cut.shape):
        return False
    corners = [(p.offsets, p.sizes) for p in cut.pieces]
    return not any(
        _overlap(a, b) for i, a in enumerate(corners) for b in corners[i + 1 :]
    )


def _overlap(a: Box, b: Box) -> bool:
    dims = zip(*a, *b, strict=True)
    return all(s < t + m and t < s + n for s, n, t, m in dims)
