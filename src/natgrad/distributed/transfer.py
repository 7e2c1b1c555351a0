"""One exchange under way: buckets that fill, leave and land.

Note [Order of buckets]
    All ranks must start the collectives of a group in the same order. Bucket i leaves
    when this rank has put all of its items and bucket i - 1 has left; ``finish`` sends
    the rest. Each exchange that may be open during backward has groups of its own, so
    that two of them, or DDP, may interleave differently on different ranks.

Note [Same names]
    gloo ends the process when sizes differ, so a reduction's names are compared before
    its first bucket leaves, by a small all-reduce that runs since ``begin``. A share
    has no time to hide it in: its names must follow from what ranks agreed on.

Note [Late contributions]
    A second backward in one step puts items whose bucket may have left. What comes late
    is summed aside. ``finish`` asks all ranks (one small all-reduce) whether anything
    is late anywhere; if so they agree on the buckets and send those again. So ranks
    may put different items, a different number of times, and never wait for a bucket
    that another rank does not send. By the same question they learn whether some rank
    has put what does not count any more: the flight is then void on all of them.

Note [Streams]
    On a GPU a wait blocks the stream, not the host. So all stages of a bucket are
    issued as it leaves, in one order on all ranks, on a side stream that the current
    one waits for in ``finish``. Each exchange has a side stream of its own: on a common
    one, two that interleave differently on two ranks would wait for each other. On a
    CPU a wait blocks, so later stages start when a put or ``finish`` finds the earlier
    ones complete.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from natgrad.plan.buckets import Bucket, bucket_limit

if TYPE_CHECKING:
    from natgrad.distributed.communicator import Communicator

Stage = Callable[[], list[Any]]


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


class Flight:
    """Made by `Communicator.begin`: put items, then finish."""

    def __init__(
        self,
        comm: Communicator,
        exchange: str,
        names: tuple[str, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._comm, self._plan = comm, comm.plan.exchanges[exchange]
        self._names = dict.fromkeys(names)
        self._dtype, self._device = dtype, device
        self._wire = comm.options.wire_dtype(exchange, dtype)
        most = comm.options.bucket_bytes // self._wire.itemsize
        # See Note [Order of buckets]: the first must be full long before the last.
        limit = bucket_limit(self._plan, self._names, most)
        first, self._second = comm.layout(exchange, tuple(self._names), limit)
        self._loads = [self._load(b) for b in first if comm.rank in b.ranks]
        self._where = {name: load for load in self._loads for name in load.mine}
        self._left = 0
        self._late: dict[str, Tensor] = {}
        self._own: dict[str, Tensor] = {}
        self.finished = False
        self.is_void = False
        self._marks = self._ask()

    def _ask(self) -> Callable[[], list[int]] | None:
        """See Note [Same names]."""
        if not (self._plan.reduces and self._plan.items):
            return None
        text = repr((self._plan.name, list(self._names), self._dtype))
        mark = zlib.crc32(text.encode())
        return self._comm.largest([mark, -mark])

    def put(self, name: str, flat: Tensor) -> None:
        """Hand over this rank's part of an item: a 1-D tensor of the planned size.

        In a reduction a second put adds to the first. In a share only the sources'
        puts count. Buckets that are full leave at once.
        """
        self._require_open()
        if name not in self._names:
            raise ValueError(f"Invalid name={name!r}. Must be one given to begin().")
        for item in self._plan.select([name]):
            if flat.shape != (item.elements,):
                shape, legal = tuple(flat.shape), (item.elements,)
                raise ValueError(f"Invalid shape {shape} of {name!r}. Must be {legal}.")
            self._put(name, flat, item.sources)

    def _put(self, name: str, flat: Tensor, sources: tuple[int, ...]) -> None:
        load = self._where.get(name)
        if not self._plan.reduces:
            if load and name in load.filled:
                raise ValueError(f"{name!r} was put twice. Must be once in a share.")
            if self._wire != self._dtype and self._comm.rank in sources:
                self._own[name] = flat.to(self._wire).to(self._dtype)
        if load is None:
            return
        if load.left:
            late = self._late.get(name)
            flat = flat.to(self._dtype)
            self._late[name] = flat.clone() if late is None else late.add_(flat)
        else:
            load.put(name, flat)
        if self._comm.options.overlap:
            self._leave(lambda load: load.full)

    def void(self) -> None:
        """Say, before `finish`, that what was put in this reduction must not count.

        After ``finish`` `is_void` is then True on every rank, and sums mean nothing.
        """
        self.is_void = True

    def finish(self) -> dict[str, Tensor]:
        """Send what is left, wait, and return what this rank receives, by name.

        In a reduction an item that a rank did not put counts as zeros. In a share sent
        in half precision a source gets its own items too, rounded as the others see
        them. The tensors are the caller's to keep and to change.
        """
        self._require_open()
        self.finished = True
        self._require_same_names()
        missing = [n for n in self._where if n not in self._where[n].filled]
        self._leave(lambda load: True)
        late = self._agree_on_late()
        results = {k: v for load in self._loads for k, v in load.land().items()}
        for load in late:
            for name, more in self._fly(load.bucket, self._late).items():
                results[name] = results[name] + more
        for bucket in self._second:
            if self._comm.rank in bucket.ranks:
                results |= self._fly(bucket, results)
        if missing and not self._plan.reduces:
            # Only now, so that no other rank waits for what does not come.
            raise ValueError(f"{missing} were not put. Must be, by their source.")
        return self._own | results

    def _require_open(self) -> None:
        if self.finished:
            self._comm.require_company(self._plan.name)
            raise ValueError(f"This {self._plan.name} has finished. Begin a new one.")

    def _require_same_names(self) -> None:
        most, least = self._marks() if self._marks else (0, 0)
        self._marks = None
        if most != -least:
            raise ValueError(
                f"Ranks began {self._plan.name} with different names or dtypes."
            )

    def _leave(self, may: Callable[[_Load], bool]) -> None:
        """See Note [Order of buckets]."""
        while self._left < len(self._loads) and may(self._loads[self._left]):
            self._require_same_names()
            self._loads[self._left].leave()
            self._left += 1
        # Later stages too start in the order of buckets.
        for load in self._loads[: self._left]:
            load.advance(wait=False)
            if load.stages_left:
                return

    def _agree_on_late(self) -> list[_Load]:
        """See Note [Late contributions]."""
        if not (self._plan.reduces and self._loads):
            return []
        late, void = self._comm.largest([len(self._late), int(self.is_void)])()
        self.is_void = bool(void)
        if self.is_void or not late:
            return []
        flags = [any(n in self._late for n in load.mine) for load in self._loads]
        agreed = self._comm.largest([int(flag) for flag in flags])()
        return [x for x, flag in zip(self._loads, agreed, strict=True) if flag]

    def _fly(self, bucket: Bucket, values: dict[str, Tensor]) -> dict[str, Tensor]:
        load = self._load(bucket)
        for name in load.mine:
            if name in values:
                load.put(name, values[name])
        load.leave()
        return load.land()

    def _load(self, bucket: Bucket) -> _Load:
        return _Load(
            self._comm, self._plan.name, bucket, self._dtype, self._wire, self._device
        )


class _Load:
    """A bucket's buffer and the collectives that move it."""

    def __init__(
        self,
        comm: Communicator,
        exchange: str,
        bucket: Bucket,
        dtype: torch.dtype,
        wire: torch.dtype,
        device: torch.device,
    ) -> None:
        self.bucket, self.mine = bucket, bucket.put_by(comm.rank)
        self.filled: set[str] = set()
        self.left = False
        self._comm, self._exchange = comm, exchange
        self._dtype, self._wire_dtype, self._device = dtype, wire, device
        self._stages: list[Stage] = []
        self._works: list[Any] = []

    @property
    def full(self) -> bool:
        return len(self.filled) == len(self.mine)

    @property
    def stages_left(self) -> bool:
        return bool(self._stages)

    def put(self, name: str, flat: Tensor) -> None:
        if not self.filled:
            self._buffer = self._take()
        slot = self._buffer[self.bucket.slots[name]]
        if name in self.filled:
            slot.add_(flat)
        else:
            slot.copy_(flat)
        self.filled.add(name)

    def leave(self) -> None:
        """Send. What a reduction was not given is zero; in a share it is NaN."""
        if not self.filled:
            self._buffer = self._take()
        blank = float("nan") if self.bucket.kind == "gather" else 0.0
        for name in self.mine:
            if name not in self.filled:
                self._buffer[self.bucket.slots[name]] = blank
        self.left = True
        self._wire = _narrowed(self._buffer, self._wire_dtype)
        self._stages = self._comm.stages(self._exchange, self.bucket, self._wire)
        sent, received = self.bucket.volume(self._comm.rank)
        size = self._wire.element_size()
        self._comm.moved.add(self._exchange, sent=sent * size, received=received * size)
        with self._side_stream():
            self._start()
            if self._device.type == "cuda":
                self.advance(wait=True)

    def advance(self, wait: bool) -> None:
        """Start each stage whose predecessor is complete, or wait until it is."""
        while self._stages and (wait or all(w.is_completed() for w in self._works)):
            self._wait()
            self._start()
        if wait:
            self._wait()

    def _start(self) -> None:
        if self._stages:
            with self._comm.explained(self._exchange):
                self._works = self._stages.pop(0)()
            self._comm.moved.add(self._exchange, calls=len(self._works))

    def _wait(self) -> None:
        with self._comm.explained(self._exchange):
            for work in self._works:
                self._comm.wait(work, self._wire)
        self._works = []

    def land(self) -> dict[str, Tensor]:
        """Wait, and return what this rank receives."""
        self.advance(wait=True)
        if self._device.type == "cuda":
            side = self._comm.stream(self._device, self._exchange)
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
        side = self._comm.stream(self._device, self._exchange)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            yield


def _narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """In the dtype that is sent: float16 ends at its limits, not in infinities."""
    if dtype == torch.float16 and x.dtype != dtype:
        limit = torch.finfo(dtype).max
        x = x.clamp(-limit, limit)
    return x.to(dtype)
