"""Simulate steps of every kind a policy has, and average them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from natgrad.plan import HardwareProfile, Plan, make_plan
from natgrad_lab.simulate.events import Timeline
from natgrad_lab.simulate.policy import Kind, Policy, every, require_names
from natgrad_lab.simulate.roles import Conditions
from natgrad_lab.simulate.step import StepBuilder
from natgrad_lab.simulate.work import Work

PHASES = (
    "host",
    "forward",
    "sampled backward",
    "backward",
    "statistics",
    "reduce_statistics",
    "reduce_gradients",
    "invert",
    "share_inverses",
    "precondition",
    "share_updates",
    "agree",
    "control",
    "overhead",
    "update",
)

EVERY_STEP = every()


@dataclass(frozen=True, kw_only=True)
class Method:
    """What is simulated: ``sgd``, or a strategy with its placement and policy.

    ``costs`` place statistics: the profile's, as with ``strategy="auto"``, or the
    library's constants ("library"), as with a named strategy. ``scale`` is
    the rule and ``subsample`` the share of examples that statistics are of, as the
    library has them.
    """

    strategy: str = "factor_wise"
    placement: str = "longest_first"
    inverse: str = "eigen"
    gradients: str = "own"
    policy: Policy = EVERY_STEP
    costs: str = "profile"
    scale: str = "kronecker"
    subsample: int | None = 1

    @property
    def sgd(self) -> bool:
        return self.strategy == "sgd"

    @property
    def sharded(self) -> bool:
        return self.gradients == "sharded"


SGD = Method(strategy="sgd")


@dataclass(frozen=True, kw_only=True)
class Result:
    """A simulated step: mean seconds, and seconds of the critical chain by phase."""

    world: int
    strategy: str
    seconds: float
    phases: dict[str, float]
    longest: Timeline
    """The most expensive kind of step, for a picture."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, without the timeline."""
        return {
            "world": self.world,
            "strategy": self.strategy,
            "seconds": self.seconds,
            "phases": self.phases,
        }


def plan_of(work: Work, profile: HardwareProfile, world: int, method: Method) -> Plan:
    """The plan that a run of this method executes."""
    cost = profile.cost(method.inverse, method.scale)
    return make_plan(
        work.specs,
        world=world,
        strategy="factor_wise" if method.sgd else method.strategy,
        placement=method.placement,
        costs=None if method.costs == "library" else cost,
        gradients="ddp" if method.sgd and not method.sharded else method.gradients,
        inverse=method.inverse,
    )


def simulate(
    work: Work,
    profile: HardwareProfile,
    world: int,
    method: Method,
    conditions: Conditions | None = None,
) -> Result:
    """Mean step of a method on ``world`` ranks."""
    plan = plan_of(work, profile, world, method)
    require_names(method.policy, [spec.name for spec in plan.statistics])
    plain = (Kind(share=1.0, estimated=0.0, inverted=0.0),)
    seconds, longest, top = 0.0, Timeline(), -1.0
    phases: dict[str, float] = {}
    for kind in plain if method.sgd else method.policy:
        timeline = StepBuilder(
            work=work,
            profile=profile,
            conditions=conditions or Conditions(),
            plan=plan,
            kind=kind,
            scale=method.scale,
            subsample=method.subsample,
            sgd=method.sgd,
        ).build()
        end = timeline.run()
        seconds += kind.share * end
        for phase, value in timeline.phases().items():
            phases[phase] = phases.get(phase, 0.0) + kind.share * value
        if end > top:
            longest, top = timeline, end
    ordered = {phase: phases[phase] for phase in PHASES if phase in phases}
    return Result(
        world=world,
        strategy=method.strategy,
        seconds=seconds,
        phases=ordered,
        longest=longest,
    )


def passes(work: Work, profile: HardwareProfile, batch: int) -> tuple[float, float]:
    """Seconds of a forward and a backward on one rank, and of all estimates once."""
    kind = Kind(share=1.0, estimated=1.0, inverted=0.0)
    method = Method(policy=(kind,))
    phases = simulate(work, profile, 1, method, Conditions(batch=batch)).phases
    forward, backward = (phases.get(x, 0.0) for x in ("forward", "backward"))
    return forward + backward, phases.get("statistics", 0.0)


def scaling(
    work: Work,
    profile: HardwareProfile,
    worlds: Sequence[int],
    methods: Sequence[Method],
    conditions: Conditions | None = None,
) -> list[Result]:
    """Every method on every world."""
    return [simulate(work, profile, w, m, conditions) for m in methods for w in worlds]
