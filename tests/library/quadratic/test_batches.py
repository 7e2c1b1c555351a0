"""Steps that one batch chooses, and what the next ones say of them."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import nn

import natgrad
from natgrad.math.quadratic import (
    expected_fall,
    followed,
    followed_fall,
    is_straight,
    trusted,
)


def test_trust_falls_where_steps_are_too_long_for_other_batches() -> None:
    assert trusted(0.5, 0.0, 2.0) == 0.5
    assert trusted(0.5, 1.0, 2.0) == pytest.approx(0.5 * math.exp(-0.05))
    assert trusted(0.5, -1.0, 2.0) == pytest.approx(0.5 * math.exp(0.05))
    assert trusted(0.5, 1.0, 0.0) == 0.5
    assert trusted(1.0, -9.0, 1.0) == 1.0
    assert trusted(1e-3, 9.0, 1.0) == 1e-3


def test_a_step_that_is_bad_for_the_next_batch_is_taken_back() -> None:
    """One example asks for a weight of 100, the next for none."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 0.1)
    auto = natgrad.AutoDamping(initial=1e-8)
    options = dataclasses.replace(natgrad.SPNGD.auto, damping=auto)
    optimizer = natgrad.SPNGD(model, options=options)
    seen: list[float] = []
    for x, y in ((0.01, 1.0), (1.0, 0.0), (1.0, 0.0)):

        def closure(x: float = x, y: float = y) -> Any:
            outputs = model(torch.tensor([[x]]))
            return outputs, (outputs - y).square().mean()

        loss = float(optimizer.step(closure))
        seen.append(model.weight.item())
        assert loss <= 1.0  # that at the weight which stayed
    assert seen[0] > 50
    assert abs(seen[1]) < 0.1
    assert optimizer.health()["damping"] > 1e-8


def test_what_batches_differ_by_does_not_raise_damping() -> None:
    """Two that pull apart, with steps so short that nothing bends."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    auto = natgrad.AutoDamping(initial=1e6)
    options = dataclasses.replace(natgrad.SPNGD.auto, damping=auto)
    optimizer = natgrad.SPNGD(model, options=options)
    seen = [(0.0, 1e6)]
    for y in (1.0, -3.0):

        def closure(y: float = y) -> Any:
            outputs = model(torch.ones(1, 1))
            return outputs, (outputs - y).square().mean()

        optimizer.step(closure)
        seen.append((model.weight.item(), optimizer.health()["damping"]))
    (_, first), (up, second), (down, third) = seen
    assert up > 0
    # three times as far, with less damping: from the start, the first being undone
    assert down == pytest.approx(-3 * up * first / second, rel=1e-3)
    assert third < second < first


def test_a_step_that_promises_unusually_much_is_compared_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("natgrad.quadratic.tuner.GROWN", math.inf)  # nothing else is
    model = nn.Linear(2, 2)
    nn.init.zeros_(model.weight)
    x = torch.randn(8, 2, generator=torch.Generator().manual_seed(0))
    auto = dataclasses.replace(natgrad.SPNGD.auto, hessian="gaussian_log")
    optimizer, damping = natgrad.SPNGD(model, options=auto), list[float]()
    for i in range(8):

        def closure(target: float = 30.0 if i == 7 else 0.1) -> Any:
            mean, log = model(x).chunk(2, 1)
            squares = (target - mean).square() * (-log).exp()
            return (mean, log), (log + squares).mean() / 2

        optimizer.step(closure)
        damping.append(optimizer.health()["damping"])
    assert damping[5] == damping[6] < damping[7]  # only every fifth is due
    assert optimizer.health()["ratio"] < 0.25


def test_falls_that_are_expected_and_growths_that_are_linear() -> None:
    assert expected_fall(-2.0, 0.25) == 0.5
    assert expected_fall(-2.0, 1.5) == expected_fall(-2.0, math.nan) == 2.0
    assert expected_fall(-2.0, -1.0) == 0.0
    assert followed_fall(1.0, 3.0) == (pytest.approx(1.2), False)
    assert followed_fall(1.0, 5.0) == (pytest.approx(1.4), True)
    assert is_straight(1.0, 1.2)
    assert is_straight(1.0, 0.8)
    assert not is_straight(1.0, 2.0)  # of a parabola from its bottom
    assert not is_straight(1.0, 0.1)
    assert not is_straight(math.inf, math.nan)


def test_rates_follow_a_batch_by_trust() -> None:
    assert followed((0.5, 0.2), (2.0, 0.6), 1.0) == (2.0, 0.6)
    assert followed((0.5, 0.2), (2.0, 0.6), 0.5) == pytest.approx((1.0, 0.4))
    assert followed((0.5, 0.2), (0.1, 0.6), 0.5) == pytest.approx((0.1, 0.4))
    assert followed((0.0, 0.0), (2.0, 0.6), 0.5) == pytest.approx((2.0, 0.3))
