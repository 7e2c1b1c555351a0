"""Ranks that would train differently: one error on all of them, which names why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.construct import construct
from tests.support.fleet import METHODS, Fleet, network, outcome, quick
from tests.support.world import run_world
from torch import nn

import natgrad

pytestmark = pytest.mark.processes


def named_groups(model: Any, swapped: bool) -> list[dict[str, Any]]:
    first, second = dict(model[0].named_parameters()), dict(model[3].named_parameters())
    rest = {f"1.{k}": v for k, v in model[1].named_parameters()}
    groups = [
        [*{f"0.{k}": v for k, v in first.items()}.items(), *rest.items()],
        [*{f"3.{k}": v for k, v in second.items()}.items()],
    ]
    return [{"params": g} for g in (groups[::-1] if swapped else groups)]


def made_on(rank: int, case: str) -> tuple[str, str, float]:
    odd = rank == 1
    model = network()
    if case == "kfac":
        optimizer = torch.optim.SGD if odd else torch.optim.Adagrad
        return outcome(
            lambda: natgrad.KFAC(model, optimizer(model.parameters(), lr=0.1))
        )
    groups = named_groups(model, odd) if case == "groups" else None
    options: dict[str, dict[str, Any]] = {
        "nesterov": {"average": natgrad.AverageUpdates(nesterov=odd)},
        "decay": {"decay": natgrad.Rescaled() if odd else natgrad.Coupled()},
        "beta2": {"fallback": natgrad.Adam(beta2=0.9 if odd else 0.8)},
    }
    chosen = options.get(case, {})
    return outcome(lambda: construct(natgrad.SPNGD, model, groups, lr=0.1, **chosen))


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("nesterov", "average: AverageUpdates(nesterov=False) on ranks [0, 2], Ave"),
        ("decay", "decay: Coupled() on ranks [0, 2], Rescaled() on ranks [1]"),
        ("beta2", "beta2=0.8, damping=0.001) on ranks [0, 2], Adam(rate=1.0, beta2="),
        ("groups", "parameters of group 1: 3.bias, 3.weight on ranks [0, 2], 0.bias"),
        ("kfac", "optimizer: 'Adagrad' on ranks [0, 2], 'SGD' on ranks [1]"),
    ],
)
def test_options_of_the_rule_are_compared(case: str, words: str) -> None:
    errors = run_world(3, made_on, case)
    assert {kind for kind, _, _ in errors} == {"ValueError"}
    assert len({message for _, message, _ in errors}) == 1
    message = errors[0][1]
    assert message.startswith("Ranks have different options:\n")
    assert words in message
    if case != "groups":
        assert len(message.splitlines()) == 2  # and nothing else


def change(rank: int, method: str, case: str) -> Any:
    quick()
    odd = rank == 1
    options: dict[str, Any] = {}
    rate = 0.05
    if case == "damping":
        options["damping"] = (lambda step: 0.1) if odd else (lambda step: 0.2)
    elif case == "intervals":
        options["refresh"] = natgrad.Every(
            inverses=(lambda step: 2) if odd else (lambda step: 1)
        )
    elif case == "lr at first":
        rate = 0.1 if odd else 0.05
    fleet = Fleet(method, rank, lr=rate, **options)
    if case in ("lr", "momentum", "weight_decay"):
        fleet.step()
        if odd:
            fleet.optimizer.param_groups[0][case] = 0.01
    elif case == "tensor":
        fleet.optimizer.param_groups[0]["lr"] = torch.tensor(0.1 if odd else 0.2)
    elif case == "group":
        extra = nn.Parameter(torch.zeros(2))
        if odd:
            fleet.optimizer.add_param_group({"params": [extra]})
    before = fleet.weights()
    found = outcome(fleet.step)
    after = fleet.weights()
    again = ""
    if case == "lr":  # put right on every rank, all can go on
        fleet.optimizer.param_groups[0][case] = 0.05
        again = outcome(lambda: fleet.step(2))[1]
    return found, torch.equal(before, after), again


@pytest.mark.parametrize(
    ("method", "case", "words"),
    [
        ("spngd", "lr", "lr of group 0: 0.05 on ranks [0], 0.01 on ranks [1]"),
        ("polar", "momentum", "momentum of group 0: 0.9 on ranks [0], 0.01 on ranks"),
        ("spngd", "weight_decay", "weight_decay of group 0: 0.0 on ranks [0], 0.01"),
        ("kfac", "lr", "lr of group 0: 0.05 on ranks [0], 0.01 on ranks [1]"),
        ("kfac ddp", "lr at first", "lr of group 0: 0.05 on ranks [0], 0.1 on ranks"),
        ("kfac ddp", "tensor", "lr of group 0: 0.2"),
        ("polar", "damping", "damping: 0.2 on ranks [0], 0.1 on ranks [1]"),
        ("kfac", "intervals", "next inverses: 1 on ranks [0], 2 on ranks [1]"),
        ("kfac ddp", "group", "lr of group 1: not given on ranks [0], 0.05 on ranks"),
    ],
)
def test_settings_are_compared_in_each_step(method: str, case: str, words: str) -> None:
    (first, same, again), *others = run_world(2, change, method, case)
    kind, message, _ = first
    assert (kind, words in message) == ("ValueError", True), (kind, message)
    assert same
    assert not again
    assert [(found[:2], s, a) for found, s, a in others] == [
        ((kind, message), True, "")
    ]


def drift(rank: int, method: str) -> Any:
    quick()
    fleet = Fleet(method, rank, comm={"check_weights": 3})
    # SPNGD and Polar send weights in each step, so that a change lasts for one
    fleet.step(2 if method.startswith("kfac") else 3)
    if rank == 1:
        with torch.no_grad():
            fleet.plain[1].weight[2] += 0.5
    return outcome(lambda: fleet.step(2))


@pytest.mark.parametrize("method", METHODS)
def test_weights_that_differ_are_named_after_one_interval(method: str) -> None:
    found = run_world(3, drift, method)
    kind, message, _ = found[0]
    assert [other[:2] for other in found] == [(kind, message)] * 3
    assert (kind, message.partition(":")[0]) == (
        "ValueError",
        "Weights differ between ranks in step 3",
    )
    assert "1.weight: ranks [0, 2] and ranks [1]" in message


def lose_gradient(rank: int, strategy: str) -> Any:
    quick()
    fleet = Fleet("kfac ddp", rank, strategy=strategy)
    fleet.step()
    fleet.backward()
    if rank == 1:
        fleet.plain[3].weight.grad = None
    found = outcome(fleet.optimizer.step)
    weights = fleet.weights()
    return found, weights


@pytest.mark.parametrize("strategy", ["factor_wise", "layer_wise"])
def test_a_gradient_that_is_none_on_one_rank_under_ddp(strategy: str) -> None:
    (found, weights), (also, others) = run_world(2, lose_gradient, strategy)
    assert found[:2] == also[:2]
    assert found[0] == "ValueError"
    assert "3: there on ranks [0], None on ranks [1]" in found[1]
    assert torch.equal(weights, others)
