"""What becomes of weights besides the update: weight decay and rescaling."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from natgrad.layers import Block
from natgrad.math import foreach
from natgrad.math.precondition import rescale_factor


class Decay:
    """How weight decay enters, and what is done to weights after the update."""

    coupled: bool = True
    """Whether the decay is part of the gradient; else each step shrinks the weight."""

    def rescaled(self, blocks: Sequence[Block]) -> list[tuple[Block, Tensor]]:
        """Change weights after the update; returns the blocks with their changes."""
        return []


@dataclass(frozen=True, kw_only=True)
class Coupled(Decay):
    """``weight_decay`` times the weight is added to the gradient, before the rule."""


@dataclass(frozen=True, kw_only=True)
class Decoupled(Decay):
    """A step takes lr times ``weight_decay`` of the weight away.

    Biases, norms and parameters without a layer keep theirs; so do embeddings, of which
    rows that are seldom read would fade.
    """

    coupled = False


@dataclass(frozen=True, kw_only=True)
class Rescaled(Decay):
    """As `Coupled`, and weights are kept at norm sqrt(2 d_out) (SP-NGD, eq. 24)."""

    def rescaled(self, blocks: Sequence[Block]) -> list[tuple[Block, Tensor]]:
        """Bring the weights of linear and convolution layers to that norm."""
        blocks = [b for b in blocks if b.kind is not None and b.kind.rescaled]
        weights: list[Tensor] = [b.parameters[0].detach() for b in blocks]
        if not weights:
            return []
        before = [w.clone() for w in weights]
        factors = [
            rescale_factor(norm, b.spec.stack * b.spec.rows)
            for b, norm in zip(blocks, foreach.norms(weights), strict=True)
        ]
        foreach.multiply_(weights, factors)
        return list(zip(blocks, foreach.subtract(weights, before), strict=True))
