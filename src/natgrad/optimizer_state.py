"""Let a preconditioner's state travel inside an optimizer's ``state_dict``."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from natgrad.parameter_state import KEY, collect, spread, torch_asks

if TYPE_CHECKING:
    from natgrad.engine import Engine


def travel_with(optimizer: Optimizer, engine: "Engine") -> list[RemovableHandle]:
    """Add the engine's state under a key of its own, and take it out on loading.

    A key beside ``state`` and ``param_groups`` is never cast to the parameters' dtype.
    `get_optimizer_state_dict` gets it under the parameters instead, where it is taken
    out before it would be cast. See Note [Two forms of a state].
    """

    def save(_: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        if torch_asks():
            return {**state, "state": _filed(optimizer, engine, state)}
        return {**state, KEY: engine.state_dict()}

    def load(_: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        _require_groups(optimizer, state)
        filed = [entry[KEY] for entry in state["state"].values() if KEY in entry]
        if KEY not in state and not filed:
            raise ValueError(
                f"The saved optimizer state has no {KEY!r} entry: it was saved without "
                "natgrad. Load it before constructing natgrad.KFAC."
            )
        engine.load_state_dict(state[KEY] if KEY in state else collect(engine, filed))
        own = {name: part for name, part in state.items() if name != KEY}
        return {**own, "state": _without(state["state"])}

    return [
        optimizer.register_state_dict_post_hook(save),
        optimizer.register_load_state_dict_pre_hook(load),
    ]


def _filed(
    optimizer: Optimizer, engine: "Engine", state: dict[str, Any]
) -> dict[Any, Any]:
    """Every parameter's state, with statistics; torch misses those that have none."""
    spread_out = spread(engine)
    filed: dict[Any, Any] = {}
    for number, p in _numbered(optimizer, state):
        extra = {KEY: spread_out[id(p)]} if id(p) in spread_out else {}
        filed[number] = {**state["state"].get(number, {}), **extra}
    return filed


def _numbered(
    optimizer: Optimizer, state: dict[str, Any]
) -> Iterator[tuple[Any, Tensor]]:
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        yield from zip(saved["params"], group["params"], strict=True)


def _without(state: dict[Any, dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    """Nothing of ours, and no entry that only ours had made."""
    own = {
        number: {name: x for name, x in entry.items() if name != KEY}
        for number, entry in state.items()
    }
    return {number: entry for number, entry in own.items() if entry}


def _require_groups(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """What torch checks too, but only after the passenger was loaded."""
    saved = [len(group["params"]) for group in state["param_groups"]]
    own = [len(group["params"]) for group in optimizer.param_groups]
    if saved != own:
        raise ValueError(
            f"The saved optimizer state has parameter groups of {saved} parameters. "
            f"Must be {own}."
        )
