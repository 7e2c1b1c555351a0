"""The same weights on all ranks at the start, where DDP does not see to it."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from natgrad.distributed.communicator import Communicator


@torch.no_grad()
def make_alike(model: nn.Module, comm: Communicator) -> None:
    """Collective: give every rank the parameters and buffers of rank 0.

    Raises on all ranks if they have tensors of other names, shapes or dtypes.
    """
    if comm.world == 1:
        return
    named = [*model.named_parameters(), *model.named_buffers()]
    named = [(name, x) for name, x in named if x.layout == torch.strided]
    _require_alike(named, comm)
    for part in _parts([x for _, x in named], comm.options.bucket_bytes):
        # as bytes, which every backend can send, whatever the dtypes
        flat = torch.cat([x.reshape(-1).view(torch.uint8) for x in part])
        comm.broadcast(flat, source=0)
        pieces = flat.split([x.nbytes for x in part])
        for x, piece in zip(part, pieces, strict=True) if comm.rank else ():
            # cloned: a dtype's numbers must not begin in the middle of one
            x.copy_(piece.clone().view(x.dtype).reshape(x.shape))


def _require_alike(named: list[tuple[str, Tensor]], comm: Communicator) -> None:
    text = repr([(name, x.dtype, tuple(x.shape), x.device.type) for name, x in named])
    mark = zlib.crc32(text.encode())
    most, least = comm.largest([mark, -mark])()
    if most != -least:
        raise ValueError(
            "Ranks have models with different parameters or buffers. Must be the same "
            "names, shapes, dtypes and kind of device."
        )


def _parts(tensors: Iterable[Tensor], limit: int) -> Iterator[list[Tensor]]:
    """Neighbours on one device, together up to ``limit`` bytes."""
    part: list[Tensor] = []
    size = 0
    for x in tensors:
        if part and (x.device != part[0].device or size + x.nbytes > limit):
            yield part
            part, size = [], 0
        part.append(x)
        size += x.nbytes
    if part:
        yield part
