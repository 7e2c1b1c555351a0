"""Ranks that see the same examples, and how they share the work on statistics.

Note [Peers]
Under tensor parallelism several ranks, *peers*, compute one forward together. What a
layer is given, and the gradient at its output, may be whole on each of them, or cut by
features or positions. Each factor is of the whole: what is cut is gathered, which is
exact, and one of the peers, another for each block in turn, makes the moments. So
replicated inputs are counted once. All peers count the terms of the loss, so what is
divided by them is multiplied by the number of peers.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Peers:
    """How many there are, and this rank's number among them."""

    count: int = 1
    number: int = 0

    def has_turn(self, block: int) -> bool:
        """Whether this one makes the moments of a block, by the block's number."""
        return block % self.count == self.number


ALONE = Peers()
