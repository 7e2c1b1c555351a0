"""When factors of the weight's own gradient are refreshed, under every policy."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.world import run_world
from torch import Tensor, nn

from natgrad import (
    SPNGD,
    Adaptive,
    Budget,
    EigenAdam,
    Every,
    Free,
    Kronecker,
    Paced,
    Refresh,
    Rule,
)

STEPS, LR, DECAY, SHARE = 12, 0.05, 0.9, 1.0
SHAMPOO = Kronecker(source="gradients", power=0.25, style="whole")
EIGEN = EigenAdam(source="gradients", moments="keep", beta2=0.9)
# damping is split by the traces of both factors, which may have two owners
SPLIT = Kronecker(source="gradients", power=0.25, style="factored")
POLICIES: dict[str, Refresh] = {
    "every": Every(2, 4),
    "paced": Paced(Every(1, 1), share=SHARE),
    "adaptive": Adaptive(0.3),
    "budget": Budget(50.0),
}
Names = list[tuple[tuple[str, ...], tuple[str, ...]]]


def net() -> nn.Sequential:
    """Square: a factor of one gradient has no null space."""
    torch.manual_seed(0)
    layers = nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False)
    return nn.Sequential(*layers).double()


def backward(model: nn.Module, step: int, rank: int = 0, world: int = 1) -> None:
    source = torch.Generator().manual_seed(step)
    x, y = (torch.randn(12, 4, generator=source, dtype=torch.float64) for _ in "xy")
    share = slice(rank * 12 // world, (rank + 1) * 12 // world)
    model.zero_grad()
    (model(x[share]) - y[share]).square().sum(1).mean().backward()


def made(model: nn.Module, rule: Rule, refresh: Refresh, **changes: Any) -> SPNGD:
    options: dict[str, Any] = {
        "rule": rule,
        "length": Free(),
        "momentum": 0.0,
        "damping": 1e-3,
        "factor_decay": DECAY,
        "refresh": refresh,
        "lr": LR,
    }
    return SPNGD(model, options=replace(SPNGD.defaults, **(options | changes)))


Update = Callable[[Tensor, dict[str, Any]], Tensor]


def fourth_roots(g: Tensor, state: dict[str, Any]) -> Tensor:
    for side in "RL":
        values, vectors = state[f"prepared {side}"]
        root = vectors @ torch.diag((values + 1e-3) ** -0.25) @ vectors.T
        g = g @ root if side == "R" else root @ g
    return g


def adam_in_the_bases(g: Tensor, state: dict[str, Any]) -> Tensor:
    right, left = (state[f"prepared {side}"][1] for side in "RL")
    rotated = left.T @ g @ right
    state["S"] = 0.9 * state.get("S", 0.0) + 0.1 * rotated**2
    state["steps"] = state.get("steps", 0) + 1
    square = state["S"] / (1 - 0.9 ** state["steps"])
    scale = square.sqrt() + 1e-3 * square.mean().sqrt()
    return left @ (rotated / scale) @ right.T


def followed(model: nn.Sequential, update: Update, refreshed: Names) -> list[Tensor]:
    """Train by hand, with factors and bases refreshed at the given steps only."""
    states: dict[str, dict[str, Any]] = {"0": {}, "2": {}}
    for step, (estimated, inverted) in enumerate(refreshed):
        backward(model, step)
        for name, state in states.items():
            weight: Any = model[int(name)].weight
            for side, x in (
                ("R", weight.grad.T @ weight.grad),
                ("L", weight.grad @ weight.grad.T),
            ):
                sums, mass = state.get(side, (0.0, 0.0))
                if f"{name}/{side}" in estimated:
                    sums, mass = DECAY * sums + x, DECAY * mass + 1
                    state[side] = sums, mass
                if f"{name}/{side}" in inverted:
                    state[f"prepared {side}"] = torch.linalg.eigh(sums / mass)
            weight.data -= LR * update(weight.grad, state)
    return [p.detach() for p in model.parameters()]


def trained(rule: Rule, refresh: Refresh) -> tuple[list[Tensor], Names]:
    model, names = net(), Names()
    with made(model, rule, refresh) as optimizer:
        for step in range(STEPS):
            backward(model, step)
            optimizer.step()
            last = optimizer.refreshes()["last"]
            names.append((tuple(last["estimated"]), tuple(last["inverted"])))
    return [p.detach() for p in model.parameters()], names


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("rule", "update"), [(SHAMPOO, fourth_roots), (EIGEN, adam_in_the_bases)]
)
def test_steps_use_the_factors_that_the_policy_has_left(
    rule: Rule, update: Update, policy: str
) -> None:
    found, refreshed = trained(rule, POLICIES[policy])
    for p, q in zip(found, followed(net(), update, refreshed), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-8, atol=1e-10)
    inverted = sum(len(names) for _, names in refreshed)
    assert len(refreshed[0][1]) == 4
    # more than once, and not always, so that something was stale
    assert 8 <= inverted < 4 * STEPS


def counts(rule: Rule, refresh: Refresh) -> list[int]:
    """How many of the four factors each step inverted."""
    return [len(names) for _, names in trained(rule, refresh)[1]]


@pytest.mark.parametrize("rule", [SHAMPOO, EIGEN])
def test_policies_decide_for_them_as_for_others(rule: Rule) -> None:
    every = [4 if step % 4 == 0 else 0 for step in range(STEPS)]
    assert counts(rule, Every(2, 4)) == every
    estimated = [len(names) for names, _ in trained(rule, Every(2, 4))[1]]
    assert estimated == [4 if step % 2 == 0 else 0 for step in range(STEPS)]
    assert counts(rule, Paced(Every(1, 1), share=1e9)) == [4] * STEPS
    assert counts(rule, Adaptive(1e-12)) == [4] * STEPS
    # everything counts as similar: intervals grow by Fibonacci's numbers
    assert counts(rule, Adaptive(1e12)) == [4, 4, 4, 0, 4, 0, 0, 4, 0, 0, 0, 0]


CASES = [
    (rule, refresh, strategy)
    for rule in (SHAMPOO, EIGEN, replace(EIGEN, late=True), SPLIT)
    for refresh in (Every(2, 4), POLICIES["paced"], POLICIES["adaptive"])
    for strategy in ("spngd", "hybrid(0.5)", "factor_wise")
]


def on_ranks(rank: int, world: int) -> list[tuple[Tensor, Any]]:
    found: list[tuple[Tensor, Any]] = []
    budgets = [(SHAMPOO, POLICIES["budget"], "spngd")] * (world > 1)
    for rule, refresh, strategy in [*CASES, *budgets]:
        model = net()
        with made(model, rule, refresh, strategy=strategy) as optimizer:
            for step in range(6):
                backward(model, step, rank, world)
                optimizer.step()
            timing = optimizer.refreshes()["statistics"]
        found.append((torch.cat([p.detach() for p in model.parameters()]), timing))
    return found


def test_ranks_refresh_together_and_as_one_process() -> None:
    alone = on_ranks(0, 1)
    first, second = run_world(2, on_ranks, 2)
    for case, (one, here, there) in enumerate(zip(alone, first, second, strict=False)):
        assert one[1] == here[1] == there[1], CASES[case]
        for weights in (here[0], there[0]):
            torch.testing.assert_close(weights, one[0], rtol=1e-7, atol=1e-9)
    # seconds are each rank's own, decisions are not
    assert first[-1][1] == second[-1][1]
    torch.testing.assert_close(first[-1][0], second[-1][0], rtol=0, atol=0)
