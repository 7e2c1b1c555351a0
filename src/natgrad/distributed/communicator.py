"""Runs a plan's exchanges.

The same code runs on gloo and NCCL. A reduce-scatter-v is one reduction, and an
all-gather-v one broadcast, for each rank that has a part in a bucket, all in flight at
once: uneven parts cost no padding and no copy. On gloo this is also faster than
reduce_scatter and all_to_all.

Buckets and their order are in `transfer`, process groups in `links`, the naming of lost
ranks in `watchdog`.
"""

from __future__ import annotations

import socket
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from natgrad.distributed.compare import require_same, require_same_options
from natgrad.distributed.links import Key, Links, job_store
from natgrad.distributed.options import CommOptions
from natgrad.distributed.traffic import Counts, Traffic
from natgrad.distributed.transfer import Flight, Spares, Stage
from natgrad.distributed.watchdog import START_AGAIN, Pulse
from natgrad.plan import EXCHANGES, Plan
from natgrad.plan.buckets import Bucket, make_buckets
from natgrad.plan.hosts import nodes_of, rails_of

# Sums come back to a node while the next bucket's go up: each way has its own order.
DOWN = " down"
# All-to-alls are made in a step, one after another: they need no lanes of their own.
SWAP = "swap"


class CommError(RuntimeError):
    """An exchange failed. The message names the ranks that are gone, if any."""


def world_of(group: Any = None) -> int:
    """Ranks in a process group; 1 where there is none."""
    ready = dist.is_available() and dist.is_initialized()
    return dist.get_world_size(group) if ready else 1


def rank_of(group: Any = None) -> int:
    """This process's rank in a process group; 0 where there is none."""
    return dist.get_rank(group) if world_of(group) > 1 else 0


def tell(mark: str, said: Any, group: Any = None) -> list[Any]:
    """Collective: what every rank says, on all ranks; raises unless marks are equal.

    A rank that makes a `Communicator` meanwhile raises as well: the two meet.
    """
    links = Links(group, CommOptions.timeout)
    links.open([("control", tuple(range(world_of(group))))], backend="gloo")
    heard = links.tell((mark, said, ""))
    links.close()
    require_same("plans", [mark for mark, _, _ in heard])
    return [said for _, said, _ in heard]


