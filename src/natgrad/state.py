"""What is kept of each statistic between steps, and how it is saved."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from natgrad.math.inverse import Inverse
from natgrad.plan.spec import StatisticSpec
from natgrad.refresh import Timing

VERSION = 1


@dataclass(kw_only=True)
class StatisticState:
    """One statistic.

    Attributes:
        average: the running average, packed, on the owner; None before the first
            estimate, and after an inversion if nothing will need it again.
        mean_eigenvalue: of that average, known on every rank; for the pi-split.
        inverse: what preconditions: ``(X^-1,)`` or ``(Q, v)``; on owner and workers.
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
    states: Mapping[str, StatisticState], saved: Mapping[str, Any], like: Tensor
) -> int:
    """Put saved statistics into ``states``; returns the step. All or nothing.

    Tensors keep their saved dtype and go to the device of ``like``.
    """
    _require_match(states, saved)
    for name, entry in saved["statistics"].items():
        _load_one(states[name], entry, like)
    return int(saved["step"])


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


def _load_one(state: StatisticState, entry: Mapping[str, Any], like: Tensor) -> None:
    def move(x: Tensor) -> Tensor:
        return x.detach().to(like.device, copy=True)

    average, inverse = entry["average"], entry["inverse"]
    state.average = None if average is None else move(average)
    state.inverse = None if inverse is None else tuple(move(x) for x in inverse)
    state.history = [move(x) for x in entry["history"]]
    state.mean_eigenvalue = float(entry["mean_eigenvalue"])
    state.estimated = bool(entry["estimated"])
    state.failures = int(entry["failures"])
    state.quarantined = int(entry["quarantined"])
    state.timing = Timing(**entry["timing"])


def _require_match(
    states: Mapping[str, StatisticState], saved: Mapping[str, Any]
) -> None:
    version = saved.get("version")
    if version != VERSION:
        raise ValueError(
            f"Invalid version={version!r} in the saved natgrad state. "
            f"Must be {VERSION}."
        )
    statistics: Mapping[str, Any] = saved["statistics"]
    for name in {**states, **statistics}:
        if name not in states or name not in statistics:
            where = "the saved state" if name in states else "this model"
            raise ValueError(
                f"Statistic {name!r} is missing in {where}: the model or the options "
                "norm= and skip= differ from those that saved it."
            )
        spec, entry = states[name].spec, statistics[name]
        if (entry["stack"], entry["size"]) != (spec.stack, spec.size):
            raise ValueError(
                f"Statistic {name!r} was saved with size {entry['size']} (stack "
                f"{entry['stack']}). Must be {spec.size} (stack {spec.stack})."
            )
