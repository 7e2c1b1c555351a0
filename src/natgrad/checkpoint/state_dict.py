"""Saves statistics, moments, lengths and budget as one dict, and loads them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from natgrad.factors import state as saved_state
from natgrad.factors.statistics import Statistics
from natgrad.math.statistics import widen
from natgrad.rules.lengths import References
from natgrad.rules.moments import Moments


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What a rank keeps, besides weights and momentum.

    ``gathered``: it has what the other ranks keep as well.
    """

    statistics: Statistics
    moments: Moments
    references: References
    gathered: bool


def save(kept: Kept) -> dict[str, Any]:
    """All that does not depend on how the ranks share it."""
    statistics, account = kept.statistics, kept.statistics.account
    blocks = statistics.block.values()
    return {
        **saved_state.save(statistics.states.values(), statistics.step),
        "rules": {b.name: b.rule.spec() for b in blocks},
        "moments": kept.moments.save(),
        "references": kept.references.save(),
        "budget": None if account is None else account.state_dict(),
    }


def load(kept: Kept, state: Mapping[str, Any]) -> None:
    """Take over what `save` returned, after `validate.require_state`."""
    statistics, like = kept.statistics, kept.statistics.like
    blocks = list(statistics.block.values())
    dtypes = {widen(p).dtype for b in blocks for p in b.parameters}
    # of a model with several, each layer goes on with what it was saved with
    dtype = like.dtype if len(dtypes) == 1 else None
    moments = kept.moments.loaded(state["moments"], blocks, dtype)
    statistics.step = saved_state.load(statistics.states, state, like, dtype)
    kept.moments.states = moments
    # older states have none: lengths begin with the weights as they are now
    kept.references.load(state.get("references", {}), blocks, like)
    if statistics.account is not None and state.get("budget"):
        statistics.account.load_state_dict(state["budget"])
