"""From gradients to updates: the rules that `natgrad.config.Curvature` names."""

from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import Tensor

from natgrad.layers import Block
from natgrad.math.inverse import Inverse
from natgrad.math.polar import polar
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
from natgrad.stacks import Stacks
from natgrad.statistics import Statistics

# Of parameters without a block, relative to the root mean square of their gradients.
REST_DAMPING = 1e-3
# Blocks of equal shape are done by one product up to this many elements each; larger
# ones keep a device busy by themselves, and joining their gradients takes memory.
TOGETHER_UP_TO = 2**18


class Preconditioner:
    """Applies the chosen rule to the blocks that this rank works on.

    ``directions`` are what is scaled: gradients, or running averages of them.
    ``gradients`` are this step's, from which second moments are learned.
    """

    def __init__(self, statistics: Statistics) -> None:
        self.statistics = statistics
        self.config = statistics.config
        self.moments = Moments()
        self.stacks = Stacks()

    def __call__(
        self,
        blocks: Sequence[Block],
        directions: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        """Updates ``(s, m, n)`` by block name."""
        updates: dict[str, Tensor] = {}
        for group in self._groups(blocks):
            shares = {b.name: float(b.spec.elements) for b in group}
            with self.statistics.meter("precondition", shares):
                v = _joined([directions[b.name] for b in group])
                u = self._scaled(group, v, gradients)
                u = u if u is v else descending(v, u, len(group))
            parts = u.split(len(u) // len(group))
            updates.update(zip(shares, parts, strict=True))
        self.stacks.forget()
        return updates

    def _groups(self, blocks: Sequence[Block]) -> list[list[Block]]:
        """Blocks that one product can do together, most of them alone."""
        groups: dict[Hashable, list[Block]] = {}
        for block in blocks:
            groups.setdefault(self._alike(block), []).append(block)
        return list(groups.values())

    def _alike(self, block: Block) -> Hashable:
        """What the blocks of a group have in common."""
        if (
            self._rule(block) not in ("kronecker", "orthogonal")
            or block.spec.elements > TOGETHER_UP_TO
        ):
            return block.name
        sides = [
            (s.side, s.kind, s.diagonal, self.statistics.states[s.name].inverse is None)
            for s in block.spec.statistics
        ]
        # All workers of a block have the same group: rounding may depend on it.
        workers = tuple(self.statistics.plan.workers[block.name])
        return shape_of(block), tuple(sides), workers

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
        right, left, known = self._inverses([block])
        return (right[0], left[0]) if known and right and left else None

    def is_adaptive(self, block: Block) -> bool:
        """Whether a block's rule has a second moment."""
        if block.kind is None:
            return self.config.rest == "adaptive" and not block.is_foreign
        return block.is_factored and self.config.scale == "adaptive"

    def _rule(self, block: Block) -> str:
        if block.kind is None:
            return "rest"
        return self.config.scale if block.is_factored else "kronecker"

    def _scaled(
        self, group: list[Block], v: Tensor, gradients: Mapping[str, Tensor]
    ) -> Tensor:
        rule = self._rule(group[0])
        if rule == "orthogonal":
            return self._orthogonal(group, v)
        if rule == "kronecker":
            return self._kronecker(group, v)
        (block,) = group
        if rule == "corrected":
            return self._corrected(block, v)
        apply = self._adaptive if rule == "adaptive" else self._rest
        return apply(block, v, gradients[block.name])

    def _rest(self, block: Block, direction: Tensor, gradient: Tensor) -> Tensor:
        if self.config.rest == "plain":
            return direction
        square = self.moments.update(block.name, gradient, self.config.beta2)
        return adaptive_scale(direction, square, REST_DAMPING)

    def _kronecker(self, group: list[Block], v: Tensor) -> Tensor:
        """``(F + damping I)^-1 V``; the plain gradient while an inverse is missing."""
        right, left, known = self._inverses(group)
        if not known:
            return v
        if group[0].is_factored and self.config.form == "eigen":
            assert right is not None
            assert left is not None
            return apply_eigen(v, right, left, self.statistics.damping_of(group[0]))
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
        right, left, known = self._inverses([block])
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

    def _orthogonal(self, group: list[Block], v: Tensor) -> Tensor:
        """Polar factors of the whitened gradients."""
        if self.config.whitening == "full":
            v = self._kronecker(group, v)
        roots = self._roots(group)
        return whiten_back(polar(whiten(v, *roots)), *roots)

    def _roots(self, group: list[Block]) -> tuple[Tensor | None, Tensor | None]:
        """The roots on the right and left; None for the identity."""
        if self.config.form != "root":
            return None, None
        right, left, _ = self._inverses(group)
        return (right[0] if right else None), (left[0] if left else None)

    def _inverses(
        self, group: list[Block]
    ) -> tuple[Inverse | None, Inverse | None, bool]:
        """What is kept of the right and left factors, and whether none is missing."""
        by_side: dict[str, Inverse | None] = {}
        for i, spec in enumerate(group[0].spec.statistics):
            if spec.side != "both":
                names = [block.spec.statistics[i].name for block in group]
                states = [self.statistics.states[name] for name in names]
                by_side[spec.side] = self.stacks.of(states)
        known = all(x is not None for x in by_side.values())
        return by_side.get("right"), by_side.get("left"), known

    def _bases(self, block: Block) -> Bases:
        """Eigenvectors of the right and left factor; empty for the identity."""
        right, left, _ = self._inverses([block])
        empty = self.statistics.like
        return (right[0] if right else empty), (left[0] if left else empty)


def _joined(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
