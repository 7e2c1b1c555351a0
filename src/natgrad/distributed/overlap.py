"""What leaves a rank while its forward and backward still run.

Note [Overlap]
An `Outbox` opens the exchanges of a step before its forward and puts an item on its
flight as soon as the item is complete; the communicator sends full buckets in the
plan's order, so that communication runs under the rest of the pass. A statistic is
complete when its layer has run as often as in the last step that estimated it; a
gradient, when autograd has accumulated it as often as in the last step. If more of a
statistic comes after all (a second micro-batch), the rest is put on the same flight
later: sums may arrive in parts. Gradients are sent again, as they may have been
replaced.

Note [Inputs leave in the forward]
A statistic of inputs (A) is known in the forward, so it leaves there, on a flight of
its own, and is exchanged under the backward (SP-NGD, Stage 2). It counts only once its
backward has come, and what was sent cannot be taken back: this rank keeps, packed, what
does count. If a backward has not come by the step, on whatever rank, the flight is void
on all of them, and they send again what they kept. A model that does so once may do it
in every step, so for the next `HOLD` steps inputs wait for their backward. What a
forward recomputes inside of a backward waits in any case. When the model's forward ends
as often as in the last step (not in the first of a process), all buckets of inputs
leave, also those of layers that did not run.

Note [Peers start together]
A model that ranks share has collectives of torch's own, on other communicators, and
NCCL can wait forever if ranks start those and ours in different orders. Ranks that
share a model run the same layers in the same order. So all of ours start at places of
that program and at no other time: in the hook of a layer, at the end of the forward, in
the step. A rank that makes no part of a statistic, as a peer does (Note [Peers] in
`natgrad.capture.peers`), says so in the hook in which it would: what it does not send
counts as there. Ranks under DDP may run different layers; on NCCL they are safe without
overlap, when all of ours start in the step.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from natgrad.capture.forwards import Captured, Sums
from natgrad.capture.sink import Sent
from natgrad.distributed.communicator import Communicator, Flight
from natgrad.distributed.transfer import Walk
from natgrad.layers import Block
from natgrad.math.packing import flatten, trace
from natgrad.plan.sequence import Leg, reductions

HOLD = 100
"""Steps in which inputs wait for their backward, after one that never came."""


class Outbox:
    """Statistics, and the gradients of ``blocks``, if DDP does not send them.

    Gradients leave ``early``, under the backward, or in the step.
    """

    def __init__(
        self,
        comm: Communicator,
        like: Tensor,
        blocks: Sequence[Block] | None,
        *,
        early: bool = True,
    ) -> None:
        overlap = comm.options.overlap
        self._comm, self._like = comm, like
        self._sums = StatisticsOutbox(comm, like, overlap)
        self.gradients: GradientOutbox | None = None
        if blocks is not None:
            self.gradients = GradientOutbox(comm, like, blocks, overlap and early)
        self._walk: Walk | None = None
        self._opened: tuple[Sequence[str], Mapping[str, int]] = (), {}

    def open(self, names: Sequence[str], expected: Mapping[str, int]) -> None:
        """Begin a step that estimates these statistics.

        ``expected`` is how often each grew when it was last estimated.
        """
        self._opened = names, expected
        legs = reductions(self._comm.plan, names, early=self._sums.early)
        like = self._like
        self._walk = self._comm.begin_together(legs, like.dtype, like.device)
        pairs = list(zip(legs, self._walk.flights, strict=True))
        sums = [(x, f) for x, f in pairs if x.exchange == "reduce_statistics"]
        self._sums.open(names, expected, sums)
        if self.gradients is not None:
            rest = [f for x, f in pairs if x.exchange == "reduce_gradients"]
            self.gradients.open(rest[0] if rest else None)

    def made(self, name: str, x: Tensor) -> Sent | None:
        """A statistic of inputs, in the forward; None if it is to wait."""
        return self._sums.made(name, x)

    def left_out(self, name: str) -> None:
        """A statistic of inputs, in the forward, that a peer makes."""
        self._sums.left_out(name)

    def counted(self, name: str, sent: Sent) -> None:
        """The backward of what was made has come."""
        self._sums.counted(name, sent)

    def forward_ended(self) -> None:
        """The model's forward is over."""
        self._sums.forward_ended()

    def grown(self, name: str, captured: Captured) -> None:
        """A statistic's sum has grown; send it if that was the last part."""
        self._sums.grown(name, captured)

    def finish(self, captured: Captured) -> Sums:
        """Send all that is left, gradients too, and wait for the sums of statistics."""
        self._sums.send(captured)
        if self.gradients is not None:
            self.gradients.send()
        assert self._walk is not None
        self._walk.send()
        return self._sums.finish()

    def abandon(self) -> None:
        """Throw away what was sent of a step that never came to its end."""
        self.settle()
        self.open(*self._opened)

    def settle(self) -> None:
        """Let what was begun on all ranks come to its end; nothing of it is kept."""
        for flight in self._walk.flights if self._walk else ():
            if not flight.finished:
                flight.finish()
        if self.gradients is not None:
            self.gradients.settle()

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for handle in self.gradients.handles if self.gradients else ():
            handle.remove()


