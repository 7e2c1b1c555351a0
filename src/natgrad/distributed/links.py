"""Process groups, and the store that all processes of a job share."""

from __future__ import annotations

import hashlib
import pickle
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from natgrad.plan.messages import Message, Part
from natgrad.plan.strategies import Ranks

Key = tuple[str, Ranks]
_made: Counter[Ranks] = Counter()


class Links:
    """Process groups by lane and ranks, and the collectives on them, all started
    without waiting. Ranks are those of ``group``.
    """

    made_apart: ClassVar[bool] = False

    def __init__(self, group: Any, timeout: float) -> None:
        self.globals = tuple(dist.get_process_group_ranks(group))
        # Ranks outside of a group given by the user cannot take part in making ours.
        self._local = len(self.globals) < dist.get_world_size()
        self._timeout = timedelta(seconds=timeout)
        self._groups: dict[Key, Any] = {}

    def open(self, keys: Iterable[Key], backend: str | None = None) -> None:
        Links.made_apart |= self._local
        for lane, ranks in keys:
            self._groups[lane, ranks] = dist.new_group(
                [self.globals[rank] for rank in ranks],
                timeout=self._timeout,
                backend=backend,
                use_local_synchronization=self._local,
            )

    def close(self) -> None:
        """Destroy the groups. No rank waits for another that does it later.

        Not once some were made by a part of the world: torch names those by how many
        groups there are, so that fewer would bring back names that were used before.
        """
        if not Links.made_apart:
            for group in self._groups.values():
                with suppress(ValueError):  # the user has destroyed all of them
                    dist.destroy_process_group(group)
        self._groups.clear()

    def tell(self, said: Any) -> list[Any]:
        """What every rank says, on all ranks.

        As `dist.all_gather_object` on CPU tensors, which needs NumPy; torch does not.
        """
        group = self._groups["control", tuple(range(len(self.globals)))]
        data = torch.frombuffer(bytearray(pickle.dumps(said)), dtype=torch.uint8)
        sizes = [torch.empty(1, dtype=torch.int64) for _ in self.globals]
        dist.all_gather(sizes, torch.tensor([len(data)]), group=group)
        most = max(int(size) for size in sizes)
        heard = [torch.empty(most, dtype=torch.uint8) for _ in sizes]
        dist.all_gather(heard, F.pad(data, (0, most - len(data))), group=group)
        pairs = zip(heard, sizes, strict=True)
        return [pickle.loads(bytes(x[: int(size)].tolist())) for x, size in pairs]

    def all_reduce(self, key: Key, x: Tensor, op: Any = dist.ReduceOp.SUM) -> Any:
        return dist.all_reduce(x, op=op, group=self._groups[key], async_op=True)

    def broadcast(self, key: Key, x: Tensor, source: int) -> Any:
        rank = self.globals[source]
        return dist.broadcast(x, src=rank, group=self._groups[key], async_op=True)

    def call(self, lane: str, message: Message, buffer: Tensor, rank: int) -> Any:
        """Start a planned collective on a bucket's buffer."""
        key = lane, message.ranks
        peer, start, stop = message.parts[0]
        if len(message.parts) > 1:
            return Packed(message, buffer, rank, self._groups[key])
        x = buffer[start:stop]
        if message.kind == "all_reduce":
            return self.all_reduce(key, x)
        if message.kind == "broadcast":
            return self.broadcast(key, x, peer)
        to = self.globals[peer]
        return dist.reduce(x, dst=to, group=self._groups[key], async_op=True)

    def swap(
        self, lane: str, message: Message, given: Tensor, got: Tensor, rank: int
    ) -> Any:
        """Start a planned all-to-all."""
        to, of = message.splits(rank)
        group = self._groups[lane, message.ranks]
        return dist.all_to_all_single(got, given, of, to, group, async_op=True)


class Packed:
    """One collective of several parts, and the way of these to it and back.

    Parts lie side by side: in a reduce-scatter and an all-gather each rank's in a
    stretch of its own, all equally long, and in an all-reduce without gaps.
    """

    def __init__(self, message: Message, buffer: Tensor, rank: int, group: Any) -> None:
        self._message, self._buffer, self._rank = message, buffer, rank
        ranks, kind, longest = message.ranks, message.kind, message.longest
        dense = kind == "all_reduce"
        size = message.elements if dense else longest * len(ranks)
        self._whole = buffer.new_zeros(size)
        self._slots: list[slice] = []
        ends = {r: 0 if dense else longest * i for i, r in enumerate(ranks)}
        for peer, start, stop in message.parts:
            at = sum(s.stop - s.start for s in self._slots) if dense else ends[peer]
            self._slots.append(slice(at, at + stop - start))
            ends[peer] = at + stop - start
        for (peer, start, stop), slot in self._pairs():
            if peer == rank or not message.shares:
                self._whole[slot] = buffer[start:stop]
        self._work = self._run(kind, longest * ranks.index(rank), longest, group)
        self._copied = False

    def _pairs(self) -> Iterable[tuple[Part, slice]]:
        return zip(self._message.parts, self._slots, strict=True)

    def _run(self, kind: str, first: int, longest: int, group: Any) -> Any:
        whole = self._whole
        if kind == "all_reduce":
            return dist.all_reduce(whole, group=group, async_op=True)
        # not a view: what is written may not be what is read
        own = self._own = whole[first : first + longest].clone()
        self._first = first
        output, given = (whole, own) if kind == "all_gather" else (own, whole)
        return _renamed(kind)(output, given, group=group, async_op=True)

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self, *timeout: Any) -> None:
        """Wait, on a GPU its stream; then put what came where it belongs."""
        self._work.wait(*timeout)
        if self._copied:
            return
        self._copied = True
        scattered = self._message.kind == "reduce_scatter"
        for (peer, start, stop), slot in self._pairs():
            if (peer == self._rank) != self._message.shares:
                a, b = slot.start, slot.stop
                came = self._whole[slot]
                if scattered:
                    came = self._own[a - self._first : b - self._first]
                self._buffer[start:stop] = came


def _renamed(name: str) -> Any:
    """A collective on single tensors, by the name that this torch has for it."""
    old = {"reduce_scatter": "reduce_scatter_tensor"}.get(name, f"{name}_into_tensor")
    new = f"{name}_single"
    return getattr(dist, new if hasattr(dist, new) else old)


def job_store(ranks: Ranks) -> Any:
    """The job's store, under a prefix that is new for each communicator.

    By the ranks that make it: elsewhere others may have made more of them, or fewer.
    """
    store: Any = dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
    # A clone has its own connection: a wait on the other does not hold it up.
    own = store.clone() if hasattr(store, "clone") else store
    _made[ranks] += 1
    who = hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
    return dist.PrefixStore(f"natgrad/{who}/{_made[ranks]}", own)
