"""How much the curvature has grown since inverses were made.

Note [What a stale inverse cannot know]
``u = (F + damping I)^-1 g`` is long where F has little curvature. If F is of some steps
ago, the updates since then went just there, and the curvature there has grown: a clip
that takes F for today's believes steps to be short that are thousands of times too
long. Statistics are estimated more often than they are inverted, so owners can tell: a
factor's growth is ``tr(U X U^T)`` of today's average X over that of the X in the
inverse, both damped. That of a layer is the product of its factors' growths, and
exact where only one of them has changed.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from natgrad.factors.averages import Averages
from natgrad.factors.state import StatisticState
from natgrad.layers import Block
from natgrad.math.growth import (
    LOOKED_AT,
    along,
    along_eigen,
    along_packed,
    log_growth,
    longest,
    rows_at,
    rows_times,
)
from natgrad.plan import StatisticSpec
from natgrad.rules.lengths import vector
from natgrad.rules.preconditioner import Preconditioner, join

# So many elements of averages of equal shape are unpacked at a time: more take memory,
# and no less time.
TOGETHER_UP_TO = 2**18


def growths(
    statistics: Averages,
    preconditioner: Preconditioner,
    directions: Mapping[str, Tensor],
    updates: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Logarithms by block name, of the stale factors that this rank owns.

    The owner of a factor is one of the ranks that work on its block.
    """
    blocks = [statistics.block[name] for name in updates]
    natural = [b for b in blocks if b.is_factored and b.rule.natural]
    names = list[str]()
    pairs = list[tuple[Tensor, Tensor]]()
    for group in preconditioner.groups(natural):
        for i, spec in enumerate(group[0].spec.statistics):
            for some in _stale(statistics, group, i) if spec.is_factor else ():
                names += [b.name for b in some]
                known = statistics, preconditioner
                pairs.append(_now_and_then(*known, some, i, directions, updates))
    if not names:
        return {}
    now, then = (torch.cat(found) for found in zip(*pairs, strict=True))
    found: dict[str, Tensor] = {}
    for name, x in zip(names, log_growth(now, then).unbind(), strict=True):
        found[name] = found[name] + x if name in found else x
    return found


def _stale(statistics: Averages, group: list[Block], i: int) -> list[list[Block]]:
    """Whose i-th average is newer than the inverse: all at once, or one by one."""
    states = statistics.states
    # without an inverse the update is the gradient
    if any(states[s.name].inverse is None for s in _factors(group[0])):
        return []
    stale = [b for b in group if _is_stale(statistics, states[_name(b, i)])]
    size = group[0].spec.statistics[i].elements
    if len(stale) == len(group) and len(group) * size <= TOGETHER_UP_TO:
        return [stale]
    return [[b] for b in stale]


def _is_stale(statistics: Averages, s: StatisticState) -> bool:
    """Whether its average has changed since it was inverted, and is known here."""
    is_newer = s.timing.refreshed_at > s.timing.inverted_at
    return is_newer and s.average is not None and statistics.owns(s)


def _factors(block: Block) -> list[StatisticSpec]:
    return [s for s in block.spec.statistics if s.is_factor]


def _name(block: Block, i: int) -> str:
    return block.spec.statistics[i].name


def _now_and_then(
    statistics: Averages,
    preconditioner: Preconditioner,
    group: list[Block],
    i: int,
    directions: Mapping[str, Tensor],
    updates: Mapping[str, Tensor],
) -> tuple[Tensor, Tensor]:
    """The curvature along updates, one number for each block of a group.

    That of today's i-th averages, and that which the inverses knew.
    """
    count, spec = len(group), group[0].spec.statistics[i]
    states = [statistics.states[_name(b, i)] for b in group]
    is_left = spec.side == "left"
    turned = _turned(group, updates, is_left)
    index = longest(turned) if turned.shape[1] > LOOKED_AT else None
    rows = rows_at(turned, index)
    each = len(rows) // count
    damping = [x for s in states for x in [statistics.factor_damping(s)] * each]
    damped = vector(tuple(damping), rows.dtype, rows.device).view(-1, 1, 1)
    now = _each(_now(statistics, states, rows, damped), count)
    joined = preconditioner.stacks.of(states)
    assert joined is not None
    if statistics.is_eigen(states[0]):
        then = along_eigen(rows, joined[0], joined[1], damped)
        return now, _each(then, count)
    # U (X + damping I) is what the other side's inverse makes of the gradient
    gradient = _turned(group, directions, is_left)
    scaled = rows_times(index, _other(statistics, preconditioner, group, i), gradient)
    return now, _each((scaled * rows).sum((1, 2)), count)


def _turned(group: list[Block], tensors: Mapping[str, Tensor], is_left: bool) -> Tensor:
    """With the side that is looked at as columns."""
    joined = join(group, tensors)
    return joined.mT if is_left else joined


def _each(x: Tensor, count: int) -> Tensor:
    """Sums of so many equal parts."""
    return x if len(x) == count else x.view(count, -1).sum(1)


def _now(
    statistics: Averages, states: list[StatisticState], rows: Tensor, damping: Tensor
) -> Tensor:
    """The curvature that today's averages have along rows, damped."""
    spec, found = states[0].spec, [s.average for s in states if s.average is not None]
    is_plain = spec.stack * len(states) == len(rows) and spec.parts == 1
    if is_plain and not spec.diagonal:
        flat = found[0] if len(found) == 1 else torch.cat(found)
        return along_packed(rows, flat.view(len(rows), -1), damping)
    dense = [statistics.dense(s) for s in states]
    return along(rows, dense[0] if len(dense) == 1 else torch.cat(dense), damping)


def _other(
    statistics: Averages, preconditioner: Preconditioner, group: list[Block], i: int
) -> Tensor | None:
    """The inverses of the other side; None if it has none."""
    for j, spec in enumerate(group[0].spec.statistics):
        if spec.is_factor and j != i:
            states = [statistics.states[_name(b, j)] for b in group]
            inverses = preconditioner.stacks.of(states)
            return None if inverses is None else inverses[0]
    return None
