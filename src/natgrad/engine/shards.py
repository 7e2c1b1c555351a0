"""A sharded model's gradients, whole on their workers; updates, back in pieces.

See Note [Pieces] in `natgrad.plan.shards`.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from natgrad.distributed.communicator import Communicator
from natgrad.distributed.shards import settle_gradients
from natgrad.layers import Block
from natgrad.math.shards import local
from natgrad.options import Options
from natgrad.plan import PLACEMENTS, STRATEGIES
from natgrad.plan.shards import Piece, piece_name
from natgrad.rules.lengths import LayerTrust
from natgrad.rules.parts import Parts

Local = list[Tensor]
"""For each parameter of a block: what this rank has of it, or of something like it."""


class Shards:
    """Takes pieces to workers and back, for the blocks of a sharded model."""

    def __init__(
        self, blocks: Sequence[Block], comm: Communicator, like: Tensor
    ) -> None:
        self._moving = [b for b in blocks if b.kind is not None]
        self._staying = [b for b in blocks if b.kind is None and not b.is_foreign]
        self._comm, self._like = comm, like
        self._at: dict[str, tuple[str, int, Piece]] = {
            piece_name(block.name, i, j): (block.name, i, piece)
            for block in self._moving
            for i, cut in enumerate(block.spec.cuts)
            for j, piece in enumerate(cut.pieces)
        }

    def collect(self, gradient: Callable[[Block], Local | None]) -> dict[str, Tensor]:
        """Whole gradients ``(s, m, n)`` on their workers, own pieces of the others.

        ``gradient`` is what this rank has of a block's; None counts as zeros where the
        block moves. One that stays has its piece as ``(1, 1, n)``.
        """
        settle_gradients([*self._moving, *self._staying])
        have = {b.name: gradient(b) or _zeros(b) for b in self._moving}
        given: dict[str, Tensor] = {}
        for name in filter(self._here, self._at):
            block, i, _ = self._at[name]
            given[name] = have[block][i].reshape(-1)
        got = self._exchange("reduce_gradients", given, [*self._at])
        mine = [b for b in self._moving if self._works_on(b.name)]
        whole = {b.name: b.fold(self._joined(b, have[b.name], got)) for b in mine}
        pairs = ((b, gradient(b)) for b in self._staying)
        return whole | {b.name: b.fold(x) for b, x in pairs if x is not None}

    def spread(
        self, updates: Mapping[str, Tensor], present: frozenset[str]
    ) -> dict[str, Local]:
        """What this rank has of the updates of present blocks, from their workers."""
        blocks = [b for b in self._moving if b.name in present]
        whole = {b.name: b.unfold(updates[b.name]) for b in blocks if b.name in updates}
        names = [n for n, (block, _, _) in self._at.items() if block in present]
        given: dict[str, Tensor] = {}
        for name in names:
            block, i, piece = self._at[name]
            if block in whole:
                given[name] = whole[block][i][piece.box].reshape(-1)
        got = self._exchange("share_updates", given, names)
        for name in filter(self._here, names):
            if name not in got:  # the worker's own, which nobody else has
                got[name] = self._rounded(given[name])
        found: dict[str, Local] = {b.name: _zeros(b) for b in blocks}
        for name in filter(self._here, names):
            block, i, _ = self._at[name]
            found[block][i] = got[name].reshape(found[block][i].shape)
        staying = [b for b in self._staying if b.name in updates]
        return found | {b.name: b.unfold(updates[b.name]) for b in staying}

    def _exchange(
        self, exchange: str, given: Mapping[str, Tensor], names: Sequence[str]
    ) -> dict[str, Tensor]:
        """What this rank gets of these pieces, as the plan moves them."""
        if self._comm.world == 1:
            return {}
        like = self._like
        flight = self._comm.begin(exchange, names, like.dtype, like.device)
        for name, flat in given.items():
            flight.put(name, flat)
        return flight.finish()

    def _joined(self, block: Block, mine: Local, got: Mapping[str, Tensor]) -> Local:
        """Whole gradients of a block's parameters, from pieces."""
        whole: Local = []
        for i, cut in enumerate(block.spec.cuts):
            x = self._like.new_empty(cut.shape)
            for j, piece in enumerate(cut.pieces):
                flat = got.get(piece_name(block.name, i, j), mine[i])
                x[piece.box] = flat.reshape(piece.sizes).to(x.dtype)
            whole.append(x)
        return whole

    def _works_on(self, block: str) -> bool:
        return self._comm.rank in self._comm.plan.workers[block]

    def _here(self, name: str) -> bool:
        return self._comm.rank in self._at[name][2].ranks

    def _rounded(self, x: Tensor) -> Tensor:
        """As the other ranks that hold the same piece see it."""
        wire = self._comm.options.wire_dtype("share_updates", self._like.dtype)
        return x.to(wire).to(self._like.dtype)


def refuse_sharded(options: Options, parts: Mapping[str, Parts]) -> None:
    """Raise, by name, of options that a sharded model cannot be trained with."""
    strategy, legal = options.strategy, [*STRATEGIES]
    name = strategy if isinstance(strategy, str) else strategy.name
    lengths = {part.length for part in parts.values()}
    for wrong, given, must in (
        (
            name not in legal,
            f"strategy={name!r}",
            f"one of {legal}: a matrix has one worker, whatever the strategy",
        ),
        (
            options.placement not in PLACEMENTS,
            f"placement={options.placement!r}",
            f"one of {[*PLACEMENTS]}",
        ),
        (
            options.fisher == "sampled",
            "fisher='sampled'",
            "'empirical': fully_shard gives one backward a forward",
        ),
        (
            any(isinstance(x, LayerTrust) and x.reference == "now" for x in lengths),
            "reference='now' of LayerTrust",
            "'start': no rank has the whole weight",
        ),
    ):
        if wrong:
            raise ValueError(f"Invalid {given} for a sharded model. Must be {must}.")


def _zeros(block: Block) -> Local:
    return [torch.zeros_like(local(p)) for p in block.parameters]
