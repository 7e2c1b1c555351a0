"""From gradients to updates: the rules that `natgrad.options.Curvature` names."""

from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import Tensor

from natgrad.factors.stacks import Stacks
from natgrad.factors.state import StatisticState
from natgrad.factors.statistics import Statistics
from natgrad.layers import Block
from natgrad.layers.registration import shape_of
from natgrad.math.inverse import Inverse
from natgrad.math.parts import kronecker_values
from natgrad.math.polar import polar
from natgrad.math.precondition import (
    apply_eigen,
    descending,
)
from natgrad.math.rules import (
    adaptive_scale,
    between,
    corrected_scale,
    into_basis,
    out_of_basis,
    whiten,
    whiten_back,
)
from natgrad.rules.moments import Bases, Moments, is_replaced, moved

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
        self.stacks = Stacks()
        self.moments = Moments(self.stacks)

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
                v = _joined(group, directions)
                u = self._scaled(group, v, directions, gradients)
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
        rule = self._rule(block)
        if rule == "plain" or block.spec.elements > TOGETHER_UP_TO:
            return block.name
        sides = [
            (s.kind, s.size, s.diagonal, self.statistics.states[s.name].inverse is None)
            for s in block.spec.statistics
        ]
        # All workers of a block have the same group: rounding may depend on it.
        workers = tuple(self.statistics.plan.workers[block.name])
        # All moments of a group have the same bias.
        steps = self.moments.steps(block.name)
        return rule, shape_of(block), tuple(sides), workers, steps

    def bases(self) -> dict[str, Bases]:
        """The eigenbases in which blocks have their second moments, by block name."""
        if self.config.scale not in ("adaptive", "corrected"):
            return {}
        found: dict[str, Bases] = {}
        for block in self.statistics.block.values():
            if block.is_factored:
                found[block.name] = self._bases([block])
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
            return "rest" if self.is_adaptive(block) else "plain"
        return self.config.scale if block.is_factored else "kronecker"

    def _scaled(
        self,
        group: list[Block],
        v: Tensor,
        directions: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
    ) -> Tensor:
        rule = self._rule(group[0])
        if rule == "plain":
            return v
        if rule == "orthogonal":
            return self._orthogonal(group, v)
        if rule == "kronecker":
            return self._kronecker(group, v)
        if rule == "corrected":
            return self._corrected(group, v)
        same = all(directions[b.name] is gradients[b.name] for b in group)
        g = v if same else _joined(group, gradients)
        return (self._adaptive if rule == "adaptive" else self._rest)(group, v, g)

    def _rest(self, group: list[Block], v: Tensor, gradient: Tensor) -> Tensor:
        names = [block.name for block in group]
        square = self.moments.update(names, gradient, self.config.beta2)
        return adaptive_scale(v, square, REST_DAMPING) * self.config.rest_rate

    def _kronecker(self, group: list[Block], v: Tensor) -> Tensor:
        """``(F + damping I)^-1 V``; the plain gradient while an inverse is missing."""
        right, left, known = self._inverses(group)
        if not known:
            return v
        if group[0].is_factored and self.config.form == "eigen":
            assert right is not None
            assert left is not None
            return apply_eigen(v, right, left, self.statistics.damping_of(group[0]))
        return between(v, right[0] if right else None, left[0] if left else None)

    def _adaptive(self, group: list[Block], v: Tensor, gradient: Tensor) -> Tensor:
        """Adam's rule in the eigenbases of the factors."""
        bases, names = self._bases(group), [block.name for block in group]
        rotated = into_basis(gradient, *bases)
        square = self.moments.update(names, rotated, self.config.beta2)
        if v is not gradient:
            rotated = into_basis(v, *bases)
        damping = self.statistics.damping_of(group[0])
        return out_of_basis(adaptive_scale(rotated, square, damping), *bases)

    def _corrected(self, group: list[Block], v: Tensor) -> Tensor:
        """EKFAC; K-FAC's own scale until the second moment is known."""
        right, left, known = self._inverses(group)
        if not known or right is None or left is None:
            return v
        states = [self.statistics.states[f"{block.name}/S"] for block in group]
        moment = self.stacks.of(states)
        if moment is None:
            curvature = kronecker_values(right[1], left[1], v)
        else:
            curvature = moment[0].reshape(v.shape)
        damping: float | Tensor = self.statistics.damping_of(group[0])
        if self.config.damping_style == "relative":
            means = curvature.reshape(len(group), 1, -1).mean(2, keepdim=True)
            each = means.expand(-1, len(v) // len(group), 1)
            damping = damping * each.reshape(-1, 1, 1)
        bases = right[0], left[0]
        scaled = corrected_scale(into_basis(v, *bases), curvature, damping)
        return out_of_basis(scaled, *bases)

    def follow(self, old: Mapping[str, Bases]) -> None:
        """Move second moments from the bases before a refresh to those after it.

        Or forget them. See Note [Second moments and bases].
        """
        new = self.bases()
        changed = [name for name in old if is_replaced(old[name], new[name])]
        if self.config.moments == "restart":
            self.moments.forget(changed)
            for state in self._scales(changed):
                state.average, state.inverse, state.history = None, None, []
                state.estimated = False
            return
        self.moments.follow(old, new)
        for state in self._scales(changed):
            name = state.spec.block
            shape, pair = shape_of(self.statistics.block[name]), (old[name], new[name])
            state.average = moved(state.average, shape, *pair)
            state.history = [moved(x, shape, *pair) for x in state.history]
            if state.inverse is not None:
                state.inverse = (moved(state.inverse[0], shape, *pair),)

    def _scales(self, blocks: Sequence[str]) -> list[StatisticState]:
        """The S of blocks that have one."""
        found = (self.statistics.states.get(f"{name}/S") for name in blocks)
        return [state for state in found if state is not None]

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

    def _bases(self, group: list[Block]) -> Bases:
        """Eigenvectors of the right and left factors; empty for the identity."""
        right, left, _ = self._inverses(group)
        empty = self.statistics.like
        return (right[0] if right else empty), (left[0] if left else empty)


def _joined(group: list[Block], tensors: Mapping[str, Tensor]) -> Tensor:
    if len(group) == 1:
        return tensors[group[0].name]
    return torch.cat([tensors[block.name] for block in group])
