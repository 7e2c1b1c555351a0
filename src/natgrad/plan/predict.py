"""Modelled seconds of a plan's exchanges, and the strategy they speak for.

The formulas are those of `profile`; a step is taken phase by phase, without overlap.
``natgrad simulate`` adds the overlap.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from natgrad.plan.exchange import Exchange, Item
from natgrad.plan.plan import FLOAT_BYTES, Plan, make_plan
from natgrad.plan.profile import HardwareProfile
from natgrad.plan.spec import BlockSpec
from natgrad.plan.strategies import Strategy, find_strategy

CANDIDATES = (
    "factor_wise",
    "hybrid(0.5)",
    "hybrid(0.25)",
    "hybrid(0.125)",
    "layer_wise",
)
Weights = Mapping[str, float]


def exchange_seconds(
    plan: Plan,
    name: str,
    profile: HardwareProfile,
    *,
    names: Iterable[str] | None = None,
    weights: Weights | None = None,
    element_bytes: int = FLOAT_BYTES,
) -> float:
    """Seconds of one exchange, or of its items ``names``, sent in one go.

    ``weights`` scale items: the probability that a statistic is due.
    """
    exchange = plan.exchanges[name]
    items = exchange.items if names is None else exchange.select(names)
    sizes = [
        (i, element_bytes * i.elements * (1.0 if weights is None else weights[i.name]))
        for i in items
    ]
    sizes = [(item, size) for item, size in sizes if size > 0]
    if plan.world == 1 or not sizes:
        return 0.0
    return (
        _reduced(exchange, sizes, profile)
        if exchange.reduces
        else _shared(exchange, sizes, profile)
    )


def _reduced(
    exchange: Exchange, sizes: Sequence[tuple[Item, float]], profile: HardwareProfile
) -> float:
    """Everything goes one way to its first destination, then to the others."""
    world = exchange.world
    seconds = profile.move(sum(size for _, size in sizes), world)
    every = sum(s for i, s in sizes if len(i.destinations) == world)
    if every:
        seconds += profile.move(every, world)
    some = [(i, s) for i, s in sizes if 1 < len(i.destinations) < world]
    return seconds + _columns(some, world, profile)


def _shared(
    exchange: Exchange, sizes: Sequence[tuple[Item, float]], profile: HardwareProfile
) -> float:
    world = exchange.world
    to_all = [(i, s) for i, s in sizes if len(i.destinations) == world]
    seconds = _columns(
        [(i, s) for i, s in sizes if len(i.destinations) < world], world, profile
    )
    rows: dict[int, float] = {}
    for item, size in to_all:
        ranks = -(-world // len(item.sources))
        rows[ranks] = rows.get(ranks, 0.0) + size
    return seconds + sum(profile.move(size, ranks) for ranks, size in rows.items())


def _columns(
    sizes: Sequence[tuple[Item, float]], world: int, profile: HardwareProfile
) -> float:
    """Columns of the grid work side by side: the fullest one counts."""
    columns: dict[tuple[int, ...], float] = {}
    for item, size in sizes:
        columns[item.destinations] = columns.get(item.destinations, 0.0) + size
    if not columns:
        return 0.0
    ranks, size = max(columns.items(), key=lambda entry: entry[1])
    return profile.move_strided(size, len(ranks), -(-world // len(ranks)))


def slowest(plan: Plan) -> tuple[float, float]:
    """Seconds of the slowest rank's inversions, and of its preconditioning."""
    invert: dict[int, float] = {}
    for spec in plan.statistics:
        rank = plan.owners[spec.name]
        invert[rank] = invert.get(rank, 0.0) + plan.cost.invert(spec)
    apply: dict[int, float] = {}
    everyone = 0.0
    for block in plan.blocks:
        ranks = plan.workers[block.name]
        seconds = plan.cost.precondition(block)
        if len(ranks) == plan.world:
            everyone += seconds
            continue
        for rank in ranks:
            apply[rank] = apply.get(rank, 0.0) + seconds
    return max(invert.values(), default=0.0), everyone + max(
        apply.values(), default=0.0
    )