class StatisticsOutbox:
    """Sends the sums of due statistics to their owners.

    Attributes:
        early: whether inputs leave in the forward of the coming step.
    """

    def __init__(self, comm: Communicator, like: Tensor, overlap: bool) -> None:
        self._comm, self._like, self._overlap = comm, like, overlap
        self._held, self._forwards = 0, 0
        self._usual: int | None = None  # forwards of the last step, if there was one
        self.open((), {}, ())

    @property
    def early(self) -> bool:
        return not self._held

    def open(
        self,
        names: Sequence[str],
        expected: Mapping[str, int],
        flights: Sequence[tuple[Leg, Flight]],
    ) -> None:
        """Begin a step that estimates these statistics."""
        self._names, self._expected = list(names), expected
        self._flights = {n: flight for leg, flight in flights for n in leg.names}
        self._inputs: Flight | None = None
        for leg, flight in flights:
            if leg.events[0][0] == "forward":
                self._inputs = flight
        self._traces: dict[str, Tensor] = {}
        # of inputs: what counts, what is made but not put, and how many are which
        self._kept: dict[str, Tensor] = {}
        self._waiting: dict[str, Tensor] = {}
        self._made, self._counted = Counter[str](), Counter[str]()
        self._left_out = Counter[str]()
        self._forwards = 0
        self._turn = object()

    def made(self, name: str, x: Tensor) -> Sent | None:
        """See Note [Inputs leave in the forward]."""
        if self._inputs is None or not self._overlap:
            return None
        sent = Sent(turn=self._turn, packed=flatten(x), trace=trace(x))
        # a copy where more is to be added: this one may count when others do not
        _grow(self._waiting, name, sent.packed)
        self._made[name] += 1
        if self._made[name] >= self._expected.get(name, 1):
            self._inputs.put(name, self._waiting.pop(name))
        return sent

    def left_out(self, name: str) -> None:
        """See Note [Peers start together]."""
        self._left_out[name] += 1
        complete = self._left_out[name] >= self._expected.get(name, 1)
        if self._inputs is not None and self._overlap and complete:
            self._inputs.leave_out(name)

    def counted(self, name: str, sent: Sent) -> None:
        """See Note [Inputs leave in the forward]."""
        if sent.turn is not self._turn:  # made for a step that was abandoned
            if name in self._flights:
                self._put(name, sent.packed, sent.trace)
            return
        self._counted[name] += 1
        _grow(self._kept, name, sent.packed)
        _grow(self._traces, name, sent.trace)

    def forward_ended(self) -> None:
        """See Note [Inputs leave in the forward]."""
        self._forwards += 1
        # In a first step nobody knows how many come. A part of a sum that leaves alone
        # is rounded otherwise, and a run that is resumed would differ in the last bit.
        known = self._usual is not None and self._forwards >= self._usual
        if self._inputs is not None and self._overlap and known:
            self._put_waiting()
            self._inputs.close()

    def grown(self, name: str, captured: Captured) -> None:
        """A statistic's sum has grown; send it if that was the last part."""
        complete = captured.calls[name] >= self._expected.get(name, 1)
        if not (self._overlap and complete and name in self._flights):
            return
        if name in captured.sums:
            self._take(name, captured)
        else:
            self._flights[name].leave_out(name)

    def send(self, captured: Captured) -> None:
        """Put what is left; what was made and does not count voids its flight."""
        for name in self._names:
            if name in captured.sums:
                self._take(name, captured)
        self._put_waiting()
        if self._inputs is not None and self._made != self._counted:
            self._inputs.void()
        self._usual = max(1, self._forwards)

    def finish(self) -> Sums:
        """The packed sums of owned statistics."""
        # in one order on all ranks, whatever ran here and when it was sent
        zero = self._like.new_zeros(())
        traces = {name: self._traces.get(name, zero) for name in self._names}
        packed: dict[str, Tensor] = {}
        for flight in dict.fromkeys(self._flights.values()):
            found = flight.finish()
            packed |= self._again(flight) if flight.is_void else found
        self._held = max(0, self._held - 1)
        if self._inputs is not None and self._inputs.is_void:
            self._held = HOLD
        return Sums(packed=packed, traces=traces)

    def _again(self, void: Flight) -> dict[str, Tensor]:
        """What of the inputs counts, sent in the place of what was."""
        names = [n for n in self._names if self._flights[n] is void]
        like = self._like
        flight = self._comm.begin(void.exchange, names, like.dtype, like.device)
        for name in names:
            if name in self._kept:
                flight.put(name, self._kept[name])
        return flight.finish()

    def _put_waiting(self) -> None:
        assert self._inputs is not None or not self._waiting
        for name in list(self._waiting):
            self._flights[name].put(name, self._waiting.pop(name))

    def _take(self, name: str, captured: Captured) -> None:
        x = captured.sums.pop(name)
        self._put(name, flatten(x), trace(x))

    def _put(self, name: str, flat: Tensor, part: Tensor) -> None:
        _grow(self._traces, name, part)
        flight = self._flights[name]
        if flight is self._inputs:
            _grow(self._kept, name, flat)
        flight.put(name, flat)


