"""What becomes of weights besides the update: weight decay and rescaling."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from natgrad.layers import Block
from natgrad.math import foreach
from natgrad.math.precondition import rescale_factor
from natgrad.math.shards import local
from natgrad.requiring import require_choice
from natgrad.rules.references import References

Change = tuple[Tensor, Tensor]
"""A parameter, and by how much it was changed."""


class Decay:
    """How weight decay enters, and what is done to weights after the update."""

    coupled: bool = True
    """Whether the decay is part of the gradient; else each step shrinks the weight."""

    def decayed(self, block: Block) -> Sequence[Tensor]:
        """The parameters of a block that a decay which is not coupled shrinks."""
        return ()

    def rescaled(self, blocks: Sequence[Block], references: References) -> list[Change]:
        """Change weights after the update; returns which, and by how much."""
        return []


@dataclass(frozen=True, kw_only=True)
class Coupled(Decay):
    """``weight_decay`` times the weight is added to the gradient, before the rule."""


Decayed = Literal["matrices", "all"]


@dataclass(frozen=True, kw_only=True)
class Decoupled(Decay):
    """A step first takes lr times ``weight_decay`` of the weight away.

    Attributes:
        of: ``"matrices"`` with a rule of their own: biases, norms and parameters that
            follow a fallback keep theirs, and so do embeddings, of which rows that are
            seldom read would fade. ``"all"`` parameters of the group, as AdamW does.
    """

    coupled = False

    of: Decayed = "matrices"

    def __post_init__(self) -> None:
        require_choice("of", self.of, get_args(Decayed))

    def decayed(self, block: Block) -> Sequence[Tensor]:
        """All of them, or the weight of a matrix."""
        if self.of == "all":
            return block.parameters
        is_matrix = block.is_factored and not block.is_table
        return block.parameters[:1] if is_matrix else ()


@dataclass(frozen=True, kw_only=True)
class Rescaled(Decay):
    """As `Coupled`, and weights are kept at norm sqrt(2 d_out) (SP-NGD, eq. 24)."""

    def rescaled(self, blocks: Sequence[Block], references: References) -> list[Change]:
        """Bring the weights of linear and convolution layers to that norm."""
        blocks = [b for b in blocks if b.kind is not None and b.kind.rescaled]
        weights = [local(b.parameters[0]).detach() for b in blocks]
        if not weights:
            return []
        before = [w.clone() for w in weights]
        norms = references.whole(torch.stack(foreach.norms(weights))).unbind()
        factors = [
            rescale_factor(norm, b.spec.stack * b.spec.rows)
            for b, norm in zip(blocks, norms, strict=True)
        ]
        foreach.multiply_(weights, factors)
        changes = foreach.subtract(weights, before)
        return list(zip([b.parameters[0] for b in blocks], changes, strict=True))


@dataclass(frozen=True, kw_only=True)
class FixedNorm(Decay):
    """After each step a matrix gets the norm back that it began with (Hyperball).

    So there is no other weight decay. With ``LayerTrust(memory=None)`` and
    ``Orthogonal(sides="none")`` this is MuonH: ``w - lr |w| U / |U|``, brought back to
    ``|w|``. A bias that is part of the matrix counts and moves with it.
    """

    coupled = False

    def rescaled(self, blocks: Sequence[Block], references: References) -> list[Change]:
        """Multiply weights and biases by ``|w0| / |w|``."""
        known = [b for b in blocks if b.name in references.states]
        if not known:
            return []
        starts = [references.states[b.name].start for b in known]
        now = references.weight_norms(known, starts[0])
        ratios = torch.where(now > 0, torch.stack(starts) / now, 1.0).unbind()
        params = [local(p).detach() for b in known for p in b.parameters]
        factors = [r for r, b in zip(ratios, known, strict=True) for _ in b.parameters]
        before = [p.clone() for p in params]
        foreach.multiply_(params, factors)
        named = [p for b in known for p in b.parameters]
        return list(zip(named, foreach.subtract(params, before), strict=True))
