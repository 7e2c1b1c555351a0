"""What a step's forwards and backwards have left so far."""

from dataclasses import dataclass, field
from types import EllipsisType
from typing import Literal

from torch import Tensor, nn

from natgrad.capture.forwards import Forward, MicroBatch, Token
from natgrad.layers import Block, Observed

Rows = slice | EllipsisType
Use = Literal["learned", "asked"]
"""A backward whose gradients are kept, or one that asks for them by name."""
POSITION_KINDS = ("A",)
"""Statistics averaged over positions; all others are averaged over examples."""


@dataclass(kw_only=True)
class Call:
    """One forward of one layer that waits for its backward.

    ``rows`` are the examples looked at, ``scale`` how many each stands for.
    """

    block: Block
    module: nn.Module
    want: tuple[str, ...]
    forward: Forward
    token: Token
    rows: Rows
    scale: float
    observed: Observed
    inputs: Tensor | None = None
    done: bool = False
    asked: bool = False

    def finish(self) -> None:
        """Let tensors go: the graph may outlive the backward (of a loss in a log)."""
        self.observed, self.inputs, self.done = Observed(), None, True


@dataclass(kw_only=True)
class Captured:
    """The raw sums of a step, by statistic name, with what they are divided by.

    ``step_terms`` are those of the whole step's loss, if a user has given them.
    """

    sums: dict[str, Tensor] = field(default_factory=lambda: {})
    calls: dict[str, int] = field(default_factory=lambda: {})
    positions: dict[str, int] = field(default_factory=lambda: {})
    batches: list[MicroBatch] = field(default_factory=lambda: [])
    step_terms: int | None = None

    @property
    def forwards(self) -> int:
        """How many micro-batches the loss was divided by."""
        seen = len(self.batches)
        return min(seen, 1) if self.step_terms else seen

    def count(self, name: str) -> int:
        """How many terms a statistic's mean is over, on this rank.

        For a statistic of examples these are the terms of the loss: all of them, also
        of a micro-batch in which the layer did not run and so has no gradient.
        """
        if name.rpartition("/")[2] in POSITION_KINDS:
            return self.positions.get(name, 0)
        if self.step_terms and self.batches:
            return self.step_terms
        return sum(batch.terms for batch in self.batches)

    def learn(self, batch: MicroBatch) -> None:
        """Count a micro-batch, once."""
        if not any(batch is known for known in self.batches):
            self.batches.append(batch)

    def add(self, name: str, moment: Tensor, positions: int) -> None:
        """Let a statistic's sum grow; the moment is kept and may be written to."""
        if name in self.sums:
            self.sums[name].add_(moment)
        else:
            self.sums[name] = moment
        if name.rpartition("/")[2] in POSITION_KINDS:
            self.positions[name] = self.positions.get(name, 0) + positions
        self.calls[name] = self.calls.get(name, 0) + 1
