"""Runs a plan's exchanges.

The same code runs on gloo and NCCL. What a bucket becomes on the wire is the plan's
(`natgrad.plan.messages`), and so is the order in which collectives start: on gloo a
reduction, or a broadcast, for each rank that has a part in it, all in flight at once,
which is faster there than reduce_scatter and all_to_all; on NCCL one collective of
equal parts.

Buckets and their order are in `transfer`, process groups in `links`, the naming of lost
ranks in `watchdog`.
"""

from __future__ import annotations

import socket
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from natgrad.distributed.compare import require_same, require_same_options
from natgrad.distributed.links import Key, Links, job_store
from natgrad.distributed.loads import Spares
from natgrad.distributed.options import CommOptions
from natgrad.distributed.traffic import Counts, Traffic
from natgrad.distributed.transfer import Flight, Walk
from natgrad.distributed.watchdog import START_AGAIN, Pulse
from natgrad.plan import EXCHANGES, Plan
from natgrad.plan.hosts import nodes_of
from natgrad.plan.messages import AGREE, CONTROL, Message, Way, Wiring
from natgrad.plan.sequence import Departure, Leg, departures, small
from natgrad.plan.strategies import Ranks

# Reductions may be open while something else is asked for between steps.
REDUCE, SHARE = "reduce", "share"
Leaving = Callable[
    [tuple[Leg, ...], torch.dtype], tuple[list[Departure], list[Departure]]
]


class CommError(RuntimeError):
    """An exchange failed. The message names the ranks that are gone, if any."""


def world_of(group: Any = None) -> int:
    """Ranks in a process group; 1 where there is none."""
    ready = dist.is_available() and dist.is_initialized()
    return dist.get_world_size(group) if ready else 1


def rank_of(group: Any = None) -> int:
    """This process's rank in a process group; 0 where there is none."""
    return dist.get_rank(group) if world_of(group) > 1 else 0


def backend_of(group: Any = None) -> str:
    """The backend of a process group; "" where there is none."""
    return dist.get_backend(group) if world_of(group) > 1 else ""


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
        self.options: CommOptions = options or CommOptions()
        self.world: int = world_of(group)
        self.rank: int = rank_of(group)
        self.spares: Spares = Spares()
        self.log: list[Message] | None = None
        self._everyone = tuple(range(self.world))
        self._nodes: tuple[Ranks, ...] = ()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._way: Way = self.options.way(backend_of(group))
        self.moved: Traffic = Traffic()
        self._over = ""
        if self.world > 1:
            self._connect(group, fingerprint or {}, hosts)
        self._require_world()
        # not a method of this object, which would then keep itself alive
        leaving = partial(_departures, plan, self.options, self._nodes, self._way)
        self.departures: Leaving = lru_cache(maxsize=64)(leaving)

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
        keys: set[Key] = {(SHARE, self._everyone)}
        for name, exchange in self.plan.exchanges.items():
            legs = (Leg(exchange=name, names=tuple(i.name for i in exchange.items)),)
            # one item per bucket has all the groups that more of them have
            wiring = replace(self.wiring(torch.float32), bucket_bytes=1)
            first, second = departures(self.plan, legs, wiring)
            for departure in first + second:
                stages = departure.stages
                keys |= {(_lane(m), m.ranks) for stage in stages for m in stage}
        return sorted(keys)

    def wiring(self, dtype: torch.dtype) -> Wiring:
        """How exchanges of tensors of a dtype become collectives."""
        return self.options.wiring(dtype, self._nodes, self._way)

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
        leg = Leg(exchange=exchange, names=tuple(names))
        return self.begin_together([leg], dtype, device).flights[0]

    def begin_together(
        self,
        legs: Sequence[Leg],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> Walk:
        """Open several exchanges whose buckets leave in one order, a flight each."""
        return Walk(self, legs, dtype, torch.device(device))

    def agree(self, vector: Tensor, copies: int = 1) -> Tensor:
        """The sum of a small vector over all ranks, on all ranks.

        Of what so many ranks have copies of, each copy counts by its part.
        """
        total = self._everywhere(AGREE, vector.clone(), dist.ReduceOp.SUM)()
        return total if copies == 1 else total / copies

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """``x`` of one rank, on all ranks; the others give a tensor to fill."""
        # "control" is gloo's: the other's backend may not know tensors on the CPU
        lane = CONTROL if x.device.type == "cpu" else SHARE
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
        ask = self._everywhere(CONTROL, vector, dist.ReduceOp.MAX)
        return lambda: [int(x) for x in ask()]

    def _everywhere(self, what: str, vector: Tensor, op: Any) -> Callable[[], Tensor]:
        if self.world == 1:
            return lambda: vector
        message = small(what, self.world, vector.numel(), vector.element_size())
        self._note(message)
        self.moved.add(what, sent=message.bytes, received=message.bytes)
        self._pulse.mark(f"after its last {what}")
        with self.explained(what):
            key = _lane(message), self._everyone
            work = self._links.all_reduce(key, vector, op)
        return lambda: self._waited(what, work, vector)

    def _note(self, message: Message) -> None:
        self.moved.add(message.exchange, calls=1, padding=message.padding)
        if self.log is not None:
            self.log.append(message)

    def _waited(self, lane: str, work: Any, vector: Tensor) -> Tensor:
        with self.explained(lane):
            self.wait(work, vector)
        return vector

    def wait(self, work: Any, x: Tensor) -> None:
        """Wait for a collective that moves ``x``: its stream if that is on a GPU."""
        work.wait() if x.is_cuda else self._pulse.wait(work)

    def fail(self, error: BaseException) -> bool:
        """Tell the other ranks why this one does not go on.

        Returns True if all ranks have failed with the same error and may go on
        together. Else no exchange can begin any more: the others have ended.
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
        self.spares.end_step()

    def traffic(self) -> dict[str, Counts]:
        """Calls and bytes of this rank by exchange, of a step and in total.

        ``step`` is the last step closed by ``end_step``, or all so far. Bytes are
        payload as defined in `natgrad.plan.exchange`, so they equal the plan's
        ``volumes()`` times the size of an element; contributions that came late, to
        buckets already gone, add to them. ``calls`` are collectives, ``padding`` the
        bytes that equal parts add to them. ``agree`` and ``control`` are the small sums
        that all ranks take part in.
        """
        return self.moved.report()

    # -- what a flight needs ----------------------------------------------------------

    def call(self, message: Message, buffer: Tensor) -> Any:
        """Start a collective of the plan."""
        self._note(message)
        return self._links.call(_lane(message), message, buffer, self.rank)

    def swap(self, message: Message, given: Tensor, got: Tensor) -> Any:
        """Start an all-to-all of the plan."""
        self._note(message)
        return self._links.swap(_lane(message), message, given, got, self.rank)

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """The stream on which exchanges run on a GPU."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

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


def _departures(
    plan: Plan,
    options: CommOptions,
    nodes: tuple[Ranks, ...],
    way: Way,
    legs: tuple[Leg, ...],
    dtype: torch.dtype,
) -> tuple[list[Departure], list[Departure]]:
    return departures(plan, legs, options.wiring(dtype, nodes, way))


def _lane(message: Message) -> str:
    """A group for the CPU, one for reductions, one for all else."""
    if message.exchange == CONTROL:
        return CONTROL
    return REDUCE if message.exchange.startswith("reduce") else SHARE
