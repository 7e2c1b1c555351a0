"""Schedules against the papers' formulas."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.construct import construct
from tests.support.toys import backward, mlp, sgd, train

import natgrad
from natgrad.schedules import (
    DampingDecay,
    DampingWarmup,
    IntervalGrowth,
    PolynomialDecay,
    WarmupStepDecay,
)


def optimizer(lr: float = 0.8, momentum: float = 0.9) -> torch.optim.SGD:
    return torch.optim.SGD(mlp().parameters(), lr=lr, momentum=momentum)


def follow(scheduler: Any, steps: int, what: str = "lr") -> list[float]:
    """What the optimizer would use in each step."""
    values: list[float] = []
    for _ in range(steps):
        values.append(scheduler.optimizer.param_groups[0][what])
        scheduler.optimizer.step()
        scheduler.step()
    return values


# -- PolynomialDecay ----------------------------------------------------------------


@pytest.mark.parametrize("per_epoch", [1, 4])
def test_polynomial_decay(per_epoch: int) -> None:
    """SP-NGD, eq. 21 between start and end; constant before, zero after."""
    start, end, power = 2, 7, 3.5
    scheduler = PolynomialDecay(
        optimizer(), start=start, end=end, power=power, steps_per_epoch=per_epoch
    )
    for step, lr in enumerate(follow(scheduler, 9 * per_epoch)):
        e = step / per_epoch
        if e <= start:
            expected = 0.8
        elif e >= end:
            expected = 0.0
        else:
            expected = 0.8 * (1 - (e - start) / (end - start)) ** power
        assert lr == pytest.approx(expected, abs=1e-15)


def test_momentum_keeps_its_ratio_to_the_learning_rate() -> None:
    """SP-NGD, eq. 22, for each group."""
    model = mlp()
    spngd = natgrad.SPNGD(
        model,
        [
            {"params": list(model[:2].named_parameters())},
            {"params": list(model[3].named_parameters()), "lr": 0.1, "momentum": 0.3},
        ],
        lr=0.5,
        momentum=0.7,
    )
    scheduler = PolynomialDecay(spngd, start=1, end=6, power=2)
    for _ in range(5):
        train(model, spngd, range(1))
        scheduler.step()
        for group, ratio in zip(spngd.param_groups, (0.7 / 0.5, 3.0), strict=True):
            assert group["momentum"] / group["lr"] == pytest.approx(ratio)
    assert spngd.param_groups[0]["lr"] == pytest.approx(0.5 * (1 - 4 / 5) ** 2)


def test_momentum_may_stay() -> None:
    scheduler = PolynomialDecay(
        optimizer(), start=0, end=5, power=2, couple_momentum=False
    )
    assert follow(scheduler, 5, "momentum") == [0.9] * 5


def test_adam_has_no_momentum_to_couple() -> None:
    adam = torch.optim.Adam(mlp().parameters())
    with pytest.raises(ValueError, match=r"Adam has no.*couple_momentum=False"):
        PolynomialDecay(adam, start=0, end=1, power=1)
    PolynomialDecay(adam, start=0, end=1, power=1, couple_momentum=False)


def test_polynomial_decay_continues_from_its_state() -> None:
    options: dict[str, Any] = {"start": 1, "end": 9, "power": 2}
    one, other = (PolynomialDecay(optimizer(), **options) for _ in range(2))
    follow(one, 4)
    other.load_state_dict(one.state_dict())
    other.optimizer.load_state_dict(one.optimizer.state_dict())
    for what in ("lr", "momentum"):
        assert follow(one, 3, what) == follow(other, 3, what)


# -- WarmupStepDecay ----------------------------------------------------------------


@pytest.mark.parametrize("per_epoch", [1, 3])
def test_warmup_then_steps(per_epoch: int) -> None:
    scheduler = WarmupStepDecay(
        optimizer(),
        milestones=[6, 8],
        factor=0.5,
        warmup=4,
        warmup_start=0.2,
        steps_per_epoch=per_epoch,
    )
    for step, lr in enumerate(follow(scheduler, 10 * per_epoch)):
        epoch = step / per_epoch
        if epoch < 4:
            expected = 0.8 * (0.2 + 0.8 * epoch / 4)
        else:
            expected = 0.8 * 0.5 ** ((epoch >= 6) + (epoch >= 8))
        assert lr == pytest.approx(expected)


def test_no_warmup() -> None:
    scheduler = WarmupStepDecay(optimizer(), milestones=[2], warmup=0)
    assert follow(scheduler, 3) == pytest.approx([0.8, 0.8, 0.08])


# -- damping and intervals ----------------------------------------------------------


def test_damping_warmup_is_the_recursion() -> None:
    """Osawa et al. 2019, eq. 13-14."""
    schedule = DampingWarmup(initial=2.5e-2, target=2.5e-4, steps=40)
    alpha = 2 * math.log10(2.5e-2 / 2.5e-4) / 40
    gamma = 2.5e-2
    for step in range(200):
        assert schedule(step) == pytest.approx(gamma, rel=1e-12)
        gamma = (1 - alpha) * gamma + alpha * 2.5e-4
    assert schedule(1000) == pytest.approx(2.5e-4)


def test_damping_decay() -> None:
    schedule = DampingDecay(
        initial=0.1, factor=0.5, epochs=(2, 3.5), steps_per_epoch=10
    )
    values = [schedule(step) for step in (0, 19, 20, 34, 35, 500)]
    assert values == pytest.approx([0.1, 0.1, 0.05, 0.05, 0.025, 0.025])


def test_interval_growth() -> None:
    schedule = IntervalGrowth(initial=10, factor=1.5, epochs=(1, 2), steps_per_epoch=5)
    assert [schedule(step) for step in (0, 4, 5, 9, 10)] == [10, 10, 15, 15, 22]
    shrinking = IntervalGrowth(initial=2, factor=0.1, epochs=(1,), steps_per_epoch=1)
    assert shrinking(1) == 1


def test_a_schedule_is_the_damping_of_each_step() -> None:
    """Each step is that of a KFAC whose damping is the schedule's number there."""
    warmup = DampingWarmup(initial=1.0, target=0.01, steps=10)
    model, other = mlp(), mlp()
    options: dict[str, Any] = {
        "refresh": natgrad.Every(1, 1),
        "factor_decay": 0.0,
        "length": natgrad.Free(),
    }
    one, _ = sgd(model, damping=warmup, **options)
    for step in range(4):
        other.load_state_dict(model.state_dict())
        kfac = construct(natgrad.KFAC, other, damping=warmup(step), **options)
        backward(model, step)
        one.step()
        backward(other, step)
        kfac.step()
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert p.grad is not None
            assert q.grad is not None
            assert torch.equal(p.grad, q.grad)
        kfac.close()


