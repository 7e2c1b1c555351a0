"""The strategy that a machine is fastest with, and why."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from natgrad.plan.autotune.predict import added_seconds, nearest
from natgrad.plan.autotune.profile import HardwareProfile
from natgrad.plan.cost import CostModel
from natgrad.plan.plan import make_plan
from natgrad.plan.spec import FLOAT_BYTES, BlockSpec
from natgrad.plan.strategies import FIRST_PLACEMENT, Strategy, find_strategy

# From the least memory and traffic of inverses to the most.
CANDIDATES = (
    "layer_wise",
    "spngd",
    "hybrid(0.125)",
    "hybrid(0.25)",
    "hybrid(0.5)",
    "factor_wise",
)
# What differs by less is one to the model, whose own error is larger.
TIE = 0.05
Weights = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The strategy chosen, why, and what it costs.

    Attributes:
        strategy: Its name, as `find_strategy` takes it.
        seconds: Mean seconds a step beside forward and backward, by candidate.
        phases: The same by candidate and phase.
        sgd: Seconds a step of SGD's own exchange.
        compute: Seconds of a forward and a backward pass; 0 if not known.
        world, machine: Ranks, and the profile's name.
        cost: The profile's cost model, to place statistics by.
    """

    strategy: str
    seconds: Mapping[str, float]
    phases: Mapping[str, Weights]
    sgd: float
    compute: float
    world: int
    machine: str
    cost: CostModel

    @property
    def added(self) -> float:
        """Predicted seconds a step more than SGD's."""
        return self.seconds[self.strategy] - self.sgd

    @property
    def overhead(self) -> float | None:
        """The same as a fraction of SGD's step; None if ``compute`` is not known."""
        return self.added / (self.compute + self.sgd) if self.compute else None

    @property
    def compared(self) -> str:
        """What differences were taken relative to."""
        return "step" if self.compute else "seconds beside forward and backward"

    @property
    def reasons(self) -> str:
        """A readable account: every candidate's milliseconds a step by phase."""
        parts = self.phases[self.strategy]
        width = max(len(name) for name in self.seconds) + 1
        over = f" ({100 * self.overhead:+.1f}%)" if self.overhead is not None else ""
        rows = [
            f"{self.strategy} on {self.world} ranks of {self.machine}: "
            f"{1e3 * self.added:+.3g} ms a step over SGD{over}; of those within "
            f"{100 * TIE:.0f}% of the least {self.compared}, the one that shares least",
            f"{'ms a step':<{width}}{'total':>9}" + "".join(f"{p:>19}" for p in parts),
        ]
        for name in sorted(self.seconds, key=lambda name: self.seconds[name]):
            cells = "".join(f"{1e3 * self.phases[name][p]:>19.3f}" for p in parts)
            rows.append(f"{name:<{width}}{1e3 * self.seconds[name]:>9.3f}{cells}")
        return "\n".join(rows)


def choose_strategy(
    specs: Sequence[BlockSpec],
    world: int,
    profile: HardwareProfile,
    *,
    statistics: float = 10,
    inverses: float = 100,
    inverse: str = "eigen",
    scale: str = "kronecker",
    half: Collection[str] = (),
    gradients: str = "own",
    compute: float = 0.0,
    estimate: float = 0.0,
    placement: str = FIRST_PLACEMENT,
    candidates: Sequence[str | Strategy] = CANDIDATES,
) -> Choice:
    """The candidate with the least mean seconds a step on this machine.

    Of those within 5% of the fastest, the first: 5% of the step if ``compute`` is
    given, else of the seconds that a step takes beside forward and backward. By
    formulas without overlap, which `natgrad simulate` has.

    Args:
        specs: The model's blocks.
        world: Number of ranks.
        profile: The machine.
        statistics, inverses: Steps between estimates, and between inversions.
        inverse: "eigen" or "factored".
        scale: The name of the rule that preconditions.
        half: Exchanges in half precision.
        gradients: "own", or "ddp" if all ranks have the mean already.
        compute: Seconds of a forward and a backward pass on one rank.
        estimate: Seconds of estimating all statistics once on one rank.
        placement: As in `make_plan`.
        candidates: The strategies to compare, the preferred one first. Those that are
            the same on so many ranks are compared once.
    """
    if not candidates:
        raise ValueError("Invalid candidates=(). Must name at least one strategy.")
    cost = profile.cost(inverse, scale)
    crowd = profile.slowdown(world)
    sgd = sgd_exchange(specs, world, profile)
    # DDP's all-reduce is part of every candidate as it is of SGD.
    common = {"statistics": crowd * estimate / statistics} if estimate else {}
    common |= {"ddp": sgd} if gradients == "ddp" else {}
    plan = partial(make_plan, specs, world=world, placement=placement, costs=cost)
    plan = partial(plan, gradients=gradients, inverse=inverse)
    seconds = partial(added_seconds, statistics=statistics, inverses=inverses)
    phases = {
        each.name: common | seconds(plan(strategy=each), profile, half=half)
        for each in distinct(candidates, world)
    }
    totals = {name: sum(parts.values()) for name, parts in phases.items()}
    known = crowd * compute
    bound = (1 + TIE) * (known + min(totals.values())) - known
    return Choice(
        strategy=next(name for name, total in totals.items() if total <= bound),
        seconds=totals,
        phases=phases,
        sgd=sgd,
        compute=known,
        world=world,
        machine=profile.name,
        cost=cost,
    )


def distinct(candidates: Sequence[str | Strategy], world: int) -> list[Strategy]:
    """Candidates without those that do the same on so many ranks."""
    found: dict[tuple[int, bool], Strategy] = {}
    for strategy in map(find_strategy, candidates):
        sharded = strategy.shard_plain and world > 1
        found.setdefault((strategy.workers(world), sharded), strategy)
    return list(found.values())


def sgd_exchange(
    specs: Sequence[BlockSpec], world: int, profile: HardwareProfile
) -> float:
    """Seconds of SGD's all-reduce of all gradients."""
    size = FLOAT_BYTES * sum(block.elements for block in specs)
    if world > 1 and profile.collective("all_reduce", world):
        one = nearest(profile, "all_reduce", world)
        return one.begin + one(1, len(specs), size)
    return 2 * profile.move(size, world)
