"""What one stage of a step hands on to the next, and what an optimizer adds to it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from natgrad.layers import Block


@dataclass(frozen=True, kw_only=True)
class Directions:
    """What the rules are given, ``(s, m, n)`` by block name.

    Attributes:
        directions: what they scale: gradients, or running averages of them.
        gradients: this step's gradients, as the optimizer wants them to count.
        noise: the part that is left in a direction of gradients that are only noise, by
            block name; 1 where none is given.
        newest: by block name, the weight of this step's gradient in a direction that is
            else the one of the step before (`natgrad.rules.motion.Average.newest`).
    """

    directions: dict[str, Tensor]
    gradients: dict[str, Tensor]
    noise: Mapping[str, float] = field(default_factory=dict[str, float])
    newest: Mapping[str, float | None] = field(default_factory=dict[str, float | None])


@dataclass(frozen=True)
class Updates:
    """What came of the rules, on this rank.

    Attributes:
        updates: ``(s, m, n)`` by block name, at their own lengths.
        clips: factors that updates are still to be multiplied by, where there are any;
            of a block that another rank works on too.
        present: names of the blocks that have a gradient on some rank and move.
        waiting: names of those that do not move yet: their rule has no factors so far.
    """

    updates: dict[str, Tensor]
    clips: dict[str, Tensor]
    present: frozenset[str]
    waiting: frozenset[str] = frozenset()


class Update(Protocol):
    """What `KFAC`, `SPNGD` and `Polar` add to `natgrad.engine.engine.Engine.run`."""

    def begin(self) -> Tensor | None:
        """Raise unless a step may begin.

        Returns what a scaler found, > 0 if gradients have overflown; None without one.
        See Note [Agreed overflow].
        """
        ...

    def skipped(self, overflow: Tensor | None) -> bool:
        """Learn that the step is skipped; returns whether a scaler has been told."""
        ...

    def local_gradients(self, block: Block) -> list[Tensor] | None:
        """Of a sharded model: what this rank has of a block's, as rules are to see it.

        None if there is no gradient.
        """
        ...

    def directions(self, gradients: dict[str, Tensor]) -> Directions:
        """From the mean gradients of the blocks that this rank works on."""
        ...

    def learning_rate(self, names: Iterable[str]) -> float:
        """The largest of these blocks', which the KL clip knows the step by."""
        ...

    def write(self, found: Updates) -> None:
        """Give the updates to all ranks and write them, to weights or gradients."""
        ...