class Communicator:
    """Moves tensors between ranks as a plan says.

    Construction is collective: the plan and ``fingerprint`` (texts of all options that
    must agree, by name) are compared, and a difference raises the same ValueError
    everywhere.
    ``hosts`` names each rank's host, to override what the system says.
    """

    def __init__(
        self,
        plan: Plan,
        options: CommOptions | None = None,
        group: Any = None,
        *,
        fingerprint: Mapping[str, str] | None = None,
        hosts: Sequence[str] | None = None,
    ) -> None:
        self.plan = plan
        self.options = options or CommOptions()
        self.world = world_of(group)
        self.rank = rank_of(group)
        self.layout = lru_cache(maxsize=64)(_layouts(plan))
        self.spares = Spares()
        self._everyone = tuple(range(self.world))
        self._streams: dict[tuple[torch.device, str], torch.cuda.Stream] = {}
        self.moved = Traffic()
        self._over = ""
        if self.world > 1:
            self._connect(group, fingerprint or {}, hosts)
        self._require_world()

    def _require_world(self) -> None:
        if self.plan.world != self.world:
            raise ValueError(
                f"Invalid plan for {self.plan.world} ranks. Must be for {self.world}."
            )

    def _connect(
        self, group: Any, fingerprint: Mapping[str, str], hosts: Sequence[str] | None
    ) -> None:
        self._links = Links(group, self.options.timeout)
        self._pulse = Pulse(job_store(self._links.globals), self.rank, self.world)
        self._stop_pulse = weakref.finalize(self, self._pulse.stop)
        host = hosts[self.rank] if hosts else socket.gethostname()
        options = {**fingerprint, "comm": repr(self.options)}
        with self.explained("construction"):
            self._links.open([("control", self._everyone)], backend="gloo")
            said = self._links.tell((self.plan.digest(), options, host))
        try:
            require_same("plans", [digest for digest, _, _ in said])
            require_same_options([named for _, named, _ in said])
            self._require_world()
        except ValueError:
            self.close()
            raise
        hosts = [host for _, _, host in said]
        self._nodes = nodes_of(hosts, self.options.hierarchical)
        with self.explained("construction"):
            self._links.open(self._keys())

    def _keys(self) -> list[Key]:
        """Every group that any exchange of the plan may use, in one order."""
        keys: set[Key] = {("agree", self._everyone)}
        for name, exchange in self.plan.exchanges.items():
            if exchange.swaps:
                keys.add((SWAP, self._everyone))
                continue
            everything = tuple(item.name for item in exchange.items)
            first, second = self.layout(name, everything, 1)
            keys |= {(_lane(name, b), b.ranks) for b in first + second}
            if self._nodes and exchange.reduces and first:
                keys |= {(name, ranks) for ranks in rails_of(self._nodes)}
                keys |= {(name + way, r) for r in self._nodes for way in ("", DOWN)}
        return sorted(keys)

    def begin(
        self,
        exchange: str,
        names: Iterable[str],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> Flight:
        """Open an exchange for the named items; names must be the same on all ranks.

        Give names in the order in which their items will be ready. Items that the plan
        does not move (a share with nobody to receive it) are left out.
        """
        if exchange not in self.plan.exchanges:
            raise ValueError(f"Invalid exchange={exchange!r}. Must be in {EXCHANGES}.")
        return Flight(self, exchange, tuple(names), dtype, torch.device(device))

    def all_to_all(
        self, exchange: str, got: Tensor, given: Tensor, of: list[int], to: list[int]
    ) -> Any:
        """Start one among all ranks: ``of`` each so many elements, ``to`` each."""
        self._pulse.mark(f"after its last {exchange}")
        with self.explained(exchange):
            key = SWAP, self._everyone
            return self._links.all_to_all(key, got, given, of, to)

    def agree(self, vector: Tensor) -> Tensor:
        """The sum of a small vector over all ranks, on all ranks."""
        return self._everywhere("agree", vector.clone(), dist.ReduceOp.SUM)()

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """``x`` of one rank, on all ranks; the others give a tensor to fill."""
        # "control" is gloo's: the other's backend may not know tensors on the CPU
        lane = "control" if x.device.type == "cpu" else "agree"
        with self.explained("broadcast"):
            self.wait(self._links.broadcast((lane, self._everyone), x, source), x)
        return x

    def tell(self, said: Any) -> list[Any]:
        """What every rank says, on all ranks. For errors: it waits to be heard."""
        self._pulse.mark("after telling the others")
        with self.explained("control"):
            return self._links.tell(said)

    def largest(self, numbers: Sequence[int]) -> Callable[[], list[int]]:
        """Start to find the largest of each number over all ranks; call to wait."""
        vector = torch.tensor(numbers, dtype=torch.int64)
        ask = self._everywhere("control", vector, dist.ReduceOp.MAX)
        return lambda: [int(x) for x in ask()]

    def _everywhere(self, lane: str, vector: Tensor, op: Any) -> Callable[[], Tensor]:
        if self.world == 1:
            return lambda: vector
        size = vector.numel() * vector.element_size()
        self.moved.add(lane, calls=1, sent=size, received=size)
        self._pulse.mark(f"after its last {lane}")
        with self.explained(lane):
            work = self._links.all_reduce((lane, self._everyone), vector, op)
        return lambda: self._waited(lane, work, vector)

    def _waited(self, lane: str, work: Any, vector: Tensor) -> Tensor:
        with self.explained(lane):
            self.wait(work, vector)
        return vector

    def wait(self, work: Any, x: Tensor) -> None:
        """Wait for a collective that moves ``x``: its stream if that is on a GPU."""
        work.wait() if x.is_cuda else self._pulse.wait(work)

    def fail(self, error: BaseException) -> bool:
        """Tell the other ranks why this one does not go on.

        Returns True if all ranks have failed alike and may go on together. Else no
        exchange can begin any more: the others have ended.
        """
        if self.world == 1 or self._pulse.fail(error):
            return True
        message = f"{type(error).__name__}: {error}"
        self._over = self._over or f"This rank failed before: {message}"
        return False

    def meet(self, doing: str) -> None:
        """Wait for every rank to do this as well; raise if one does something else."""
        with self.explained(doing):
            if self.world > 1 and not self._pulse.all_say(doing, self.options.timeout):
                raise RuntimeError("Must be done on every rank.")

    def close(self) -> None:
        """Stop showing signs of life, as one that is dropped does, and free groups."""
        if self.world > 1:
            self._stop_pulse()
            # a group with a collective that never ends would hold this rank up
            if not self._over:
                self._links.close()

    def end_step(self) -> None:
        """Close the counts of a step; ``traffic()["step"]`` is then that step's."""
        self.moved.end_step()

    def traffic(self) -> dict[str, Counts]:
        """Calls and bytes of this rank by exchange, of a step and in total.

        ``step`` is the last step closed by ``end_step``, or all so far. Bytes are
        payload as defined in `natgrad.plan.exchange`, so they equal the plan's
        ``volumes()`` times the size of an element; contributions that came late, to
        buckets already gone, add to them. ``agree`` and ``control`` (who is late) are
        not in the plan.
        """
        return self.moved.report()

    # -- what a flight needs ----------------------------------------------------------

    def stream(self, device: torch.device, exchange: str) -> torch.cuda.Stream:
        """The stream on which an exchange runs on a GPU."""
        key = device, exchange
        if key not in self._streams:
            self._streams[key] = torch.cuda.Stream(device)
        return self._streams[key]

    @contextmanager
    def explained(self, doing: str) -> Generator[None]:
        """Turn a collective's error into one that says who is gone."""
        if self.world == 1:
            yield
            return
        try:
            if self._over or self._pulse.bad_news:
                raise RuntimeError(START_AGAIN)
            with self._pulse.waiting(f"in {doing}"):
                yield
        except RuntimeError as error:
            self._over = self._over or self._pulse.verdict()
            raise CommError(f"{doing} failed. {self._over}\n{error}") from error

    def require_company(self, doing: str) -> None:
        """Raise if the other ranks will not take part in what is to begin."""
        with self.explained(doing):
            pass

    def stages(self, exchange: str, bucket: Bucket, wire: Tensor) -> list[Stage]:
        """The collectives that move a bucket, each stage after the one before."""
        if len(bucket.ranks) == 1:
            return []
        links, key = self._links, (_lane(exchange, bucket), bucket.ranks)
        parts = [(peer, wire[part]) for peer, part in bucket.segments]
        if bucket.kind == "gather":
            return [lambda: [links.broadcast(key, x, r) for r, x in parts]]
        if self._nodes and bucket.kind == "reduce":
            return self._reduce_by_node(exchange, parts)
        if self._nodes:
            return self._all_reduce_by_node(exchange, wire)
        if bucket.kind == "reduce":
            return [lambda: [links.reduce(key, x, r) for r, x in parts]]
        return [lambda: [links.all_reduce(key, wire)]]

    def _reduce_by_node(
        self, exchange: str, parts: list[tuple[int, Tensor]]
    ) -> list[Stage]:
        """Within a node to whoever has the peer's place there, then between nodes."""
        links, (place, node, rail) = self._links, self._at(exchange)
        spot = {r: i for ranks in self._nodes for i, r in enumerate(ranks)}
        ours = [(r, x) for r, x in parts if spot[r] == place]
        return [
            lambda: [links.reduce(node, x, node[1][spot[r]]) for r, x in parts],
            lambda: [links.reduce(rail, x, r) for r, x in ours],
        ]

    def _all_reduce_by_node(self, exchange: str, wire: Tensor) -> list[Stage]:
        """Each rank of a node sums a chunk there, then with its peers elsewhere."""
        links, (_, node, rail) = self._links, self._at(exchange)
        chunks = zip(node[1], wire.tensor_split(len(node[1])), strict=True)
        parts = [(r, x) for r, x in chunks if x.numel()]
        ours = [x for r, x in parts if r == self.rank]
        down = (exchange + DOWN, node[1])
        return [
            lambda: [links.reduce(node, x, r) for r, x in parts],
            lambda: [links.all_reduce(rail, x) for x in ours],
            lambda: [links.broadcast(down, x, r) for r, x in parts],
        ]

    def _at(self, exchange: str) -> tuple[int, Key, Key]:
        """This rank's place in its node, its node, and the same place of all nodes."""
        node = next(ranks for ranks in self._nodes if self.rank in ranks)
        place = node.index(self.rank)
        return place, (exchange, node), (exchange, rails_of(self._nodes)[place])


def _lane(exchange: str, bucket: Bucket) -> str:
    # Shares never overlap backward, so they need no order of their own.
    return "share" if bucket.kind == "gather" else exchange


def _layouts(plan: Plan) -> Callable[..., tuple[tuple[Bucket, ...], ...]]:
    def layout(exchange: str, names: tuple[str, ...], limit: int) -> Any:
        return make_buckets(plan.exchanges[exchange], names, limit)

    return layout
