"""Momentum of `SPNGD`: kept of each parameter by the ranks that update it.

A rank keeps the *velocity*: the last change of a parameter, or the running average of
its gradients. Beside an average it keeps its *mass*: the sum of the weights that the
gradients have in it, which a parameter has its own of, because it may get its first
gradient late, and because momentum may change.
"""

import math
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from natgrad.checkpoint.optimizer_state import require_setting
from natgrad.math import foreach
from natgrad.math.statistics import widen

if TYPE_CHECKING:
    from natgrad.engine.engine import Engine

VELOCITY, MASS = "velocity", "mass"
State = MutableMapping[Tensor, dict[str, Any]]


def velocity_of(state: State, p: Tensor, averages: bool) -> Tensor:
    """That of a parameter, at first zero; in float32 or better."""
    entry, like = state[p], widen(p)
    if VELOCITY not in entry:
        entry[VELOCITY] = torch.zeros_like(like)
        if averages:
            entry[MASS] = 0.0
    entry[VELOCITY] = entry[VELOCITY].to(like)  # the model may have been converted
    return entry[VELOCITY]


def averaged(
    state: State,
    params: Sequence[Tensor],
    gradients: Sequence[Tensor],
    momentum: float,
    nesterov: bool,
) -> list[Tensor]:
    """Add gradients to their running averages; returns those, without bias."""
    m, velocity = momentum, [velocity_of(state, p, True) for p in params]
    foreach.scale_(velocity, m)
    foreach.add_(velocity, gradients, 1 - m)
    for p in params:
        state[p][MASS] = m * state[p][MASS] + 1 - m
    masses = [state[p][MASS] for p in params]
    if nesterov:
        velocity = foreach.scaled(velocity, m)
        foreach.add_(velocity, gradients, 1 - m)
        masses = [m * mass + 1 - m for mass in masses]
    return foreach.divided(velocity, masses)


def gather_momentum(state: State, engine: "Engine", averages: bool) -> None:
    """Collective: every rank gets the momentum of all parameters."""
    comm = engine.comm
    if comm.world == 1:
        return
    sources = list(_first_workers(engine))
    for p, source in sources:
        velocity = velocity_of(state, p, averages).contiguous()
        state[p][VELOCITY] = comm.broadcast(velocity, source)
    if averages:
        held = [state[p][MASS] if r == comm.rank else 0.0 for p, r in sources]
        masses = comm.agree(engine.like.new_tensor(held, dtype=torch.float64))
        for (p, _), mass in zip(sources, masses.tolist(), strict=True):
            state[p][MASS] = mass


def _first_workers(engine: "Engine") -> Iterator[tuple[Tensor, int]]:
    for block in engine.blocks:
        for p in block.parameters:
            yield p, engine.plan.workers[block.name][0]


def worked_on(engine: "Engine", mine: bool) -> list[Tensor]:
    """The parameters that this rank updates, or the others."""
    rank, workers = engine.comm.rank, engine.plan.workers
    blocks = [b for b in engine.blocks if (rank in workers[b.name]) == mine]
    return [p for block in blocks for p in block.parameters]


def require_momentum(
    optimizer: Optimizer, engine: "Engine", averages: bool, state: Mapping[str, Any]
) -> None:
    """Raise unless the groups and the momentum that `SPNGD` saved can be gone on with.

    A rank needs the momentum only of what it works on; of the rest there may be none.
    ``averages``: whether it averages gradients.
    """
    idle = {id(p) for p in worked_on(engine, mine=False)}
    for own, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        require_setting(saved, "momentum", 1.0)
        require_setting(saved, "weight_decay", math.inf)
        for number, p in zip(saved["params"], own["params"], strict=True):
            entry = state["state"].get(number, {})
            missing = VELOCITY not in entry
            missing |= id(p) in idle and entry.get(VELOCITY) is None
            if not (missing or _fits(entry[VELOCITY], p)):
                raise ValueError(
                    f"Invalid velocity of parameter {number} in the saved optimizer "
                    f"state. Must be a finite tensor of shape {tuple(p.shape)}."
                )
            mass: Any = entry.get(MASS)
            if averages and not (missing or _is_share(mass)):
                raise ValueError(
                    f"Invalid mass={mass!r} of parameter {number} in the saved "
                    "optimizer state. Must be a number in [0, 1], as saved with "
                    "average='gradient'."
                )


def _is_share(x: Any) -> bool:
    return isinstance(x, int | float) and 0 <= x <= 1 + 1e-6  # it is a rounded sum


def _fits(x: Any, p: Tensor) -> bool:
    good = isinstance(x, Tensor) and x.is_floating_point() and x.shape == p.shape
    return good and bool(x.isfinite().all())
