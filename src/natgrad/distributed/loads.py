"""What is under way together: its buffers, and the collectives that move it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from natgrad.math.precision import narrowed
from natgrad.plan.buckets import Bucket
from natgrad.plan.messages import Message, Stages, mine
from natgrad.plan.sequence import Departure
from natgrad.plan.shards import Crate

if TYPE_CHECKING:
    from natgrad.distributed.communicator import Communicator


class Spares:
    """Buffers that are used again: as many as a step has taken at once, and no more.

    What is exchanged differs from step to step, and so do sizes.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        self._idle: list[Tensor] = []

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
        self._idle = [x for x in self._idle if x is not buffer]

    def end_step(self) -> None:
        """Drop what no exchange has used since the step before ended."""
        idle = {id(x) for x in self._idle}
        for key, free in self._free.items():
            self._free[key] = [x for x in free if id(x) not in idle]
        self._idle = [x for free in self._free.values() for x in free]


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What all loads of a flight have in common; ``wire`` is the dtype that is sent."""

    comm: Communicator
    exchange: str
    dtype: torch.dtype
    wire: torch.dtype
    device: torch.device


class Load(ABC):
    """What one departure moves: a buffer, and stages of collectives, one by one.

    Attributes:
        mine: names of the items that this rank puts; ``filled``: that it has put;
            ``absent``: that it has said not to put.
        closed: whether it may leave with what it has.
        left: whether it has left.
    """

    def __init__(self, bucket: Bucket | Crate, stages: Stages, terms: Terms) -> None:
        rank = terms.comm.rank
        self._volume, self.mine = bucket.volume(rank), bucket.put_by(rank)
        self.filled: set[str] = set()
        self.absent: set[str] = set()
        self.left = self.closed = False
        self._comm, self._exchange = terms.comm, terms.exchange
        self._dtype, self._wire_dtype = terms.dtype, terms.wire
        self._device = terms.device
        self._stages = [mine(stage, rank) for stage in stages]
        self._works: list[Any] = []

    @property
    def full(self) -> bool:
        """Whether this rank has put everything that it gives."""
        return len(self.filled | self.absent) == len(self.mine)

    @property
    def idle(self) -> bool:
        """Whether the next stage may start, without holding this rank up.

        On a GPU it may at once, and must: all ranks start it at the same place.
        """
        on_stream = self._device.type == "cuda"
        return on_stream or all(work.is_completed() for work in self._works)

    def put(self, name: str, flat: Tensor) -> None:
        """Add an item."""
        if not self.filled:
            self._buffer = self._take()
        for where in self._slots(name):
            slot = self._buffer[where]
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
                self._works = [self._call(m) for m in self._stages[stage]]

    def _close(self) -> None:
        """What a reduction was not given is zero; in a share it is NaN."""
        if not self.filled:
            self._buffer = self._take()
        for name in self.mine:
            for where in self._slots(name) if name not in self.filled else ():
                self._buffer[where] = self._blank
        self.left = True
        self._wire = narrowed(self._buffer, self._wire_dtype)
        sent, received = self._volume
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
        return self._results()

    @property
    @abstractmethod
    def _blank(self) -> float:
        """What stands for an item that was not put."""

    @abstractmethod
    def _take(self) -> Tensor:
        """The buffer that items are put into."""

    @abstractmethod
    def _slots(self, name: str) -> Sequence[slice]:
        """Where an item lies in it."""

    @abstractmethod
    def _call(self, message: Message) -> Any:
        """Start a collective."""

    @abstractmethod
    def _results(self) -> dict[str, Tensor]:
        """What has come."""

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


class BucketLoad(Load):
    """A bucket, which collectives change in its place."""

    def __init__(self, bucket: Bucket, stages: Stages, terms: Terms) -> None:
        super().__init__(bucket, stages, terms)
        self._bucket = bucket

    @property
    def _blank(self) -> float:
        return float("nan") if self._bucket.kind == "gather" else 0.0

    def _take(self) -> Tensor:
        size, dtype, device = self._bucket.elements, self._dtype, self._device
        if self._bucket.kind != "reduce":  # what it brings is the caller's to keep
            return torch.empty(size, dtype=dtype, device=device)
        self._taken = self._comm.spares.take(size, dtype, device)
        return self._taken[:size]

    def _slots(self, name: str) -> Sequence[slice]:
        return (self._bucket.slots[name],)

    def _call(self, message: Message) -> Any:
        return self._comm.call(message, self._wire)

    def _results(self) -> dict[str, Tensor]:
        bucket, rank = self._bucket, self._comm.rank
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


class CrateLoad(Load):
    """Pieces of matrices in an all-to-all: what it brings has a buffer of its own."""

    @property
    def _blank(self) -> float:
        return float("nan")

    def __init__(self, crate: Crate, stages: Stages, terms: Terms) -> None:
        super().__init__(crate, stages, terms)
        self._sent = crate.sent_by(self._comm.rank)
        self._coming = crate.got_by(self._comm.rank)
        ends = [0, *accumulate(move.elements for move in self._sent)]
        self._at: dict[str, list[slice]] = {}
        for move, (start, stop) in zip(self._sent, pairwise(ends), strict=True):
            self._at.setdefault(move.name, []).append(slice(start, stop))

    def _take(self) -> Tensor:
        size = sum(move.elements for move in self._sent)
        return torch.empty(size, dtype=self._dtype, device=self._device)

    def _slots(self, name: str) -> Sequence[slice]:
        return self._at[name]

    def _call(self, message: Message) -> Any:
        self._got = self._wire.new_empty(sum(m.elements for m in self._coming))
        return self._comm.swap(message, self._wire, self._got)

    def _results(self) -> dict[str, Tensor]:
        parts = self._got.to(self._dtype).split([m.elements for m in self._coming])
        return {m.name: x for m, x in zip(self._coming, parts, strict=True)}


def make_load(departure: Departure, terms: Terms) -> Load:
    """What moves a departure."""
    bucket, stages = departure.bucket, departure.stages
    if isinstance(bucket, Crate):
        return CrateLoad(bucket, stages, terms)
    return BucketLoad(bucket, stages, terms)
