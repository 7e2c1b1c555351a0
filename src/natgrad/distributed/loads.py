"""A bucket under way: its buffer, and the collectives that move it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from natgrad.plan.messages import mine
from natgrad.plan.sequence import Departure

if TYPE_CHECKING:
    from natgrad.distributed.communicator import Communicator


class Spares:
    """Buffers that are used again: as many as were ever taken at once, and no more.

    What is exchanged differs from step to step, and so do sizes.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}

    def take(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """At least ``size`` elements: the smallest that is free, or a new one."""
        free = self._free.setdefault((dtype, device), [])
        free.sort(key=Tensor.numel)
        for i, buffer in enumerate(free):
            if buffer.numel() >= size:
                return free.pop(i)
        if free:
            free.pop()  # all are too small: the new one takes the place of one
        return torch.empty(size, dtype=dtype, device=device)

    def give(self, buffer: Tensor, device: torch.device) -> None:
        """Give back what was taken for a device."""
        self._free[buffer.dtype, device].append(buffer)


class Load:
    """A bucket's buffer and its stages of collectives, which start one by one.

    Attributes:
        bucket: what is in it.
        mine: names of the items that this rank puts; ``filled``: that it has put.
        closed: whether it may leave with what it has.
        left: whether it has left.
    """

    def __init__(
        self,
        comm: Communicator,
        exchange: str,
        departure: Departure,
        dtype: torch.dtype,
        wire: torch.dtype,
        device: torch.device,
    ) -> None:
        self.bucket = departure.bucket
        self.mine = self.bucket.put_by(comm.rank)
        self.filled: set[str] = set()
        self.left = self.closed = False
        self._comm, self._exchange = comm, exchange
        self._dtype, self._wire_dtype, self._device = dtype, wire, device
        self._stages = [mine(stage, comm.rank) for stage in departure.stages]
        self._works: list[Any] = []

    @property
    def full(self) -> bool:
        """Whether this rank has put everything that it gives."""
        return len(self.filled) == len(self.mine)

    @property
    def idle(self) -> bool:
        """Whether all that was started is complete."""
        return all(work.is_completed() for work in self._works)

    def put(self, name: str, flat: Tensor) -> None:
        """Add an item."""
        if not self.filled:
            self._buffer = self._take()
        slot = self._buffer[self.bucket.slots[name]]
        if name in self.filled:
            slot.add_(flat)
        else:
            slot.copy_(flat)
        self.filled.add(name)

    def start(self, stage: int) -> None:
        """Start a stage, after all that the one before has to bring.

        On a GPU that is the stream's wait: see Note [Streams].
        """
        if stage == 0:
            self._close()
        with self._side_stream():
            self._wait()
            with self._comm.explained(self._exchange):
                messages = self._stages[stage]
                self._works = [self._comm.call(m, self._wire) for m in messages]

    def _close(self) -> None:
        """What a reduction was not given is zero; in a share it is NaN."""
        if not self.filled:
            self._buffer = self._take()
        blank = float("nan") if self.bucket.kind == "gather" else 0.0
        for name in self.mine:
            if name not in self.filled:
                self._buffer[self.bucket.slots[name]] = blank
        self.left = True
        self._wire = _narrowed(self._buffer, self._wire_dtype)
        sent, received = self.bucket.volume(self._comm.rank)
        size = self._wire.element_size()
        self._comm.moved.add(self._exchange, sent=sent * size, received=received * size)

    def _wait(self) -> None:
        with self._comm.explained(self._exchange):
            for work in self._works:
                self._comm.wait(work, self._wire)
        self._works = []

    def fly(self) -> dict[str, Tensor]:
        """Start everything, wait, and return what this rank receives."""
        for stage in range(max(1, len(self._stages))):
            self.start(stage) if self._stages else self._close()
        return self.land()

    def land(self) -> dict[str, Tensor]:
        """Wait, and return what this rank receives."""
        if not self.left:
            self._close()  # a bucket of one rank, which nothing moves
        with self._side_stream():
            self._wait()
        if self._device.type == "cuda":
            side = self._comm.stream(self._device)
            torch.cuda.current_stream(self._device).wait_stream(side)
        bucket, rank = self.bucket, self._comm.rank
        full = self._wire.to(self._dtype)
        if bucket.kind == "reduce":
            # Copied: a view would keep all of the bucket for this rank's small part.
            got = [p.name for p in bucket.parcels if p.peer == rank]
            results = {name: full[bucket.slots[name]].clone() for name in got}
            self._comm.spares.give(self._taken, self._device)
            return results
        shared = bucket.kind == "all_reduce"
        got = [p.name for p in bucket.parcels if shared or p.peer != rank]
        return {name: full[bucket.slots[name]] for name in got}

    def _take(self) -> Tensor:
        size, dtype, device = self.bucket.elements, self._dtype, self._device
        if self.bucket.kind != "reduce":  # what it brings is the caller's to keep
            return torch.empty(size, dtype=dtype, device=device)
        self._taken = self._comm.spares.take(size, dtype, device)
        return self._taken[:size]

    @contextmanager
    def _side_stream(self) -> Generator[None]:
        """See Note [Streams]."""
        if self._device.type != "cuda":
            yield
            return
        side = self._comm.stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            yield


def _narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """In the dtype that is sent: float16 ends at its limits, not in infinities."""
    if dtype == torch.float16 and x.dtype != dtype:
        limit = torch.finfo(dtype).max
        x = x.clamp(-limit, limit)
    return x.to(dtype)