def added_seconds(
    plan: Plan, profile: HardwareProfile, statistics: float, inverses: float
) -> dict[str, float]:
    """Mean seconds a step that a plan adds, by phase.

    Statistics are reduced every ``statistics`` steps, inverted every ``inverses``.
    """
    invert, precondition = slowest(plan)
    scale = profile.slowdown(plan.world)
    return {
        "reduce_statistics": exchange_seconds(plan, "reduce_statistics", profile)
        / statistics,
        "invert": scale * invert / inverses,
        "share_inverses": exchange_seconds(plan, "share_inverses", profile) / inverses,
        "precondition": scale * precondition,
        "reduce_gradients": exchange_seconds(plan, "reduce_gradients", profile),
        "share_updates": exchange_seconds(plan, "share_updates", profile),
    }


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The strategy chosen, why, and what it costs.

    Attributes:
        strategy: Its name, as `find_strategy` takes it.
        reasons: A readable account: every candidate's seconds a step by phase.
        overhead: Predicted seconds a step over SGD's, as a fraction of SGD's; added
            seconds over SGD's exchange alone when ``compute`` is not known.
        seconds: Mean seconds a step added to forward and backward, by candidate.
    """

    strategy: str
    reasons: str
    overhead: float
    seconds: Mapping[str, float]


def choose_strategy(
    specs: Sequence[BlockSpec],
    world: int,
    profile: HardwareProfile,
    *,
    statistics: float = 10,
    inverses: float = 100,
    inverse: str = "eigen",
    gradients: str = "own",
    compute: float = 0.0,
    estimate: float = 0.0,
    placement: str = "longest_first",
    candidates: Sequence[str | Strategy] = CANDIDATES,
) -> Choice:
    """The candidate with the least mean seconds a step on this machine.

    Args:
        specs: The model's blocks.
        world: Number of ranks.
        profile: The machine.
        statistics, inverses: Steps between estimates, and between inversions.
        inverse: "eigen" or "factored".
        gradients: "own", or "ddp" if all ranks have the mean already.
        compute: Seconds of a forward and a backward pass on one rank.
        estimate: Seconds of estimating all statistics once on one rank.
        placement: As in `make_plan`.
        candidates: The strategies to compare, the preferred one first.
    """
    if not candidates:
        raise ValueError("Invalid candidates=(). Must name at least one strategy.")
    cost = profile.cost(inverse)
    phases: dict[str, dict[str, float]] = {}
    for each in candidates:
        plan = make_plan(
            specs,
            world=world,
            strategy=each,
            placement=placement,
            costs=cost,
            gradients=gradients,
            inverse=inverse,
        )
        phases[find_strategy(each).name] = added_seconds(
            plan, profile, statistics, inverses
        )
    sizes = FLOAT_BYTES * sum(block.elements for block in specs)
    sgd = 2 * profile.move(sizes, world)
    # DDP's all-reduce is part of every candidate as it is of SGD.
    common = (sgd if gradients == "ddp" else 0.0) + estimate / statistics
    totals = {name: common + sum(parts.values()) for name, parts in phases.items()}
    best = min(totals, key=lambda name: totals[name])
    base = compute + sgd
    overhead = (totals[best] - sgd) / base if base else 0.0
    return Choice(
        strategy=best,
        reasons=_reasons(best, totals, phases, overhead, profile, world),
        overhead=overhead,
        seconds=totals,
    )


def _reasons(
    best: str,
    totals: Weights,
    phases: Mapping[str, Weights],
    overhead: float,
    profile: HardwareProfile,
    world: int,
) -> str:
    heads = list(phases[best])
    width = max(len(name) for name in totals) + 1
    rows = [
        f"{best} on {world} ranks of {profile.name}: {1e3 * totals[best]:.3g} ms a "
        f"step beside forward and backward, {100 * overhead:+.1f}% over SGD",
        f"{'ms a step':<{width}}{'total':>10}" + "".join(f"{h:>19}" for h in heads),
    ]
    for name in sorted(totals, key=lambda name: totals[name]):
        cells = "".join(f"{1e3 * phases[name][h]:>19.3f}" for h in heads)
        rows.append(f"{name:<{width}}{1e3 * totals[name]:>10.3f}{cells}")
    return "\n".join(rows)
