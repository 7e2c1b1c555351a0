"""What a saved state must look like: checked before anything of it is used.

A state comes from a file, and files are cut short, edited and mixed up. Everything is
checked first, so that a state is taken entirely or refused with a word on what is wrong
and nothing has changed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor

from natgrad.factors.budget import Books, Cost
from natgrad.factors.refresh import Timing
from natgrad.factors.state import has_dense, require_part, require_version
from natgrad.plan.cost import inverse_shapes, kept_shapes

if TYPE_CHECKING:
    from natgrad.factors.statistics import Statistics

_AT_LEAST_ONE = ("interval", "previous")
_ENTRY = ("average", "inverse", "history", "mean_eigenvalue", "estimated", "failures")


def require_state(state: Any, statistics: "Statistics", part: Sequence[Any]) -> None:
    """Raise a ValueError that names the first thing that is not as it must be."""
    _require_ours(state)
    # before the keys, which other versions have others of
    require_version(state["version"])
    _require_keys("state", state, ("step", "statistics", "calls", "moments"))
    _require_rules(state.get("rules"), statistics)
    saved = state.get("part")
    if saved is not None and not (isinstance(saved, list | tuple) and len(saved) == 3):
        _refuse("part", saved, "None, or a rank, the number of ranks and a plan")
    require_part(saved, part)
    _require_count("step", state["step"])
    _require_count("skipped_steps", state.get("skipped_steps", 0))
    for name, count in _dict("calls", state["calls"]).items():
        _require_count(f"calls[{name!r}]", count)
    for name, entry in _dict("moments", state["moments"]).items():
        _require_moment(f"moments[{name!r}]", entry)
    for name, entry in _dict("references", state.get("references", {})).items():
        _require_reference(f"references[{name!r}]", entry)
    for name, entry in _dict("statistics", state["statistics"]).items():
        if name in statistics.states:
            _require_statistic(statistics, name, entry)
    _require_budget(state.get("budget"))


def _require_rules(saved: Any, statistics: "Statistics") -> None:
    """Factors are prepared for one rule, and its moments are in its bases."""
    rules = _dict("rules", saved)
    for block in statistics.block.values():
        known = _dict(f"rules[{block.name!r}]", rules.get(block.name, {}))
        if known and repr(known) != repr(block.rule.spec()):  # it may hold anything
            raise ValueError(
                f"The saved natgrad state of {block.name} is of another rule than this "
                f"optimizer has for it:\n  saved: {known}\n  here:  "
                f"{block.rule.spec()}\nMust be the same. natgrad.take_momentum("
                "optimizer, state) takes the momentum alone."
            )


def _require_ours(state: Any) -> None:
    legal = "what state_dict() of a natgrad optimizer returned"
    if not isinstance(state, Mapping):
        _refuse("state", state, legal)
    if "version" not in state:
        found = ", ".join(map(repr, [*state][:3])) or "nothing"
        _refuse("state", f"a dict of {found}...", f"{legal}, which has a version")


def _require_statistic(statistics: "Statistics", name: str, entry: Any) -> None:
    where = f"statistics[{name!r}]"
    _require_keys(where, entry, (*_ENTRY, "quarantined", "timing", "stack", "size"))
    s = statistics.states[name]
    for key in ("failures", "quarantined", "stack", "size"):
        _require_count(f"{where}.{key}", entry[key])
    if (entry["stack"], entry["size"]) != (s.spec.stack, s.spec.size):
        return  # of another model: `state.load` says so in better words
    if not isinstance(entry["estimated"], bool | int | float):
        _refuse(f"{where}.estimated", entry["estimated"], "True or False")
    _require_number(f"{where}.mean_eigenvalue", entry["mean_eigenvalue"])
    packed = [(s.spec.packed,)]
    average = [] if entry["average"] is None else [entry["average"]]
    _require_tensors(f"{where}.average", average, packed[: len(average)])
    history = entry["history"]
    if not isinstance(history, list | tuple) or len(history) > 2:
        _refuse(f"{where}.history", history, "a list of at most two tensors")
    _require_tensors(f"{where}.history", history, packed * len(history))
    if entry["inverse"] is not None:
        shapes = kept_shapes(s.spec, statistics.is_eigen(s))
        if s.spec.packing and has_dense(entry):
            shapes = inverse_shapes(s.spec, eigen=False)
        _require_tensors(f"{where}.inverse", entry["inverse"], shapes)
    owned = "average" in statistics.plan.parts_kept(name, statistics.comm.rank)
    # under `Budget` and `watch` one is kept that nothing else needs any more
    if owned and entry["estimated"] and not average:
        _refuse(f"{where}.average", None, "there if it was estimated")
    _require_timing(f"{where}.timing", entry["timing"])


def _require_timing(where: str, timing: Any) -> None:
    _require_fields(where, timing, Timing)
    for name in timing:
        # -1 is a step that has not been
        least = -1 if name.endswith("_at") else int(name in _AT_LEAST_ONE)
        _require_count(f"{where}.{name}", timing[name], least)


def _require_moment(where: str, entry: Any) -> None:
    _require_keys(where, entry, ("square", "steps"))
    _require_count(f"{where}.steps", entry["steps"])
    square = entry["square"]
    ok = isinstance(square, Tensor) and square.is_floating_point()
    if not ok or not bool((square.isfinite() & (square >= 0)).all()):
        _refuse(f"{where}.square", square, "a finite tensor >= 0")
    mean = entry.get("mean")
    if mean is not None:
        _require_tensors(f"{where}.mean", [mean], [tuple(square.shape)])


def _require_reference(where: str, entry: Any) -> None:
    _require_keys(where, entry, ("start", "usual", "steps"))
    _require_count(f"{where}.steps", entry["steps"])
    _require_tensors(f"{where}.start", [entry["start"]], [()])
    usual = [] if entry["usual"] is None else [entry["usual"]]
    _require_tensors(f"{where}.usual", usual, [()] * len(usual))


def _require_budget(budget: Any) -> None:
    if budget is None:
        return
    _require_keys("budget", budget, ("books", "costs"))
    _require_numbers("budget.books", budget["books"], Books)
    _require_count("budget.books.windows", budget["books"]["windows"])
    for name, entry in _dict("budget.costs", budget["costs"]).items():
        _require_numbers(f"budget.costs[{name!r}]", entry, Cost)


def _require_numbers(where: str, entry: Any, kind: type[Books] | type[Cost]) -> None:
    """Just the fields of a dataclass of seconds, of which only a credit may be < 0."""
    _require_fields(where, entry, kind)
    for name, value in entry.items():
        least = -math.inf if name == "credit" else 0.0
        _require_number(f"{where}.{name}", value, least)


def _require_tensors(where: str, found: Any, shapes: Sequence[tuple[int, ...]]) -> None:
    if not isinstance(found, list | tuple) or len(found) != len(shapes):
        _refuse(where, found, f"{len(shapes)} tensor(s)")
    for x, shape in zip(found, shapes, strict=True):
        ok = isinstance(x, Tensor) and x.is_floating_point()
        if not ok or tuple(x.shape) != shape or not bool(x.isfinite().all()):
            _refuse(where, x, f"a finite tensor of shape {shape}")


def _require_keys(where: str, entry: Any, names: Sequence[str]) -> None:
    missing = sorted(set(names) - set(_dict(where, entry)))
    if missing:
        _refuse(where, f"without {', '.join(missing)}", "complete")


def _require_fields(where: str, entry: Any, kind: Any) -> None:
    names = tuple(f.name for f in fields(kind))
    _require_keys(where, entry, names)
    if set(entry) != set(names):
        _refuse(where, sorted(entry), f"just {names}")


def _dict(where: str, entry: Any) -> Mapping[str, Any]:
    if not isinstance(entry, Mapping) or not all(isinstance(key, str) for key in entry):
        _refuse(where, entry, "a dict by name")
    return entry


def _require_count(where: str, value: Any, least: int = 0) -> None:
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    whole = isinstance(value, int | float) and value == value // 1
    if isinstance(value, bool) or not whole or value < least:
        _refuse(where, value, f"a whole number >= {least}")


def _require_number(where: str, value: Any, least: float = 0.0) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not (math.isfinite(value) and value >= least):
        _refuse(where, value, f"a finite number >= {least:g}")


def _refuse(where: str, value: Any, legal: str) -> NoReturn:
    text = repr(value)[:80]
    if isinstance(value, Tensor):
        text = f"a tensor of shape {tuple(value.shape)}"
    raise ValueError(
        f"Invalid {where}={text} in the saved natgrad state. Must be {legal}."
    )
