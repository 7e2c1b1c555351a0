"""From gradients to updates: the rules that `natgrad.config.Curvature` names."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from natgrad.layers import Block
from natgrad.math.inverse import Inverse
from natgrad.math.polar import polars
from natgrad.math.precondition import (
    apply_eigen,
    descending,
    multiply_left,
    multiply_right,
)
from natgrad.math.rules import (
    adaptive_scale,
    corrected_scale,
    into_basis,
    out_of_basis,
    whiten,
    whiten_back,
)
from natgrad.moments import Bases, Moments, moved
from natgrad.registration import shape_of
from natgrad.statistics import Statistics

# Of parameters without a block, relative to the root mean square of their gradients.
REST_DAMPING = 1e-3


class Preconditioner:
    """Applies the chosen rule to the blocks that this rank works on.

    ``directions`` are what is scaled: gradients, or running averages of them.
    ``gradients`` are this step's, from which second moments are learned.
    """

    def __init__(self, statistics: Statistics) -> None:
        self.statistics = statistics
        self.config = statistics.config
        self.moments = Moments()

    def __call__(
        self,
        blocks: Sequence[Block],
        directions: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        """Updates ``(s, m, n)`` by block name."""
        updates: dict[str, Tensor] = {}
        if self.config.scale == "orthogonal":
            layers = [b for b in blocks if b.is_factored]
            shares = {b.name: float(b.spec.elements) for b in layers}
            with self.statistics.meter("precondition", shares):
                updates = self._orthogonal(layers, directions)
        for block in blocks:
            name = block.name
            if name not in updates:
                with self.statistics.meter("precondition", name):
                    v, g = directions[name], gradients[name]
                    updates[name] = self._scaled(block, v, g)
        return {
            name: u if u is directions[name] else descending(directions[name], u)
            for name, u in updates.items()
        }

    def bases(self) -> dict[str, Bases]:
        """The eigenbases in which blocks have their second moments, by block name."""
        if self.config.scale not in ("adaptive", "corrected"):
            return {}
        found: dict[str, Bases] = {}
        for block in self.statistics.block.values():
            if block.is_factored:
                found[block.name] = self._bases(block)
        return found

    def bases_for_capture(self, block: Block) -> Bases | None:
        """Those that an S is to be estimated in; None before the first refresh."""
        right, left, known = self._inverses(block)
        return (right[0], left[0]) if known and right and left else None

    def is_adaptive(self, block: Block) -> bool:
        """Whether a block's rule has a second moment."""
        if block.kind is None:
            return self.config.rest == "adaptive"
        return block.is_factored and self.config.scale == "adaptive"

    def _scaled(self, block: Block, direction: Tensor, gradient: Tensor) -> Tensor:
        if block.kind is None:
            return self._rest(block, direction, gradient)
        if self.is_adaptive(block):
            return self._adaptive(block, direction, gradient)
        if block.is_factored and self.config.scale == "corrected":
            return self._corrected(block, direction)
        return self._kronecker(block, direction)

    def _rest(self, block: Block, direction: Tensor, gradient: Tensor) -> Tensor:
        if self.config.rest == "plain":
            return direction
        square = self.moments.update(block.name, gradient, self.config.beta2)
        return adaptive_scale(direction, square, REST_DAMPING)

    def _kronecker(self, block: Block, v: Tensor) -> Tensor:
        """``(F + damping I)^-1 V``; the plain gradient while an inverse is missing."""
        right, left, known = self._inverses(block)
        if not known:
            return v
        if block.is_factored and self.config.form == "eigen":
            assert right is not None
            assert left is not None
            return apply_eigen(v, right, left, self.statistics.damping_of(block))
        if right is not None:
            v = multiply_right(v, right[0])
        return v if left is None else multiply_left(v, left[0])

    def _adaptive(self, block: Block, direction: Tensor, gradient: Tensor) -> Tensor:
        """Adam's rule in the eigenbases of the factors."""
        bases = self._bases(block)
        rotated = into_basis(gradient, *bases)
        square = self.moments.update(block.name, rotated, self.config.beta2)
        if direction is not gradient:
            rotated = into_basis(direction, *bases)
        damping = self.statistics.damping_of(block)
        return out_of_basis(adaptive_scale(rotated, square, damping), *bases)

    def _corrected(self, block: Block, v: Tensor) -> Tensor:
        """EKFAC; K-FAC's own scale until the second moment is known."""
        state = self.statistics.states[f"{block.name}/S"]
        right, left, known = self._inverses(block)
        if not known or right is None or left is None:
            return v
        curvature = left[1].unsqueeze(2) * right[1].unsqueeze(1)
        if state.inverse is not None:
            curvature = state.inverse[0].reshape(v.shape)
        damping = self.statistics.damping_of(block)
        if self.config.damping_style == "relative":
            damping *= float(curvature.mean())
        bases = right[0], left[0]
        scaled = corrected_scale(into_basis(v, *bases), curvature, damping)
        return out_of_basis(scaled, *bases)

    def follow(self, old: Mapping[str, Bases]) -> None:
        """Move second moments from the bases before a refresh to those after it.

        See Note [Second moments and bases].
        """
        new = self.bases()
        self.moments.follow(old, new)
        for state in self.statistics.states.values():
            block = self.statistics.block[state.spec.block]
            if state.spec.kind == "S" and block.name in old:
                shape = shape_of(block)
                pair = old[block.name], new[block.name]
                state.average = moved(state.average, shape, *pair)
                state.history = [moved(x, shape, *pair) for x in state.history]
                if state.inverse is not None:
                    state.inverse = (moved(state.inverse[0], shape, *pair),)

    def _orthogonal(
        self, blocks: Sequence[Block], directions: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Polar factors of the whitened gradients, equal shapes at once."""
        roots: list[tuple[Tensor | None, Tensor | None]] = []
        whitened: list[Tensor] = []
        for block in blocks:
            v = directions[block.name]
            if self.config.whitening == "full":
                v = self._kronecker(block, v)
            roots.append(self._roots(block))
            whitened.append(whiten(v, *roots[-1]))
        results = zip(blocks, polars(whitened), roots, strict=True)
        return {b.name: whiten_back(p, *root) for b, p, root in results}

    def _roots(self, block: Block) -> tuple[Tensor | None, Tensor | None]:
        """The roots on the right and left; None for the identity."""
        if self.config.form != "root":
            return None, None
        right, left, _ = self._inverses(block)
        return (right[0] if right else None), (left[0] if left else None)

    def _inverses(self, block: Block) -> tuple[Inverse | None, Inverse | None, bool]:
        """What is kept of the right and left factor, and whether none is missing."""
        by_side: dict[str, Inverse | None] = {
            spec.side: self.statistics.states[spec.name].inverse
            for spec in block.spec.statistics
            if spec.side != "both"
        }
        known = all(x is not None for x in by_side.values())
        return by_side.get("right"), by_side.get("left"), known

    def _bases(self, block: Block) -> Bases:
        """Eigenvectors of the right and left factor; empty for the identity."""
        right, left, _ = self._inverses(block)
        empty = self.statistics.like
        return (right[0] if right else empty), (left[0] if left else empty)
