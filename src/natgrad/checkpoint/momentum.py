"""Momentum of `SPNGD` and `Polar` between ranks and in saved states."""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from natgrad.checkpoint.optimizer_state import require_form, require_setting
from natgrad.checkpoint.sharded import KEY
from natgrad.factors.statistics import Statistics
from natgrad.layers import Block
from natgrad.math.shards import local
from natgrad.math.statistics import widen
from natgrad.rules.motion import MASS, VELOCITY, Average, State

if TYPE_CHECKING:
    from natgrad.spngd import SPNGD


def averages_of(statistics: Statistics) -> Iterator[tuple[Tensor, Average]]:
    """Every parameter that is ours, with what its momentum is an average of."""
    for block in statistics.block.values():
        for p in () if block.is_foreign else block.parameters:
            yield p, statistics.parts[block.name].average


def gather_momentum(state: State, statistics: Statistics) -> None:
    """Collective: every rank gets the momentum of all parameters.

    But for what is cut as its parameter is, which torch gathers as a parameter.
    """
    comm, blocks = statistics.comm, statistics.block.values()
    if comm.world == 1:
        return
    keep_whole(state, statistics, everywhere=True)
    cut = {id(p) for b in blocks if _is_cut(statistics, b) for p in b.parameters}
    first = {
        id(p): statistics.plan.workers[block.name][0]
        for block in blocks
        for p in block.parameters
    }
    massive: list[Tensor] = []
    for p, average in averages_of(statistics):
        if id(p) in cut:
            continue
        velocity = average.velocity(state, p).contiguous()
        state[p][VELOCITY] = comm.broadcast(velocity, first[id(p)])
        massive += [p] if average.keeps_mass else []
    if massive:
        held = [state[p][MASS] if first[id(p)] == comm.rank else 0.0 for p in massive]
        masses = comm.agree(statistics.like.new_tensor(held, dtype=torch.float64))
        for p, mass in zip(massive, masses.tolist(), strict=True):
            state[p][MASS] = mass


def _is_cut(statistics: Statistics, block: Block) -> bool:
    """Whether a block's momentum is cut as its parameters are, not whole on a worker.

    That of a sharded model's weights is. That of its gradients is whole where a rule
    is given a whole matrix.
    """
    matrix = block.kind is not None and statistics.parts[block.name].average.keeps_mass
    return _is_sharded(statistics) and not matrix


def _is_sharded(statistics: Statistics) -> bool:
    return statistics.plan.gradients == "sharded"


def keep_whole(
    state: State, statistics: Statistics, *, everywhere: bool = False
) -> None:
    """Begin the momentum of a sharded model that is whole on this rank."""
    rank, blocks = statistics.comm.rank, statistics.block.values()
    for block in blocks if _is_sharded(statistics) else ():
        here = everywhere or rank in statistics.plan.workers[block.name]
        if here and not (block.is_foreign or _is_cut(statistics, block)):
            average = statistics.parts[block.name].average
            for p in block.parameters:
                average.keep_whole(state, p, statistics.like.new_empty(p.shape))


def worked_on(statistics: Statistics, mine: bool) -> list[Tensor]:
    """Of our parameters those whose momentum this rank keeps, or the others.

    That of parameters that it updates; of a sharded model's, of all that are cut.
    """
    rank, workers = statistics.comm.rank, statistics.plan.workers
    ours = [b for b in statistics.block.values() if not b.is_foreign]
    blocks = [
        b for b in ours if (rank in workers[b.name] or _is_cut(statistics, b)) == mine
    ]
    return [p for b in blocks for p in b.parameters]


def require_momentum(
    optimizer: Optimizer,
    statistics: Statistics,
    tuned: bool,
    state: Mapping[str, Any],
) -> None:
    """Raise unless the groups and the momentum that `SPNGD` saved can be gone on with.

    A rank needs the momentum only of what it works on; of the rest there may be none.
    If it is ``tuned``, groups may have any number for it.
    """
    idle = {id(p) for p in worked_on(statistics, mine=False)}
    masses = {id(p) for p, average in averages_of(statistics) if average.keeps_mass}
    for own, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        if not tuned:
            require_setting(saved, "momentum", 1.0)
        require_setting(saved, "weight_decay", math.inf)
        for number, p in zip(saved["params"], own["params"], strict=True):
            entry = state["state"].get(number, {})
            missing = VELOCITY not in entry
            missing |= id(p) in idle and entry.get(VELOCITY) is None
            if not (missing or _fits(entry[VELOCITY], p)):
                legal = f"a finite tensor of shape {tuple(p.shape)}"
                _refuse("velocity", number, legal)
            mass: Any = entry.get(MASS)
            if mass is not None and id(p) not in masses:
                legal = "none with AverageUpdates(): it was saved with"
                _refuse(f"mass={mass!r}", number, f"{legal} AverageGradients()")
            if id(p) in masses and not (missing or _is_share(mass)):
                legal = "a number in [0, 1], as saved with AverageGradients()"
                _refuse(f"mass={mass!r}", number, legal)


