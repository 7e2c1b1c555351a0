"""A closure run again: exact products, and nothing left behind."""

import dataclasses
import math
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import natgrad
from natgrad.math.outputs import hessian_of_loss, sampled_gradients
from natgrad.math.quadratic import (
    adapted,
    minimiser,
    paced,
    reduction_ratio,
)
from natgrad.quadratic.replay import Replay, Run


class Attention(nn.Module):
    """Scaled dot products with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.head = nn.Linear(4, 12), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inside(x).chunk(3, -1)
        return self.head(F.scaled_dot_product_attention(q, k, v, dropout_p=0.2))


class Recurrent(nn.Module):
    """An LSTM and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0])


def dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.3), nn.Linear(5, 3))


def norm() -> nn.Module:
    layers = (nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(inplace=True))
    return nn.Sequential(*layers, nn.Linear(5, 3))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "dropout": (dropout, (6, 4)),
    "batch norm": (norm, (6, 4)),
    "attention": (Attention, (3, 5, 4)),
    "LSTM": (Recurrent, (3, 5, 4)),
}


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_tangents_are_exact_and_nothing_else_changes(name: str, together: bool) -> None:
    """``u . J v`` by forward mode is ``v . J^T u`` by the backward."""
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model, x = make().double(), torch.randn(shape).double()

    def closure() -> tuple[Tensor, Tensor]:
        outputs = model(x)
        return outputs, outputs.square().mean()

    run = Run(closure, [])
    replay = Replay(model, nullcontext)
    replay._together = together  # pyright: ignore[reportPrivateUsage]
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    state = torch.get_rng_state()
    weights = dict(model.named_parameters())
    ways = [{n: torch.randn_like(p) for n, p in weights.items()} for _ in range(2)]
    torch.set_rng_state(state)
    pushed = replay.tangents(run, weights, ways)
    assert replay.loss(run, weights) == run.loss.detach()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(b, buffers[n]) for n, b in model.named_buffers())
    assert replay._together == together  # pyright: ignore[reportPrivateUsage]
    (output,) = run.outputs
    for way, (tangent,) in zip(ways, pushed, strict=True):
        u = torch.randn_like(output)
        pulled = torch.autograd.grad(output, [*weights.values()], u, retain_graph=True)
        want = sum((g * way[n]).sum() for g, n in zip(pulled, weights, strict=True))
        torch.testing.assert_close((u * tangent).sum(), want)


def test_residuals_of_derivatives_have_tangents() -> None:
    """A closure that differentiates by itself, as a physics-informed network's."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    x = torch.randn(5, 2).double().requires_grad_()

    def closure() -> tuple[Tensor, Tensor]:
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        residual = slope.sum(1) - 1
        return residual, residual.square().mean()

    run = Run(closure, [])
    weights = dict(model.named_parameters())
    ways = [{n: torch.randn_like(p) for n, p in weights.items()} for _ in range(2)]
    pushed = Replay(model, nullcontext).tangents(run, weights, ways)
    (output,) = run.outputs
    for way, (tangent,) in zip(ways, pushed, strict=True):
        pulled = torch.autograd.grad(
            output,
            [*weights.values()],
            torch.ones_like(output),
            retain_graph=True,
            allow_unused=True,
        )
        pairs = zip(pulled, weights, strict=True)
        want = sum((g * way[n]).sum() for g, n in pairs if g is not None)  # pyright: ignore
        torch.testing.assert_close(tangent.sum(), want)


class NoForwardMode(torch.autograd.Function):
    """A derivative for backwards only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore
        return 2 * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # pyright: ignore
        return 2 * g


class Odd(nn.Module):
    """Uses it."""

    def forward(self, x: Tensor) -> Tensor:
        return NoForwardMode.apply(x)  # pyright: ignore


def test_a_layer_without_forward_mode_is_named() -> None:
    model = nn.Sequential(nn.Linear(3, 3), Odd(), nn.Linear(3, 2))
    optimizer = natgrad.SPNGD(model, lr="auto", momentum="auto", damping="auto")

    def closure() -> tuple[Tensor, Tensor]:
        outputs = model(torch.ones(4, 3))
        return outputs, outputs.square().mean()

    with pytest.raises(RuntimeError, match=r"Layer '1' \(Odd\) has no forward-mode"):
        optimizer.step(closure)


