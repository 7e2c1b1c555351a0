"""An engine's state as one dict, and back: statistics, moments, budget, counts."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from natgrad.factors import state as saved_state
from natgrad.math.statistics import widen

if TYPE_CHECKING:
    from natgrad.engine.machinery import Machinery


def save(engine: "Machinery") -> dict[str, Any]:
    """All that does not depend on how the ranks share it."""
    statistics = engine.statistics
    states, account = statistics.states.values(), statistics.account
    return {
        **saved_state.save(states, engine.step),
        "rules": {b.name: b.rule.spec() for b in engine.blocks},
        "moments": engine.moments.save(),
        "references": engine.references.save(),
        "budget": None if account is None else account.state_dict(),
        "quadratic": None if engine.tuner is None else engine.tuner.state_dict(),
        "skipped_steps": engine.skipped_steps,
    }


def load(engine: "Machinery", state: Mapping[str, Any]) -> None:
    """Take over what `save` returned, after `checking.require_state`."""
    statistics = engine.statistics
    dtypes = {widen(p).dtype for b in engine.blocks for p in b.parameters}
    # of a model with several, each layer goes on with what it was saved with
    dtype = engine.like.dtype if len(dtypes) == 1 else None
    moments = engine.moments.loaded(state["moments"], engine.blocks, dtype)
    statistics.step = saved_state.load(statistics.states, state, engine.like, dtype)
    engine.moments.states = moments
    # older states have none: lengths begin with the weights as they are now
    engine.references.load(state.get("references", {}), engine.blocks, engine.like)
    # older states do not say
    engine.skipped_steps = int(state.get("skipped_steps", 0))
    if engine.tuner is not None and state.get("quadratic"):
        engine.tuner.load_state_dict(state["quadratic"])
    if statistics.account is not None and state.get("budget"):
        statistics.account.load_state_dict(state["budget"])


def convert(engine: "Machinery", like: Tensor) -> None:
    """Take all that is kept to the dtype and device that the parameters have now.

    They have changed by ``model.double()`` or ``model.to(...)``, say.
    """
    to = f"{like.dtype}, {like.device.type}"
    engine.comm.meet(f"model.to({to}) in step {engine.step}")
    state = save(engine)
    engine.like = engine.statistics.like = like
    load(engine, state)
