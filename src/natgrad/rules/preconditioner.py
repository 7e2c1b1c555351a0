"""Applies every block's rule, to blocks of equal shape together."""

import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from natgrad.math.inverse import Inverse
from natgrad.math.packing import flatten, pack_upper, unpack, unpack_upper
from natgrad.math.precondition import descending
from natgrad.math.rules import mean_of_entries, mean_of_squares
from natgrad.rules.compiled import Aged, Compiled
from natgrad.rules.fallbacks import Plain
from natgrad.rules.moments import Bases, Moment, Moments, is_replaced, moved
from natgrad.rules.rule import Matrices, Rule, projected

if TYPE_CHECKING:
    from natgrad.factors.state import StatisticState
    from natgrad.factors.statistics import Statistics
    from natgrad.layers import Block
    from natgrad.plan.spec import StatisticSpec

# Blocks of equal shape are done by one product up to this many elements each; larger
# ones keep a device busy by themselves, and joining their gradients takes memory.
TOGETHER_UP_TO = 2**18


def update_of(rule: Rule, x: Matrices) -> Tensor:
    """The updates ``(k s, m, n)`` of k matrices, none of them uphill by rounding."""
    u = rule.apply(x)
    return u if rule.descends else descending(x.direction, u, x.count)


class Preconditioner:
    """Applies the rules of the blocks that this rank works on.

    ``directions`` are what is scaled: gradients, or running averages of them.
    ``gradients`` are this step's, from which second moments are learned; ``newest`` the
    weight that they have in the directions (`Average.newest`).
    """

    def __init__(self, statistics: "Statistics") -> None:
        self.statistics = statistics
        self.stacks = Stacks()
        self.moments = Moments(self.stacks)
        self._kinds: dict[Hashable, int] = {}
        self._fixed: tuple[object, dict[str, Hashable]] = None, {}
        backend = statistics.options.compile
        self._compiled = Compiled(backend, update_of) if backend else None

    def __call__(
        self,
        blocks: "Sequence[Block]",
        directions: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        newest: Mapping[str, float | None] = MappingProxyType({}),
    ) -> dict[str, Tensor]:
        """Updates ``(s, m, n)`` by block name."""
        plain = [b.name for b in blocks if isinstance(b.rule, Plain)]
        updates = {name: directions[name] for name in plain}
        for group in self.groups([b for b in blocks if b.name not in updates]):
            shares = {b.name: float(b.spec.elements) for b in group}
            with self.statistics.meter("precondition", shares):
                v = join(group, directions)
                seen = self._seen(group, v, directions, gradients, newest)
                u = self._update(group, seen)
            parts = [u] if len(group) == 1 else u.split(len(u) // len(group))
            updates.update(zip(shares, parts, strict=True))
        return updates

    def _update(self, group: "list[Block]", x: Matrices) -> Tensor:
        """Compiled, if that is asked for and no other rank has a part of a mean."""
        rule = group[0].rule
        if not self._compiled or x.mean is not mean_of_entries:
            return update_of(rule, x)
        names = [b.name for b in group]
        self.moments.outdate(names)  # a graph projects the direction itself
        shape, aged = rule.moment_shape(group[0].shape), None
        if shape is not None:
            whole = x.gradient.new_empty(len(group) * shape[0], *shape[1:])
            square, steps = self._aged(names, whole)
            aged = Aged(square=square, steps=steps)
        return self._compiled(rule, x, aged)

    def groups(self, blocks: "Sequence[Block]") -> "list[list[Block]]":
        """Blocks that one product can do together."""
        groups: dict[Hashable, list[Block]] = {}
        for block in blocks:
            groups.setdefault(self._alike(block), []).append(block)
        return list(groups.values())

    def _alike(self, block: "Block") -> Hashable:
        """What the blocks of a group have in common."""
        plan, known = self._fixed
        if plan is not self.statistics.plan:  # who works on what has changed
            known = dict[str, Hashable]()
            self._fixed = self.statistics.plan, known
        if block.name not in known:
            known[block.name] = self._always_alike(block)
        states = self.statistics.states
        missing = [states[s.name].inverse is None for s in block.spec.statistics]
        # All moments of a group have the same bias.
        moment = self.moments.states.get(block.name) if block.rule.adapts else None
        steps = 0 if moment is None else moment.steps
        return known[block.name], steps, *missing

    def _always_alike(self, block: "Block") -> Hashable:
        """That part of it which no step changes, as a number."""
        if block.spec.elements > TOGETHER_UP_TO:
            return block.name
        sides = [(s.kind, s.stack, s.size, s.diagonal) for s in block.spec.statistics]
        # All workers of a block have the same group: rounding may depend on it.
        workers = tuple(self.statistics.plan.workers[block.name])
        # What is cut has the same group on all ranks, which ask for its mean together.
        cuts = [(c.shape, c.pieces[0].sizes) for c in block.spec.cuts if block.is_cut]
        key = block.rule, block.shape, tuple(sides), workers, *cuts
        return self._kinds.setdefault(key, len(self._kinds))

    def _seen(
        self,
        group: "list[Block]",
        v: Tensor,
        directions: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        newest: Mapping[str, float | None],
    ) -> Matrices:
        """What a rule sees of a group."""
        rule, names = group[0].rule, [block.name for block in group]
        same = all(directions[name] is gradients[name] for name in names)
        right, left, known = self._inverses(group)
        return Matrices(
            direction=v,
            gradient=v if same or not rule.adapts else join(group, gradients),
            count=len(group),
            right=right,
            left=left,
            known=known,
            damping=self.statistics.damping_of(group[0]),
            curvature=self._curvature(group) if rule.corrects else None,
            moment=partial(self._moment, names),
            average=partial(self.moments.average, names, newest)
            if rule.projects
            else projected,
            mean=self._mean(group[0]),
        )

    def _moment(self, names: Sequence[str], x: Tensor, beta2: float) -> Tensor:
        """Add the squares of x, of blocks, to their moments. See `Matrices.moment`.

        x ``(k s, ...)`` is of blocks whose moments are of as many steps.
        """
        square, steps = self._aged(names, x)
        return mean_of_squares(square, x, beta2, steps)

    def _aged(self, names: Sequence[str], like: Tensor) -> tuple[Tensor, int]:
        """Moments that are to get one more gradient, joined, and of how many then.

        ``like`` is what they are moments of.
        """
        size, known = len(like) // len(names), self.moments.states
        for name in names:
            if name not in known:
                known[name] = Moment(square=torch.zeros_like(like[:size]))
        states = [known[name] for name in names]
        (square,), views = self.stacks.joined(names, [(s.square,) for s in states])
        for state, (view,) in zip(states, views, strict=True):
            state.square = view
            state.steps += 1
        return square, states[0].steps

    def _mean(self, block: "Block") -> Callable[[Tensor], Tensor]:
        """Over all entries: of a block that is cut, those of all ranks."""
        comm, count = self.statistics.comm, block.spec.elements
        if comm.world == 1 or not (block.spec.elementwise and block.spec.cuts):
            return mean_of_entries

        def mean(x: Tensor) -> Tensor:
            sums = x.sum((1, 2), dtype=torch.float64)
            total = comm.agree(sums, block.spec.copies)
            return (total / count).to(x).reshape(-1, 1, 1)

        return mean

    def _curvature(self, group: "list[Block]") -> Tensor | None:
        states = [self.statistics.states[f"{block.name}/S"] for block in group]
        moment = self.stacks.of(states)
        return None if moment is None else moment[0]

    def bases(self) -> dict[str, Bases]:
        """The eigenbases in which blocks have their second moments, by block name."""
        found: dict[str, Bases] = {}
        for block in self.statistics.block.values():
            if block.is_factored and (block.rule.adapts or block.rule.corrects):
                right, left, _ = self._inverses([block])
                empty = self.statistics.like
                found[block.name] = (
                    right[0] if right else empty,
                    left[0] if left else empty,
                )
        return found

    def bases_for_capture(self) -> dict[str, Bases]:
        """Those that an S is to be estimated in; none before the first refresh."""
        found: dict[str, Bases] = {}
        for block in self.statistics.block.values():
            if block.is_factored and block.rule.corrects:
                right, left, known = self._inverses([block])
                if known and right and left:
                    found[block.name] = right[0], left[0]
        return found

    def follow(self, old: Mapping[str, Bases]) -> None:
        """Move second moments from the bases before a refresh to those after it.

        Or forget them. See Note [Second moments and bases].
        """
        if not old or not self.statistics.last.inverted:
            return
        new = self.bases()
        changed = [name for name in old if is_replaced(old[name], new[name])]
        rules = {name: self.statistics.block[name].rule for name in old}
        restart = [name for name in changed if rules[name].moments == "restart"]
        self.moments.forget(restart)
        self.moments.outdate(changed)
        for state in self._scales(restart):
            state.average, state.inverse, state.history = None, None, []
            state.estimated = False
        kept = {name: old[name] for name in old if rules[name].moments == "move"}
        self.moments.follow(kept, new)
        for state in self._scales([name for name in changed if name in kept]):
            name = state.spec.block
            shape, pair = self.statistics.block[name].shape, (old[name], new[name])
            state.average = moved(state.average, shape, *pair)
            state.history = [moved(x, shape, *pair) for x in state.history]
            if state.inverse is not None:
                state.inverse = (moved(state.inverse[0], shape, *pair),)
        # what the next step applies first is joined in the step that changed it
        late = [self.statistics.block[name] for name in old if rules[name].late]
        for group in self.groups(late):
            self._inverses(group)

    def _scales(self, blocks: Sequence[str]) -> "list[StatisticState]":
        """The S of blocks that have one."""
        found = (self.statistics.states.get(f"{name}/S") for name in blocks)
        return [state for state in found if state is not None]

    def _inverses(
        self, group: "list[Block]"
    ) -> tuple[Inverse | None, Inverse | None, bool]:
        """What is kept of the right and left factors, and whether none is missing."""
        by_side: dict[str, Inverse | None] = {}
        for i, spec in enumerate(group[0].spec.statistics):
            if spec.side != "both":
                names = [block.spec.statistics[i].name for block in group]
                states = [self.statistics.states[name] for name in names]
                joined = self.stacks.of(states)
                by_side[spec.side] = (
                    None if joined is None else opened(joined, states[0].spec)
                )
        known = all(x is not None for x in by_side.values())
        return by_side.get("right"), by_side.get("left"), known


def kept(prepared: Inverse, spec: "StatisticSpec") -> Inverse:
    """A prepared factor as it is kept between steps."""
    if spec.packing == "upper":
        return (pack_upper(prepared[0]),)
    if spec.packing == "symmetric":
        return (flatten(prepared[0]).view(spec.stack, -1),)
    # LAPACK leaves columns one after another; others receive rows, and a product would
    # be rounded differently
    return tuple(x.contiguous() for x in prepared)


def opened(kept: Inverse, spec: "StatisticSpec") -> Inverse:
    """What a rule is given of what is kept, of one factor or of several together."""
    if spec.packing == "upper":
        return (unpack_upper(kept[0], spec.size),)
    if spec.packing == "symmetric":
        return (unpack(kept[0].flatten(), len(kept[0]), spec.size),)
    return kept


def join(group: "list[Block]", tensors: Mapping[str, Tensor]) -> Tensor:
    """What blocks of equal shape have, as one stack."""
    if len(group) == 1:
        return tensors[group[0].name]
    return torch.cat([tensors[block.name] for block in group])


class Stacks:
    """Joins what is kept of several blocks, again only when one of them changes.

    Who keeps it is left with views of the joined tensors, so that nothing is kept
    twice. Inverses that were joined are never written to: a state that somebody is
    saving stays as it is.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, ...], tuple[list[Inverse], Inverse]] = {}
        self._used: set[tuple[str, ...]] = set()

    def of(self, states: "Sequence[StatisticState]") -> Inverse | None:
        """The inverses, ``(k s, n, n)`` and so on; None if one is missing."""
        inverses = [s.inverse for s in states if s.inverse is not None]
        if len(inverses) < len(states):
            return None
        joined, views = self.joined([s.spec.name for s in states], inverses)
        for state, view in zip(states, views, strict=True):
            state.inverse = view
        return joined

    def joined(
        self, names: Sequence[str], parts: Sequence[Inverse]
    ) -> tuple[Inverse, Sequence[Inverse]]:
        """Tuples of equal shapes as one tuple, and what each has become: views."""
        if len(parts) == 1:
            return parts[0], parts
        key = tuple(names)
        self._used.add(key)
        known = self._known.get(key)
        if known is not None and all(map(_same, known[0], parts)):
            return known[1], known[0]
        joined = tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))
        count = len(parts)
        views = [tuple(_part(x, i, count) for x in joined) for i in range(count)]
        self._known[key] = views, joined
        return joined, views

    def forget(self) -> None:
        """Drop what was not asked for since the last call."""
        self._known = {key: self._known[key] for key in self._used}
        self._used = set()


def _same(left: Inverse, right: Inverse) -> bool:
    return all(map(operator.is_, left, right))


def _part(x: Tensor, i: int, count: int) -> Tensor:
    """The i-th of so many equal parts; of an empty tensor, an empty one."""
    size = len(x) // count
    return x[i * size : (i + 1) * size]
