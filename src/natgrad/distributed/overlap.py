"""What leaves a rank while its backward still runs.

Note [Overlap]
An `Outbox` opens the exchanges of a step before its backward and puts an item on its
flight as soon as the item is complete; the communicator sends full buckets in the
plan's order, so that communication runs under the rest of the backward. A statistic is
complete when its layer has run as often as in the last step that estimated it; a
gradient, when autograd has accumulated it as often as in the last step. If more of a
statistic comes after all (a second micro-batch), the rest is put on the same flight
later: sums may arrive in parts. Gradients are sent again, as they may have been
replaced.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from natgrad.capture.forwards import Captured, Sums
from natgrad.distributed.communicator import Communicator, Flight
from natgrad.distributed.transfer import Walk
from natgrad.layers import Block
from natgrad.math.packing import flatten, trace
from natgrad.plan.sequence import Leg, reductions


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
        legs = reductions(self._comm.plan, names)
        like = self._like
        self._walk = self._comm.begin_together(legs, like.dtype, like.device)
        flights = {flight.exchange: flight for flight in self._walk.flights}
        self._sums.open(names, expected, flights.get("reduce_statistics"))
        if self.gradients is not None:
            self.gradients.open(flights.get("reduce_gradients"))

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
    """Sends the sums of due statistics to their owners."""

    def __init__(self, comm: Communicator, like: Tensor, overlap: bool) -> None:
        self._comm, self._like, self._overlap = comm, like, overlap
        self._expected: Mapping[str, int] = {}
        self._flight: Flight | None = None
        self._names: list[str] = []
        self._traces: dict[str, Tensor] = {}

    def open(
        self, names: Sequence[str], expected: Mapping[str, int], flight: Flight | None
    ) -> None:
        """Begin a step that estimates these statistics."""
        self._names, self._expected, self._traces = list(names), expected, {}
        self._flight = flight

    def grown(self, name: str, captured: Captured) -> None:
        """A statistic's sum has grown; send it if that was the last part."""
        complete = captured.calls[name] >= self._expected.get(name, 1)
        if self._overlap and complete:
            self._put(name, captured.sums.pop(name))

    def send(self, captured: Captured) -> None:
        """Put what is left."""
        for name in self._names:
            if name in captured.sums:
                self._put(name, captured.sums.pop(name))

    def finish(self) -> Sums:
        """The packed sums of owned statistics."""
        # in one order on all ranks, whatever ran here and when it was sent
        zero = self._like.new_zeros(())
        traces = {name: self._traces.get(name, zero) for name in self._names}
        packed = self._flight.finish() if self._flight is not None else {}
        return Sums(packed=packed, traces=traces)

    def _put(self, name: str, x: Tensor) -> None:
        part, traces = trace(x), self._traces
        traces[name] = traces[name] + part if name in traces else part
        assert self._flight is not None
        self._flight.put(name, flatten(x))


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
