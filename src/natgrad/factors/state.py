"""What is kept of each statistic between steps, and how it is saved and sent."""

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from natgrad.factors.refresh import Timing
from natgrad.math.inverse import Inverse
from natgrad.math.packing import flatten, unflatten, with_zero
from natgrad.plan.spec import StatisticSpec
from natgrad.rules.preconditioner import kept

VERSION = 3
WRITERS = {
    1: "natgrad 0.1.0 from before the update rules",
    2: "natgrad 0.1.0 from before rules were parts (scale=, damping_style=)",
}
"""What wrote states of earlier versions, which have other keys and bases."""


@dataclass(kw_only=True)
class StatisticState:
    """One statistic.

    Attributes:
        average: the running average, packed, on the owner; None before the first
            estimate, and after an inversion if nothing will need it again.
        mean_eigenvalue: of that average, known on every rank; for the pi-split.
        inverse: what preconditions: ``(X^-1,)`` or ``(Q, v)``; on owner and workers. Of
            a rule that has it packed, upper triangles: see `kept`.
        history: the last damped inverse and the one before, packed, on the owner.
        timing: when it is due, the same on every rank.
        failures: inversions that failed in a row.
        quarantined: estimates that were thrown away because they were not finite.
    """

    spec: StatisticSpec
    average: Tensor | None = None
    mean_eigenvalue: float = 0.0
    estimated: bool = False
    inverse: Inverse | None = None
    history: list[Tensor] = field(default_factory=lambda: [])
    timing: Timing = field(default_factory=Timing)
    failures: int = 0
    quarantined: int = 0

    def bytes(self) -> int:
        """Bytes of the tensors kept on this rank."""
        tensors = [*(self.inverse or ()), *self.history]
        if self.average is not None:
            tensors.append(self.average)
        return sum(x.numel() * x.element_size() for x in tensors)


def save(states: Iterable[StatisticState], step: int) -> dict[str, Any]:
    """Tensors and numbers only, keyed by statistic name: loadable without pickle."""
    return {
        "version": VERSION,
        "step": step,
        "statistics": {s.spec.name: _save_one(s) for s in states},
    }


def load(
    states: MutableMapping[str, StatisticState],
    saved: Mapping[str, Any],
    like: Tensor,
    dtype: torch.dtype | None = None,
) -> int:
    """Put saved statistics into ``states``; returns the step. All or nothing.

    Tensors go to the device of ``like`` and, given a ``dtype``, to that.
    """
    require_version(saved.get("version"))
    _require_match(states, saved["statistics"])
    step = int(saved["step"])
    entries = saved["statistics"].items()
    loaded = {n: _load_one(states[n].spec, x, like.device, dtype) for n, x in entries}
    states.update(loaded)
    return step


def _save_one(state: StatisticState) -> dict[str, Any]:
    return {
        "stack": state.spec.stack,
        "size": state.spec.size,
        "average": state.average,
        "inverse": None if state.inverse is None else list(state.inverse),
        "history": list(state.history),
        "mean_eigenvalue": state.mean_eigenvalue,
        "estimated": state.estimated,
        "failures": state.failures,
        "quarantined": state.quarantined,
        "timing": asdict(state.timing),
    }


def _load_one(
    spec: StatisticSpec,
    entry: Mapping[str, Any],
    device: torch.device,
    dtype: torch.dtype | None,
) -> StatisticState:
    def move(x: Tensor) -> Tensor:
        return x.detach().to(device, dtype or x.dtype, copy=True)

    average, saved = entry["average"], entry["inverse"]
    inverse = None if saved is None else tuple(move(x) for x in saved)
    if spec.packing and inverse is not None and has_dense(entry):
        inverse = kept(inverse, spec)
    return StatisticState(
        spec=spec,
        average=None if average is None else move(average),
        inverse=inverse,
        history=[move(x) for x in entry["history"]],
        mean_eigenvalue=float(entry["mean_eigenvalue"]),
        estimated=bool(entry["estimated"]),
        failures=int(entry["failures"]),
        quarantined=int(entry["quarantined"]),
        timing=Timing(**entry["timing"]),
    )


def has_dense(entry: Mapping[str, Any]) -> bool:
    """Whether what is saved may be of before it was kept packed."""
    found = entry["inverse"]
    one = isinstance(found, list | tuple) and len(found) == 1  # pyright: ignore[reportUnknownArgumentType]
    return one and isinstance(found[0], Tensor) and found[0].dim() == 3


def require_version(version: Any) -> None:
    """Raise unless a state is of this version, and say which natgrad wrote it."""
    if type(version) is int and version == VERSION:
        return
    known = WRITERS.get(version) if type(version) is int else None
    newer = type(version) is int and version > VERSION
    writer = known or ("a newer natgrad" if newer else "something else than natgrad")
    raise ValueError(
        f"Invalid version={version!r} in the saved natgrad state: it was written by "
        f"{writer}. Must be {VERSION}: load it with the natgrad that wrote it, or go "
        "on from the model's weights alone."
    )


def require_part(part: Sequence[Any] | None, here: Sequence[Any]) -> None:
    """Raise unless a saved state is whole, or the part of this rank under this plan."""
    if part is not None and list(part) != list(here):
        raise ValueError(
            f"The saved natgrad state is the part of rank {part[0]} of {part[1]} "
            f"under plan {part[2]}. Must be that of rank {here[0]} of {here[1]} "
            f"under plan {here[2]}, or a whole one: call gather() on every rank "
            "before state_dict()."
        )


def _require_match(
    states: Mapping[str, StatisticState], statistics: Mapping[str, Any]
) -> None:
    for name in {**states, **statistics}:
        if name not in states or name not in statistics:
            where = "the saved state" if name in states else "this model"
            raise ValueError(
                f"Statistic {name!r} is missing in {where}: the model or the options "
                "rule=, norm= and skip= differ from those that saved it."
            )
        spec, entry = states[name].spec, statistics[name]
        if (entry["stack"], entry["size"]) != (spec.stack, spec.size):
            raise ValueError(
                f"Statistic {name!r} was saved with size {entry['size']} (stack "
                f"{entry['stack']}). Must be {spec.size} (stack {spec.stack}): the "
                "model or the option largest_factor= differs."
            )


def pack(inverse: Inverse, spec: StatisticSpec, form: str) -> Tensor:
    """What is kept of a prepared factor as one vector: symmetric ones half as long."""
    if form == "eigen":
        return torch.cat([x.flatten() for x in inverse])
    return triangle(inverse[0], spec) if spec.packing else flatten(inverse[0])


def triangle(rows: Tensor, spec: StatisticSpec) -> Tensor:
    """One vector of the packed triangles that are kept, without their zeros."""
    return (rows[:, :-1] if spec.packing == "upper" else rows).flatten()


def unpack(flat: Tensor, spec: StatisticSpec, form: str) -> Inverse:
    """The inverse of `pack`."""
    stack, size = spec.stack, spec.size
    if spec.packing:
        rows = flat.view(stack, -1)
        return (with_zero(rows) if spec.packing == "upper" else rows,)
    if form != "eigen":
        return (unflatten(flat, stack, size, spec.diagonal),)
    vectors, values = flat.split([flat.numel() - stack * size, stack * size])
    if not spec.diagonal:
        vectors = vectors.reshape(stack, size, size)
    return vectors, values.reshape(stack, size)
