"""What inversions will cost, from shapes alone: to announce them and to pace them.

Note [A pace that follows cost]
The cost model knows what each inversion takes, and of a step what applying the inverses
takes and, from how many vectors a layer was seen to multiply, its forward and backward.
Under `natgrad.Paced` inversions may take a share of that: a statistic that costs c
seconds is inverted every ``sqrt(c) sum(sqrt(c)) / (share step)`` steps, or more rarely.
The sum of c over these intervals is the share, and a factor that costs four times as
much waits twice as long.

Nothing here is measured. The constants are those of a kind of device, and the work is
that of all ranks together, so that every rank, any number of them, and a run that was
resumed come to the same intervals.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from natgrad.plan.cost import CostModel
from natgrad.plan.spec import BlockSpec, StatisticSpec

if TYPE_CHECKING:
    import torch

SLOW = 2.0
"""Seconds above which a first refresh is announced."""
CORE = CostModel(
    eigen_cubic=1.1e-10,
    eigen_square=4e-8,
    factored_cubic=1.5e-11,
    factored_square=1.6e-8,
    invert_call=2e-4,
    call=3e-4,
    flop=1.4e-11,
)
"""One core of an AMD EPYC, as ``natgrad calibrate`` found it. A plan needs only ratios
of seconds, on which more cores tell less; what is said to a user should be near."""


def built_in_cost(device: torch.device, inverse: str, rule: str) -> CostModel:
    """The cost model of a kind of device, whatever was calibrated."""
    if device.type != "cuda":
        return replace(CORE, inverse=inverse, scale=rule)
    from natgrad.plan.autotune.profile import (
        built_in,  # slow to import, and of GPUs alone
    )

    return built_in(device, 1).cost(inverse, rule)


def paces(
    blocks: Sequence[BlockSpec],
    counts: Mapping[str, float],
    cost: CostModel,
    share: float,
) -> dict[str, int]:
    """The least steps between two inversions of each statistic, by name.

    ``counts`` are how many terms each statistic had in a step, on all ranks. Those of
    its input statistic are the vectors that a layer multiplies.
    """
    step = 0.0
    for block in blocks:
        vectors = max((counts.get(s.name, 0.0) for s in block.statistics), default=0.0)
        step += cost.passes(block, vectors) + cost.precondition(block)
    allowed = share * step
    specs = [spec for block in blocks for spec in block.statistics]
    roots = {spec.name: math.sqrt(cost.invert(spec)) for spec in specs}
    total = sum(roots.values())
    return {name: math.ceil(root * total / allowed) for name, root in roots.items()}


def refresh_seconds(
    specs: Iterable[StatisticSpec], owners: Mapping[str, int], cost: CostModel
) -> float:
    """Seconds to invert these on the rank that has most to do."""
    loads: dict[int, float] = defaultdict(float)
    for spec in specs:
        loads[owners[spec.name]] += cost.invert(spec)
    return max(loads.values(), default=0.0)


def first_refresh(
    specs: Sequence[StatisticSpec],
    owners: Mapping[str, int],
    cost: CostModel,
    device: torch.device,
) -> str | None:
    """What to say before these are inverted for the first time; None if it is quick."""
    seconds = refresh_seconds(specs, owners, cost)
    if seconds <= SLOW:
        return None
    slowest = max(specs, key=cost.invert)
    return (
        f"natgrad: inverting {len(specs)} statistics for the first time, about "
        f"{seconds:.0f} s expected (built-in rates {rates(device)}); the longest takes "
        f"{slowest.name} ({described(slowest)}). largest_factor= bounds their size."
    )


def rates(device: torch.device) -> str:
    """Whose seconds these are."""
    return "of one CPU core" if device.type != "cuda" else "of a GPU"


def described(spec: StatisticSpec) -> str:
    """How a statistic is kept: ``1025``, ``9x1025`` of a stack, ``7 diagonal``."""
    stack = f"{spec.stack}x" if spec.stack > 1 else ""
    return f"{stack}{spec.size}{' diagonal' if spec.diagonal else ''}"
