"""What leaves a rank while its backward still runs.

Note [Overlap]
An `Outbox` opens a flight of an exchange before the backward and puts an item on it as
soon as the item is complete; the communicator sends full buckets at once, so that
communication runs under the rest of the backward. A statistic is complete when its
layer has run as often as in the last step that estimated it; a gradient, when autograd
has accumulated it as often as in the last step. If more of a statistic comes after all
(a second micro-batch), the rest is put on the same flight later: sums may arrive in
parts. Gradients are sent again, as they may have been replaced.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from natgrad.capture.forwards import Captured, Sums
from natgrad.distributed.communicator import Communicator, Flight
from natgrad.layers import Block
from natgrad.math.packing import flatten, trace


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
        self._sums = StatisticsOutbox(comm, like, overlap)
        self.gradients: GradientOutbox | None = None
        if blocks is not None:
            self.gradients = GradientOutbox(comm, like, blocks, overlap and early)

    def open(self, names: Sequence[str], expected: Mapping[str, int]) -> None:
        """Begin a step that estimates these statistics.

        ``expected`` is how often each grew when it was last estimated.
        """
        self._sums.open(names, expected)
        if self.gradients is not None:
            self.gradients.open()

    def grown(self, name: str, captured: Captured) -> None:
        """A statistic's sum has grown; send it if that was the last part."""
        self._sums.grown(name, captured)

    def finish(self, captured: Captured) -> Sums:
        """Send what is left of the sums of statistics, and wait."""
        return self._sums.finish(captured)

    def abandon(self) -> None:
        """Throw away what was sent of a step that never came to its end."""
        self._sums.abandon()
        if self.gradients is not None:
            self.gradients.abandon()

    def settle(self) -> None:
        """Let what was begun on all ranks come to its end; nothing of it is kept."""
        for flight in (self._sums.flight, self.gradients and self.gradients.flight):
            if flight is not None and not flight.finished:
                flight.finish()

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for handle in self.gradients.handles if self.gradients else ():
            handle.remove()


class StatisticsOutbox:
    """Sends the sums of due statistics to their owners."""

    def __init__(self, comm: Communicator, like: Tensor, overlap: bool) -> None:
        self._comm, self._like, self._overlap = comm, like, overlap
        self._expected: Mapping[str, int] = {}
        self.flight: Flight | None = None
        self._names: list[str] = []
        self._traces: dict[str, Tensor] = {}

    def open(self, names: Sequence[str], expected: Mapping[str, int]) -> None:
        """Begin a step that estimates these statistics."""
        self._names, self._expected, self._traces = list(names), expected, {}
        self.flight = self._comm.begin(
            "reduce_statistics",
            # a backward reaches the last layers first
            reversed(self._names),
            self._like.dtype,
            self._like.device,
        )

    def grown(self, name: str, captured: Captured) -> None:
        """A statistic's sum has grown; send it if that was the last part."""
        complete = captured.calls[name] >= self._expected.get(name, 1)
        if self._overlap and complete:
            self._send(name, captured.sums.pop(name))

    def finish(self, captured: Captured) -> Sums:
        """Send what is left; returns the packed sums of owned statistics."""
        for name in self._names:
            if name in captured.sums:
                self._send(name, captured.sums.pop(name))
        assert self.flight is not None
        # in one order on all ranks, whatever ran here and when it was sent
        zero = self._like.new_zeros(())
        traces = {name: self._traces.get(name, zero) for name in self._names}
        return Sums(packed=self.flight.finish(), traces=traces)

    def abandon(self) -> None:
        """Throw away what was sent of a step that never came to its end."""
        if self.flight is not None:
            self.flight.finish()
        self.open(self._names, self._expected)

    def _send(self, name: str, x: Tensor) -> None:
        part, traces = trace(x), self._traces
        traces[name] = traces[name] + part if name in traces else part
        assert self.flight is not None
        self.flight.put(name, flatten(x))


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
        self.flight: Flight | None = None
        self.handles: list[torch.utils.hooks.RemovableHandle] = []
        if overlap:
            for block in blocks:
                for p in block.parameters:
                    handle = p.register_post_accumulate_grad_hook(self._hook(block))
                    self.handles.append(handle)

    def open(self) -> None:
        """Begin a step."""
        self._sent, self._arrived = {}, {}
        names = [b.name for b in reversed(self._blocks)]
        self.flight = self._comm.begin(
            "reduce_gradients", names, self._like.dtype, self._like.device
        )

    def finish(self) -> dict[str, Tensor]:
        """Send what is left; returns the flat sums of the blocks worked on here."""
        self._expected = self._arrived
        while (sums := self._finish()) is None:
            pass
        return sums

    def abandon(self) -> None:
        """Throw away what was sent of a step that never came to its end."""
        assert self.flight is not None
        self.flight.finish()
        self.open()

    def _finish(self) -> dict[str, Tensor] | None:
        """None if what some rank has sent was void; all is then to be sent again."""
        assert self.flight is not None
        if any(not _same(seen, block) for block, seen in self._seen()):
            self.flight.void()
        for block in self._blocks:
            if block.name not in self._sent:
                self._send(block)
        sums = self.flight.finish()
        if not self.flight.is_void:
            return sums
        self.open()
        return None

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
        assert self.flight is not None
        with torch.no_grad():
            gradient = block.gradient()
            if gradient is not None:
                self._sent[block.name] = _gradients(block)
                self.flight.put(block.name, gradient.flatten())


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
