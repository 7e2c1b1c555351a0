"""Let a preconditioner's state travel inside an optimizer's ``state_dict``."""

from typing import Any, Protocol

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

KEY = "natgrad"


class Stateful(Protocol):
    """Anything with a state to save."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def travel_with(optimizer: Optimizer, passenger: Stateful) -> list[RemovableHandle]:
    """Add the passenger's state under a key of its own, and take it out on loading.

    A key beside ``state`` and ``param_groups`` is never cast to the parameters' dtype.
    """

    def save(_: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, KEY: passenger.state_dict()}

    def load(_: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        if KEY not in state:
            raise ValueError(
                f"The saved optimizer state has no {KEY!r} entry: it was saved without "
                "natgrad. Load it before constructing natgrad.KFAC."
            )
        _require_groups(optimizer, state)
        passenger.load_state_dict(state[KEY])
        return {name: part for name, part in state.items() if name != KEY}

    return [
        optimizer.register_state_dict_post_hook(save),
        optimizer.register_load_state_dict_pre_hook(load),
    ]


def _require_groups(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """What torch checks too, but only after the passenger was loaded."""
    saved = [len(group["params"]) for group in state["param_groups"]]
    own = [len(group["params"]) for group in optimizer.param_groups]
    if saved != own:
        raise ValueError(
            f"The saved optimizer state has parameter groups of {saved} parameters. "
            f"Must be {own}."
        )
