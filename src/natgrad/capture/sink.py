"""What a step asks of capture, and who is told of sums before the step."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from natgrad.layers import Block
from natgrad.math.packing import unflatten

if TYPE_CHECKING:
    from natgrad.capture.forwards import Captured

INPUTS = "A"
"""The kind of statistic that a forward knows."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Sent:
    """A statistic of inputs that has left in the forward, and is yet to count.

    ``turn`` is the step that it left in; ``packed`` and ``trace`` what it was.
    """

    turn: object
    packed: Tensor
    trace: Tensor

    def whole(self, block: Block) -> Tensor:
        """What was sent of a block, as its statistic is kept."""
        spec = next(s for s in block.spec.statistics if s.kind == INPUTS)
        flat = self.packed.clone()
        return unflatten(flat, spec.stack, spec.size, spec.diagonal)


class Sink(Protocol):
    """Takes sums before the step, to send them while forward and backward still run."""

    def made(self, name: str, x: Tensor) -> Sent | None:
        """A statistic of inputs, in the forward. None: it waits for its backward."""
        ...

    def left_out(self, name: str) -> None:
        """A statistic of inputs, in the forward, that another rank makes."""
        ...

    def counted(self, name: str, sent: Sent) -> None:
        """The backward of what was made, and sent, has come."""
        ...

    def forward_ended(self) -> None:
        """A forward of the model is over."""
        ...

    def grown(self, name: str, captured: "Captured") -> None:
        """A statistic's sum has grown; it may be taken out, and sent.

        Or was counted only, because another rank makes it.
        """
        ...

    def abandon(self) -> None:
        """The captures of this step are dropped, because it was skipped."""
        ...


@dataclass(frozen=True, kw_only=True)
class Armed:
    """What the forwards and backwards of the coming step are to give.

    Attributes:
        step: its number, from which subsampling draws.
        due: names of the statistics to estimate, in one order on all ranks.
        bases: the eigenbases, right and left, that an S is to be estimated in, by block
            name; a block without has none yet.
        sink: who is told of sums that grow; None if nothing leaves before the step.
    """

    step: int = 0
    due: tuple[str, ...] = ()
    bases: Mapping[str, tuple[Tensor, Tensor]] = field(
        default_factory=dict[str, tuple[Tensor, Tensor]]
    )
    sink: Sink | None = None
