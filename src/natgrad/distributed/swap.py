"""Pieces of matrices on their way to workers and back, in all-to-alls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from natgrad.distributed.communicator import Communicator
from natgrad.plan.shards import Crate, make_crates

Put = Callable[[str], Tensor]


def swap(
    comm: Communicator, exchange: str, put: Put, like: Tensor, names: Sequence[str]
) -> dict[str, Tensor]:
    """Exchange the named pieces, as the plan lists them; returns what this rank gets.

    ``put`` is asked for each piece that this rank sends, as a 1-D tensor. Collective,
    with the same names. See Note [Pieces] in `natgrad.plan.shards`.
    """
    wire = comm.options.wire_dtype(exchange, like.dtype)
    limit = comm.options.bucket_bytes // wire.itemsize
    crates = make_crates(comm.plan.exchanges[exchange], names, limit)
    # all are started before one is waited for
    under_way = [_send(comm, exchange, crate, put, like, wire) for crate in crates]
    found: dict[str, Tensor] = {}
    for crate, got, work in under_way:
        with comm.explained(exchange):
            comm.wait(work, got)
        moves = crate.got_by(comm.rank)
        parts = got.to(like.dtype).split([m.elements for m in moves])
        found |= {m.name: x for m, x in zip(moves, parts, strict=True)}
    return found


def _send(
    comm: Communicator,
    exchange: str,
    crate: Crate,
    put: Put,
    like: Tensor,
    wire: torch.dtype,
) -> tuple[Crate, Tensor, Any]:
    to, of = crate.splits(comm.rank)
    moves = crate.sent_by(comm.rank)
    parts = [put(move.name).to(wire) for move in moves]
    given = torch.cat(parts) if parts else like.new_empty(0, dtype=wire)
    got = like.new_empty(sum(of), dtype=wire)
    sent, received = (n * wire.itemsize for n in crate.volume(comm.rank))
    comm.moved.add(exchange, calls=1, sent=sent, received=received)
    return crate, got, comm.all_to_all(exchange, got, given, of, to)