def _grow(sums: dict[str, Tensor], name: str, more: Tensor) -> None:
    """Add, without writing to what was given."""
    sums[name] = sums[name] + more if name in sums else more


class GradientOutbox:
    """Sends gradients to the ranks that work on them, block by block.

    What is sent early is only a guess that nothing will change: if the gradient is
    another one when the step comes (a further micro-batch, ``clip_grad_norm_``, a batch
    that was thrown away), all is void and sent again. So a sum is always that of the
    gradients at the step, and does not depend on what was sent before.
    """

    def __init__(
        self, comm: Communicator, like: Tensor, blocks: Sequence[Block], overlap: bool
    ) -> None:
        self._comm, self._like, self._blocks = comm, like, blocks
        self._sent: dict[str, list[tuple[Tensor | None, int]]] = {}
        self._arrived: dict[str, int] = {}
        self._expected: dict[str, int] = {}
        self._flight: Flight | None = None
        self.handles: list[torch.utils.hooks.RemovableHandle] = []
        if overlap:
            for block in blocks:
                for p in block.parameters:
                    handle = p.register_post_accumulate_grad_hook(self._hook(block))
                    self.handles.append(handle)

    def open(self, flight: Flight | None) -> None:
        """Begin a step; there is no flight where there are no blocks."""
        self._sent, self._arrived, self._flight = {}, {}, flight

    def send(self) -> None:
        """Put what is left; all is void here if what was put has changed since."""
        changed = any(not _same(seen, block) for block, seen in self._seen())
        if changed and self._flight is not None:
            self._flight.void()
        for block in self._blocks:
            if block.name not in self._sent:
                self._send(block)

    def finish(self) -> dict[str, Tensor]:
        """The flat sums of the blocks worked on here, after all was sent."""
        self._expected = self._arrived
        while (sums := self._finish()) is None:
            self._again()
        return sums

    def settle(self) -> None:
        """Let what was sent again come to its end."""
        if self._flight is not None and not self._flight.finished:
            self._flight.finish()

    def _finish(self) -> dict[str, Tensor] | None:
        """None if what some rank has sent was void; all is then to be sent again."""
        if self._flight is None:
            return {}
        sums = self._flight.finish()
        return None if self._flight.is_void else sums

    def _again(self) -> None:
        names = tuple(b.name for b in reversed(self._blocks))
        leg = Leg(exchange="reduce_gradients", names=names)
        like = self._like
        self.open(self._comm.begin_together([leg], like.dtype, like.device).flights[0])
        self.send()

    def _seen(self) -> list[tuple[Block, list[tuple[Tensor | None, int]]]]:
        return [(b, self._sent[b.name]) for b in self._blocks if b.name in self._sent]

    def _hook(self, block: Block) -> Callable[[Tensor], None]:
        def arrived(_: Tensor) -> None:
            count = self._arrived.get(block.name, 0) + 1
            self._arrived[block.name] = count
            # as often as in the last step: not before the last micro-batch
            if count == self._expected.get(block.name, len(block.parameters)):
                self._send(block)

        return arrived

    def _send(self, block: Block) -> None:
        assert self._flight is not None
        with torch.no_grad():
            gradient = block.gradient()
            if gradient is not None:
                self._sent[block.name] = _gradients(block)
                self._flight.put(block.name, gradient.flatten())


def _gradients(block: Block) -> list[tuple[Tensor | None, int]]:
    """A block's gradients, and numbers that change with every write to them."""
    grads = [p.grad for p in block.parameters]
    return [(g, -1 if g is None else g._version) for g in grads]


def _same(seen: list[tuple[Tensor | None, int]], block: Block) -> bool:
    """Whether the gradients are the very tensors that were seen, and as they were.

    A new tensor may have the version that the one before had.
    """
    pairs = zip(seen, _gradients(block), strict=True)
    return all(old is new and was == now for (old, was), (new, now) in pairs)
