"""Process groups, and the store that all processes of a job share."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor

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
        """What every rank says, on all ranks."""
        heard: list[Any] = [None] * len(self.globals)
        everyone = tuple(range(len(self.globals)))
        dist.all_gather_object(heard, said, group=self._groups["control", everyone])
        return heard

    def all_reduce(self, key: Key, x: Tensor, op: Any = dist.ReduceOp.SUM) -> Any:
        return dist.all_reduce(x, op=op, group=self._groups[key], async_op=True)

    def reduce(self, key: Key, x: Tensor, to: int) -> Any:
        rank = self.globals[to]
        return dist.reduce(x, dst=rank, group=self._groups[key], async_op=True)

    def broadcast(self, key: Key, x: Tensor, source: int) -> Any:
        rank = self.globals[source]
        return dist.broadcast(x, src=rank, group=self._groups[key], async_op=True)

    def all_to_all(
        self, key: Key, got: Tensor, given: Tensor, of: list[int], to: list[int]
    ) -> Any:
        """``of`` each rank so many elements, ``to`` each so many."""
        group = self._groups[key]
        return dist.all_to_all_single(got, given, of, to, group, async_op=True)


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