@pytest.mark.parametrize("kind", ["squares", "classes", "rows"])
def test_drawn_gradients_have_the_hessian_as_their_second_moment(kind: str) -> None:
    torch.manual_seed(0)
    outputs = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    weights = torch.tensor([1.0, 2.0, 0.5]).double()
    if kind == "squares":
        loss = (weights.unsqueeze(1) * outputs.square()).sum() / 7
    elif kind == "classes":
        losses = F.cross_entropy(outputs, torch.tensor([0, 1, 3]), reduction="none")
        loss = (weights * losses).mean()
    else:
        shaped = outputs.unsqueeze(0).transpose(
            1, 2
        )  # classes in dim 1, positions last
        loss = F.cross_entropy(shaped, torch.tensor([[0, 1, 3]]))
    product = hessian_of_loss(loss, [outputs])
    draws = [sampled_gradients([outputs], product)[0].flatten() for _ in range(3000)]
    found = torch.stack(draws).T @ torch.stack(draws) / len(draws)
    eye = torch.eye(12, dtype=torch.float64).reshape(12, 3, 4)
    dense = torch.stack([product([row])[0].flatten() for row in eye])
    assert (found - dense).norm() < 0.1 * dense.norm()


def test_a_hessian_nobody_can_draw_from_is_refused() -> None:
    outputs = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    loss = outputs.sum(1).square().mean()
    with pytest.raises(ValueError, match="neither diagonal"):
        sampled_gradients([outputs], hessian_of_loss(loss, [outputs]))


def test_degenerate_models_have_a_minimiser() -> None:
    assert minimiser((-1.0, 0.0), ((2.0, 0.0), (0.0, 0.0)), (None, None)) == (0.5, 0.0)
    assert minimiser((-1.0, -1.0), ((2.0, 2.0), (2.0, 2.0)), (None, None)) == (0.5, 0.0)
    assert minimiser((1.0, -9.0), ((1.0, 0.9), (0.9, 1.0)), (None, None))[1] == 0.0
    assert minimiser((0.0, 0.0), ((0.0, 0.0), (0.0, 0.0)), (None, None)) == (0.0, 0.0)


def test_ratios_say_what_damping_does() -> None:
    assert reduction_ratio(2.0, 1.0, -2.0) == 0.5
    assert reduction_ratio(2.0, float("nan"), -2.0) == -float("inf")
    assert reduction_ratio(2.0, 3.0, 1.0) == -float("inf")
    assert reduction_ratio(2.0, 2.0, -1e-9, 1e-8) != reduction_ratio(2.0, 1.0, -1.0)
    changes = [adapted(1.0, ratio, 0.5) for ratio in (0.9, 0.5, 0.1, -1.0)]
    assert changes == [(0.5, 1), (1.0, 0), (2.0, -4), (16.0, -4)]
    assert adapted(1.0, float("nan"), 0.5, 3) == (1.0, 0)


def test_damping_falls_faster_while_it_falls() -> None:
    seen = [(1.0, 0)]
    for ratio in (*[0.9] * 5, 0.5, 0.9, 0.1, *[0.9] * 6):
        damping, streak = seen[-1]
        seen.append(adapted(damping, ratio, 0.5, streak))
    falls = [x / y for (x, _), (y, _) in pairwise(seen)]
    assert falls == [2, 4, 8, 16, 16, 1, 2, 0.5, 2, 2, 2, 2, 2, 4]
    assert adapted(1.0, 0.9, 0.5, 3, trust=0.4) == (1.0, 0)


def test_rates_that_hardly_change_are_found_more_rarely() -> None:
    assert [paced(n, (1.0, 0.5), (0.95, 0.55), 1.05) for n in (1, 2, 4, 8)] == [
        2,
        4,
        8,
        8,
    ]
    assert paced(4, (1.0, 0.5), (0.8, 0.5), 1.0) == 1
    assert paced(4, (1.0, 0.5), (1.0, 0.7), 1.0) == 1
    assert paced(4, (1.0, 0.5), (1.0, 0.5), 0.8) == 1
    assert paced(4, (1.0, 0.5), (1.0, 0.5), math.nan) == 1