def _refuse(what: str, number: Any, legal: str) -> NoReturn:
    raise ValueError(
        f"Invalid {what} of parameter {number} in the saved optimizer state. Must be "
        f"{legal}."
    )


def restore_velocity(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Take velocities as they were saved: torch casts them to the parameters' dtype."""
    numbers = [i for g in saved["param_groups"] for i in g["params"]]
    params = [p for g in optimizer.param_groups for p in g["params"]]
    for i, p in zip(numbers, params, strict=True):
        velocity = saved["state"].get(i, {}).get(VELOCITY)
        if velocity is not None:
            kept = velocity.to(p.device, widen(p).dtype, copy=True)
            optimizer.state[p][VELOCITY] = kept


def take_momentum(optimizer: "SPNGD", state: Mapping[str, Any]) -> list[str]:
    """Begin with the momentum of a saved state, and with nothing else of it. ::

        state = torch.load("polar.pt", weights_only=True)
        optimizer = natgrad.Muon(model)
        natgrad.take_momentum(optimizer, state)

    ``load_state_dict`` goes on with factors and second moments, so it refuses a state
    of other rules. This takes what rules share. Parameters are found by their names,
    so groups may differ. Groups with their learning rates, factors, second moments and
    the number of steps stay what they are.

    Momentum is taken where it is an average of the same thing, gradients or updates
    (`AverageGradients`, `AverageUpdates`), and begins at zero elsewhere. On several
    ranks the state must be whole: call ``gather()`` on every rank before it is saved.

    Args:
        optimizer: any natgrad optimizer but `KFAC`, whose momentum is its host's.
        state: what ``state_dict()`` of one returned, of the same parameters.

    Returns:
        The names of the parameters that have the saved momentum now.
    """
    require_form(state)
    statistics, entries = optimizer.engine.statistics, _by_name(state)
    if _is_sharded(statistics):
        raise ValueError(
            "take_momentum is for models that are whole on every rank. Must be so: "
            "take the momentum before fully_shard, and load it by "
            "torch.distributed.checkpoint."
        )
    _require_whole(state, statistics.comm.world)
    own = dict(_named(optimizer.param_groups))
    if set(own) != set(entries):
        raise ValueError(
            "The saved optimizer state is of other parameters: "
            f"{sorted(set(own) ^ set(entries))[:5]} are in one only. Must be the same."
        )
    averages = {id(p): average for p, average in averages_of(statistics)}
    mine = {id(p) for p in worked_on(statistics, mine=True)}
    taken = {
        name: entries[name]
        for name, p in own.items()
        if _can_take(name, p, entries[name], averages[id(p)])
    }
    for name, p in own.items():
        optimizer.state.pop(p, None)
        if name in taken and id(p) in mine:
            kept = taken[name][VELOCITY].to(p.device, widen(p).dtype, copy=True)
            optimizer.state[p] = {**taken[name], VELOCITY: kept}
    return list(taken)


def _can_take(name: str, p: Tensor, entry: Mapping[str, Any], average: Average) -> bool:
    """Whether saved momentum is of the same average; raises if it does not fit."""
    if VELOCITY not in entry or (MASS in entry) != average.keeps_mass:
        return False
    if not (_fits(entry[VELOCITY], p) and _is_share(entry.get(MASS, 1.0))):
        raise ValueError(
            f"Invalid momentum of {name!r} in the saved optimizer state. Must be a "
            f"finite tensor of shape {tuple(p.shape)} and a mass in [0, 1]."
        )
    return True


def _named(groups: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Names with what groups have as parameters; places stand for missing names."""
    place = 0
    for group in groups:
        names = group.get("param_names") or [None] * len(group["params"])
        for name, p in zip(names, group["params"], strict=True):
            named = p if isinstance(p, str) else name
            yield (f"parameter {place}" if named is None else str(named)), p
            place += 1


def _by_name(state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Velocity and mass, as far as they are saved, by a parameter's name."""
    found: dict[str, dict[str, Any]] = {}
    for name, number in _named(state["param_groups"]):
        entry = state["state"].get(number, {})
        kept = {key: entry.get(key) for key in (VELOCITY, MASS)}
        found[name] = {key: x for key, x in kept.items() if x is not None}
    return found


def _require_whole(state: Mapping[str, Any], world: int) -> None:
    part = state[KEY].get("part") if isinstance(state.get(KEY), Mapping) else None
    if part is not None and (world > 1 or part[1] > 1):
        raise ValueError(
            f"The saved optimizer state is one rank's part, {part!r}. Must be whole: "
            "call gather() on every rank before it is saved."
        )


def _is_share(x: Any) -> bool:
    return isinstance(x, int | float) and 0 <= x <= 1 + 1e-6  # it is a rounded sum


def _fits(x: Any, p: Tensor) -> bool:
    good = isinstance(x, Tensor) and x.is_floating_point() and x.shape == p.shape
    return good and bool(local(x).isfinite().all())
