"""Exchanges under way: buckets that fill, leave in one order, and land.

Note [Order of buckets]
    All ranks start all collectives in one order, which is the plan's (Note [One order]
    in `natgrad.plan.sequence`). Exchanges that are open together, as those of a
    backward are, have one queue. The head of it starts when this rank has put all of
    its items (or, of a later stage, when the stage before is complete); ``send`` starts
    the rest.

Note [Same names]
    gloo ends the process when sizes differ, so the names of reductions are compared
    before the first bucket leaves, by a small all-reduce that runs since they began. A
    share has no time to hide it in: its names must follow from what ranks agreed on.

Note [Late contributions]
    A second backward in one step puts items whose bucket may have left. What comes late
    is summed aside. ``send`` asks all ranks (one small all-reduce) whether anything is
    late anywhere; if so they agree on the buckets and send those again. So ranks may
    put different items, a different number of times, and never wait for a bucket that
    another rank does not send. By the same question they learn whether some rank has
    put what does not count any more: the flight is then void on all of them.

Note [Streams]
    On a GPU a wait blocks the stream, not the host. So the stages of a bucket are
    issued on a side stream that the current one waits for when it lands. All exchanges
    share one: they are issued in one order on all ranks. On a CPU a wait blocks, so a
    later stage starts when a put or ``send`` finds the earlier one complete.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from natgrad.distributed.loads import Load, Terms, make_load
from natgrad.plan.sequence import Departure, Leg, in_order

if TYPE_CHECKING:
    from natgrad.distributed.communicator import Communicator


class Walk:
    """Exchanges that are open together. See Note [Order of buckets].

    Attributes:
        flights: one a leg.
        sent: whether everything has left.
    """

    def __init__(
        self,
        comm: Communicator,
        legs: Sequence[Leg],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._comm = comm
        self.sent = False
        first, second = comm.departures(tuple(legs), dtype)
        self.flights = [Flight(comm, self, leg, dtype, device) for leg in legs]
        loads = [self.flights[d.leg].add(d) for d in first]
        for departure in second:
            self.flights[departure.leg].follow(departure)
        self._queue = deque(
            (load, stage)
            for i, stage in in_order(first)
            if (load := loads[i]) is not None
        )
        self._reducing = [f for f in self.flights if f.reduces]
        self._marks = self._ask(legs, dtype)

    def _ask(
        self, legs: Sequence[Leg], dtype: torch.dtype
    ) -> Callable[[], list[int]] | None:
        """See Note [Same names]."""
        if legs and not self._reducing:
            return None
        text = repr([(leg.exchange, leg.names, dtype) for leg in legs])
        mark = zlib.crc32(text.encode())
        return self._comm.largest([mark, -mark])

    def require_same_names(self) -> None:
        """Raise on all ranks if they began with different ones."""
        most, least = self._marks() if self._marks else (0, 0)
        self._marks = None
        if most != -least:
            names = " and ".join(dict.fromkeys(f.exchange for f in self.flights))
            raise ValueError(f"Ranks began {names} with different names or dtypes.")

    def advance(self) -> None:
        """Start what is next as long as that waits for nothing."""
        while self._queue:
            load, stage = self._queue[0]
            if not ((load.full or load.closed) if stage == 0 else load.idle):
                return
            self._start()

    def _start(self) -> None:
        self.require_same_names()
        load, stage = self._queue.popleft()
        load.start(stage)

    def send(self) -> None:
        """Start all that is left, and agree on what is late or void."""
        self.require_same_names()
        for flight in self.flights:
            flight.note_missing()
        self.sent = True
        while self._queue:
            self._start()
        if self._reducing:
            self._agree_on_late()

    def _agree_on_late(self) -> None:
        """See Note [Late contributions]."""
        known = [n for f in self._reducing for n in (len(f.late), int(f.is_void))]
        most = self._comm.largest(known)()
        for flight, late, void in zip(
            self._reducing, most[::2], most[1::2], strict=True
        ):
            flight.is_void, flight.is_late = bool(void), bool(late and not void)
        again = [f for f in self._reducing if f.is_late]
        flags = [flag for f in again for flag in f.late_loads()]
        if not flags:
            return
        agreed = self._comm.largest(flags)()
        ends = [0]
        for flight in again:
            ends.append(ends[-1] + len(flight.late_loads()))
        for flight, (a, b) in zip(again, pairwise(ends), strict=True):
            flight.repeat(agreed[a:b])


class Flight:
    """One exchange under way, made by `Communicator.begin`: put items, then finish.

    Attributes:
        exchange: its name.
        is_void: after the walk was sent, whether some rank has voided it.
    """

    def __init__(
        self,
        comm: Communicator,
        walk: Walk,
        leg: Leg,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.exchange = leg.exchange
        self._comm, self._walk = comm, walk
        self._plan = comm.plan.exchanges[leg.exchange]
        self._names = dict.fromkeys(leg.names)
        wire = comm.options.wire_dtype(leg.exchange, dtype)
        self._terms = Terms(
            comm=comm, exchange=leg.exchange, dtype=dtype, wire=wire, device=device
        )
        self._loads: list[Load] = []
        self._where: dict[str, Load] = {}
        self._second: list[Departure] = []
        self._again: list[Departure] = []
        self._departures: list[Departure] = []
        self._own: dict[str, Tensor] = {}
        self._missing: list[str] = []
        self.late: dict[str, Tensor] = {}
        self.is_void = self.is_late = self.finished = False

    @property
    def reduces(self) -> bool:
        """Whether sums move, and any at all."""
        return self._plan.reduces and bool(self._plan.items)

    def add(self, departure: Departure) -> Load | None:
        """Take a bucket along, if this rank has a part in it."""
        if self._comm.rank not in departure.bucket.ranks:
            return None
        load = make_load(departure, self._terms)
        self._loads.append(load)
        self._departures.append(departure)
        self._where |= dict.fromkeys(load.mine, load)
        return load

    def follow(self, departure: Departure) -> None:
        """A bucket of what the others have brought."""
        self._second.append(departure)

    def put(self, name: str, flat: Tensor) -> None:
        """Hand over this rank's part of an item: a 1-D tensor of the planned size.

        In a reduction a second put adds to the first. In a share only the sources'
        puts count. Buckets that are full leave as soon as it is their turn.
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
            wire, dtype = self._terms.wire, self._terms.dtype
            if wire != dtype and self._comm.rank in sources:
                self._own[name] = flat.to(wire).to(dtype)
        if load is None:
            return
        if load.left:
            late = self.late.get(name)
            flat = flat.to(self._terms.dtype)
            self.late[name] = flat.clone() if late is None else late.add_(flat)
        else:
            load.put(name, flat)
        if self._comm.options.overlap:
            self._walk.advance()

    def leave_out(self, name: str) -> None:
        """Say that this rank puts nothing of an item of this reduction: zeros.

        Its bucket then leaves as if it had put them. See Note [One order].
        """
        load = self._where.get(name)
        if load is not None and not load.left:
            load.absent.add(name)
            if self._comm.options.overlap:
                self._walk.advance()

    def void(self) -> None:
        """Say, before all is sent, that what was put in this reduction must not count.

        After that `is_void` is True on every rank, and sums mean nothing.
        """
        self.is_void = True

    def close(self) -> None:
        """Let all buckets leave, full or not; what is put from now on is late."""
        for load in self._loads:
            load.closed = True
        self._walk.advance()

    def late_loads(self) -> list[int]:
        """For each bucket whether something of it is late here."""
        return [int(any(n in self.late for n in x.mine)) for x in self._loads]

    def repeat(self, flags: Sequence[int]) -> None:
        """Send these buckets again, with what is late, when the others land."""
        pairs = zip(self._departures, flags, strict=True)
        self._again = [departure for departure, flag in pairs if flag]

    def finish(self) -> dict[str, Tensor]:
        """Send what is left, wait, and return what this rank receives, by name.

        In a reduction an item that a rank did not put counts as zeros. In a share sent
        in half precision a source gets its own items too, rounded as the others see
        them. The tensors are the caller's to keep and to change. Of exchanges that
        began together all are sent.
        """
        if not self._walk.sent:
            self._walk.send()
        elif self.finished:
            self._require_open()
        self.finished = True
        results = {k: v for load in self._loads for k, v in load.land().items()}
        for departure in self._again:
            for name, more in self._fly(departure, self.late).items():
                results[name] = results[name] + more
        for departure in self._second:
            if self._comm.rank in departure.bucket.ranks:
                results |= self._fly(departure, results)
        if self._missing and not self._plan.reduces:
            # Only now, so that no other rank waits for what does not come.
            raise ValueError(f"{self._missing} were not put. Must be, by their source.")
        results = self._own | results
        # flight and walk refer to each other: buffers would stay until Python looks
        for held in (self._loads, self._where, self._own, self.late):
            held.clear()
        return results

    def note_missing(self) -> None:
        """Remember what was not put."""
        self._missing = [n for n in self._where if n not in self._where[n].filled]

    def _require_open(self) -> None:
        if self.finished or self._walk.sent:
            self._comm.require_company(self._plan.name)
            raise ValueError(f"This {self._plan.name} has finished. Begin a new one.")

    def _fly(
        self, departure: Departure, values: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        load = make_load(departure, self._terms)
        for name in load.mine:
            if name in values:
                load.put(name, values[name])
        return load.fly()