def test_between_two_solutions_no_products_are_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, solved = nn.Linear(2, 2), list[int]()
    optimizer = natgrad.SPNGD(model, lr="auto", momentum="auto", damping=1.0)

    def found(*_: Any) -> tuple[float, float]:
        solved.append(optimizer.engine.step)
        return 0.01, 0.0

    monkeypatch.setattr("natgrad.quadratic.tuner.minimiser", found)
    assert optimizer.engine.tuner is not None
    optimizer.engine.tuner.ratio = 1.0
    for _ in range(12):

        def closure() -> Any:
            outputs = model(torch.ones(4, 2))
            return outputs, outputs.square().mean()

        optimizer.step(closure)
        assert optimizer.health()["lr"] == 0.01
    assert solved == [0, 1, 3, 7]


def test_momentum_at_most_repeats_the_last_step() -> None:
    """Eight examples may see no curvature along it, and much of a slope."""
    slopes, products = (-1.0, -50.0), ((2.0, -0.5), (-0.5, 1.0))
    assert minimiser(slopes, products, (None, None)) == (0.75, 1.0)  # the best beside
    assert minimiser(slopes, products, (0.3, None)) == (0.3, 1.0)
    assert minimiser(slopes, products, (None, 7.0))[1] == 7.0
    assert minimiser((-1.0, 50.0), ((2, 0.5), (0.5, 1)), (None, None)) == (0.75, -1.0)


def test_a_step_that_made_the_loss_grow_is_taken_back() -> None:
    """The first steps in the logarithm of the variance are far too long."""
    model = nn.Linear(2, 2)
    nn.init.zeros_(model.weight)
    x = torch.randn(8, 2, generator=torch.Generator().manual_seed(0))
    auto = dataclasses.replace(
        natgrad.SPNGD.auto,
        hessian="gaussian_log",
        damping=natgrad.AutoDamping(initial=1e-6),
    )
    optimizer = natgrad.SPNGD(model, options=auto)

    def closure() -> Any:
        mean, log = model(x).chunk(2, 1)
        return (mean, log), (log + (1e3 - mean).square() * (-log).exp()).mean() / 2

    losses = [float(optimizer.step(closure)) for _ in range(30)]
    assert optimizer.health()["damping"] > 1e-6
    assert losses[-1] < losses[0] / 100


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lr": "much"}, "Invalid lr='much'. Must be a number > 0, or 'auto'"),
        ({"momentum": 1.5}, "Must be in .0, 1., or 'auto'"),
        ({"hessian": "cubic"}, "Invalid hessian='cubic'. Must be one of 'loss'"),
        ({"average": natgrad.AverageGradients()}, "Must be AverageUpdates"),
        ({"decay": natgrad.Decoupled()}, "Must be Coupled"),
        ({"length": natgrad.KLClip()}, "Must be Free"),
        ({"rule": natgrad.Orthogonal()}, "add damping to the curvature"),
    ],
)
def test_what_does_not_go_together_is_refused(given: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        dataclasses.replace(natgrad.SPNGD.auto, **given)


def test_a_step_needs_a_closure_that_returns_a_pair() -> None:
    model = nn.Linear(2, 2)
    optimizer = natgrad.SPNGD(model, damping="auto", lr=0.1)
    with pytest.raises(TypeError, match="need a closure"):
        optimizer.step()
    with pytest.raises(TypeError, match="Must return \\(outputs, loss\\)"):
        optimizer.step(lambda: model(torch.ones(1, 2)).sum())
    groups = [{"params": [*model.named_parameters()], "lr": 0.1}]
    optimizer.close()
    with pytest.raises(ValueError, match="found for all groups"):
        natgrad.SPNGD(model, groups, lr="auto")
    with pytest.raises(ValueError, match="must be numbers"):
        natgrad.KFAC(model, torch.optim.SGD(model.parameters()), options=optimizer.auto)
    with pytest.raises(ValueError, match="runs its closure once"):
        natgrad.KFAC(model, damping="auto", length=natgrad.Free())
