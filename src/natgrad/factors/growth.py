"""The curvature along updates, of today's statistics over that of stale inverses.

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

from torch import Tensor

from natgrad.factors.state import StatisticState
from natgrad.factors.statistics import Statistics
from natgrad.math.growth import along, along_eigen, log_growth, longest, rows_at
from natgrad.math.rules import between


def growths(
    statistics: Statistics,
    directions: Mapping[str, Tensor],
    updates: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Logarithms by block name, of the stale factors that this rank owns.

    The owner of a factor is one of the ranks that work on its block.
    """
    found: dict[str, Tensor] = {}
    for name, update in updates.items():
        block = statistics.block[name]
        if not (block.is_factored and block.rule.natural):
            continue
        specs = [s for s in block.spec.statistics if s.is_factor]
        states = [statistics.states[s.name] for s in specs]
        if any(s.inverse is None for s in states):
            continue  # the update is the gradient
        for s in states:
            if _is_stale(s) and statistics.owns(s):
                grown = _growth(statistics, s, directions[name], update)
                found[name] = found[name] + grown if name in found else grown
    return found


def _is_stale(s: StatisticState) -> bool:
    """Whether its average has changed since it was inverted."""
    is_newer = s.timing.refreshed_at > s.timing.inverted_at
    return is_newer and s.average is not None


def _growth(
    statistics: Statistics, s: StatisticState, direction: Tensor, update: Tensor
) -> Tensor:
    is_left = s.spec.side == "left"
    turned = update.mT if is_left else update
    index = longest(turned)
    rows = rows_at(turned, index)
    damped = statistics.factor_damping(s) * rows.square().sum()
    now = along(rows, statistics.dense(s)) + damped
    assert s.inverse is not None
    if statistics.is_eigen(s):
        return log_growth(now, along_eigen(rows, *s.inverse) + damped)
    # U (X + damping I) is what the other side's inverse makes of the gradient
    half = _one_sided(statistics, s, direction)
    then = (rows_at(half.mT if is_left else half, index) * rows).sum()
    return log_growth(now, then)


def _one_sided(statistics: Statistics, s: StatisticState, direction: Tensor) -> Tensor:
    """The direction, scaled by the factor of the other side alone."""
    for spec in statistics.block[s.spec.block].spec.statistics:
        inverse = statistics.states[spec.name].inverse
        if spec.is_factor and spec.name != s.spec.name and inverse is not None:
            is_left = spec.side == "left"
            right, left = (None, inverse[0]) if is_left else (inverse[0], None)
            return between(direction, right, left)
    return direction