def test_intervals_in_every() -> None:
    growth = IntervalGrowth(initial=1, factor=3, epochs=(1,), steps_per_epoch=4)
    model = mlp()
    one, kfac = sgd(model, refresh=natgrad.Every(statistics=growth, inverses=growth))
    train(model, one, range(12))
    # steps 0 1 2 3 4 7 10
    counts = kfac.refreshes()["statistics"]["0/A"]
    assert counts["refreshed"] == counts["inverted"] == 7


# -- what is refused ----------------------------------------------------------------

POLYNOMIAL: dict[str, Any] = {"start": 0, "end": 1, "power": 1}
STEPS: dict[str, Any] = {"milestones": [1, 2]}
WARMUP: dict[str, Any] = {"initial": 1.0, "target": 0.1, "steps": 10}
DECAY: dict[str, Any] = {
    "initial": 1.0,
    "factor": 0.5,
    "epochs": (1, 2),
    "steps_per_epoch": 5,
}
GROWTH: dict[str, Any] = {
    "initial": 1,
    "factor": 2.0,
    "epochs": (1, 2),
    "steps_per_epoch": 5,
}


def polynomial(**options: Any) -> Any:
    return PolynomialDecay(optimizer(), **{**POLYNOMIAL, **options})


def step_decay(**options: Any) -> Any:
    return WarmupStepDecay(optimizer(), **{**STEPS, **options})


def damping_warmup(**options: Any) -> Any:
    return DampingWarmup(**{**WARMUP, **options})


def damping_decay(**options: Any) -> Any:
    return DampingDecay(**{**DECAY, **options})


def interval_growth(**options: Any) -> Any:
    return IntervalGrowth(**{**GROWTH, **options})


@pytest.mark.parametrize(
    ("make", "name", "value", "legal"),
    [
        (polynomial, "start", -1, ">= 0"),
        (polynomial, "end", 0, "> start=0"),
        (polynomial, "end", math.nan, "> start=0"),
        (polynomial, "power", 0, "> 0"),
        (polynomial, "steps_per_epoch", 0, ">= 1"),
        (step_decay, "factor", 0, "> 0"),
        (step_decay, "warmup", -1, ">= 0"),
        (step_decay, "warmup_start", -0.1, r"in \[0, 1\]"),
        (step_decay, "warmup_start", 1.5, r"in \[0, 1\]"),
        (step_decay, "milestones", [2, 1], "ascending"),
        (damping_warmup, "target", 0, "> 0"),
        (damping_warmup, "initial", 0.05, "> target=0.1"),
        (damping_warmup, "steps", 0, ">= 1"),
        (damping_warmup, "steps", 1, ">= 2"),
        (damping_decay, "initial", -1, ">= 0"),
        (damping_decay, "factor", "half", "> 0"),
        (damping_decay, "epochs", (3, 1), "ascending"),
        (damping_decay, "steps_per_epoch", 1.5, ">= 1"),
        (interval_growth, "initial", 0, ">= 1"),
        (interval_growth, "factor", -2, "> 0"),
        (interval_growth, "epochs", (3, 1), "ascending"),
    ],
)
def test_refused(make: Callable[..., Any], name: str, value: Any, legal: str) -> None:
    make()
    message = rf"Invalid {name}=.*\. Must be .*{legal}"
    with pytest.raises((ValueError, TypeError), match=message) as error:
        make(**{name: value})
    assert repr(value) in str(error.value)
