"""The state of natgrad as part of an optimizer's ``state_dict``."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, Protocol
from weakref import WeakKeyDictionary, ref

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from natgrad.checkpoint.sharded import KEY, collect, spread, torch_asks
from natgrad.checkpoint.state_dict import Kept
from natgrad.rules.parts import NAMES


class HasState(Protocol):
    """What an engine has to save."""

    closed: bool

    def kept(self) -> Kept: ...
    def state_dict(self, *, warn: bool = True) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


Check = Callable[[Mapping[str, Any]], None]
_COPIER = "__reduce_ex__"
"""What `copy` and `pickle` ask an object for, before its class."""
_ATTACHED: WeakKeyDictionary[Optimizer, "ref[HasState]"] = WeakKeyDictionary()


def require_free(optimizer: Optimizer | None) -> None:
    """Raise if an optimizer carries a state already: a second would overwrite it."""
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"Invalid optimizer: a {type(optimizer).__name__}. Must be a torch "
            "optimizer, after the model: KFAC(model, optimizer)."
        )
    if optimizer is not None and _open(_ATTACHED.get(optimizer)):
        raise ValueError(
            f"Invalid optimizer: this {type(optimizer).__name__} already carries a "
            "natgrad preconditioner. Must be one without: close() the other first."
        )


def _open(engine: "ref[HasState] | None") -> bool:
    found = None if engine is None else engine()
    return found is not None and not found.closed


def refuse_copy(what: str) -> NoReturn:
    """Raise: a copy would have no hooks, and would train by another rule or fail."""
    raise TypeError(
        f"{what} cannot be copied or pickled: it works through hooks on its model. "
        "Copy the model and state_dict() instead, make a new one for the copy, and "
        "load the state into it."
    )


class CopyGuard:
    """Until removed, copying or pickling an optimizer that carries natgrad is an error.

    torch copies an optimizer without its hooks: the copy would train without natgrad.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = ref(optimizer)
        what = f"This {type(optimizer).__name__}, which carries a natgrad.KFAC,"

        def refuse(protocol: object) -> NoReturn:
            refuse_copy(what)

        optimizer.__dict__[_COPIER] = refuse

    def remove(self) -> None:
        """It can be copied again."""
        optimizer = self._optimizer()
        if optimizer is not None:
            optimizer.__dict__.pop(_COPIER, None)


def attach_state(
    optimizer: Optimizer, engine: HasState, check: Check | None = None
) -> list[RemovableHandle]:
    """Save an engine's state with the optimizer's, under a key of its own.

    On loading it is taken out again.

    ``check`` raises if the optimizer's own part of a state is not as it must be; it is
    called before anything is loaded.

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
        if check is not None:
            check(state)
        filed = [entry[KEY] for entry in state["state"].values() if KEY in entry]
        if KEY not in state and not filed:
            raise ValueError(
                f"The saved optimizer state has no {KEY!r} entry: it was saved without "
                "natgrad. Load it before constructing natgrad.KFAC."
            )
        statistics = engine.kept().statistics
        mine = state[KEY] if KEY in state else collect(statistics, filed)
        engine.load_state_dict(mine)
        own = {name: part for name, part in state.items() if name != KEY}
        groups = _with_own_parts(optimizer, state["param_groups"])
        return {**own, "param_groups": groups, "state": _without(state["state"])}

    _ATTACHED[optimizer] = ref(engine)
    return [
        optimizer.register_state_dict_post_hook(save),
        optimizer.register_load_state_dict_pre_hook(load),
    ]


def _filed(
    optimizer: Optimizer, engine: HasState, state: dict[str, Any]
) -> dict[Any, Any]:
    """Every parameter's state, with statistics; torch misses those that have none."""
    # every rank's part is asked for
    spread_out = spread(engine.kept(), engine.state_dict(warn=False))
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


def _with_own_parts(
    optimizer: Optimizer, saved: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Saved groups with the rules, lengths and so on that the optimizer works by.

    The engine has them from construction; what a group says of them is only a record.
    """
    return [
        {key: x for key, x in theirs.items() if key not in NAMES}
        | {key: x for key, x in ours.items() if key in NAMES}
        for theirs, ours in zip(saved, optimizer.param_groups, strict=True)
    ]


def _require_groups(optimizer: Optimizer, state: Any) -> None:
    """What torch checks too, if at all, but only after the engine's was loaded."""
    require_form(state)
    saved = [len(group["params"]) for group in state["param_groups"]]
    own = [len(group["params"]) for group in optimizer.param_groups]
    if saved != own:
        raise ValueError(
            f"Invalid param_groups in the saved optimizer state: parameter groups of "
            f"{saved} params. Must be {own}."
        )
    for group, known in zip(state["param_groups"], optimizer.param_groups, strict=True):
        if "lr" in known:
            require_setting(group, "lr", math.inf)


def require_form(state: Any) -> None:
    """Raise unless it looks like what any torch optimizer saves."""
    if not _has_form(state):
        found = type(state).__name__
        if isinstance(state, Mapping):
            found = f"dict of {', '.join(map(repr, [*state][:3])) or 'nothing'}"
        raise ValueError(
            f"Invalid optimizer state, a {found}. Must be what state_dict() of an "
            "optimizer returned: 'state' is a dict by parameter, 'param_groups' a list "
            "of dicts that number their 'params'."
        )


def _has_form(state: Any) -> bool:
    if not isinstance(state, Mapping):
        return False
    entries: Any = state.get("state")
    groups: Any = state.get("param_groups")
    if not (isinstance(entries, Mapping) and isinstance(groups, list)):
        return False
    filed = all(isinstance(entry, Mapping) for entry in entries.values())
    return filed and all(_is_group(group) for group in groups)


def _is_group(group: Any) -> bool:
    params = group.get("params") if isinstance(group, Mapping) else None
    if not isinstance(params, list):
        return False
    named = all(isinstance(number, int | str) for number in params)
    return named and len(set(params)) == len(params)


def require_setting(group: Mapping[str, Any], name: str, below: float) -> None:
    """Raise unless a saved parameter group has a number in [0, below) of this name."""
    value: Any = group.get(name)
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and 0 <= value < below):
        raise ValueError(
            f"Invalid {name}={value!r} in a saved parameter group. Must be a number "
            f"in [0, {below:g})."
        )
