"""Losses of derivatives: residuals of two kinds, trained with rates that are found."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import natgrad


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 12), nn.Tanh(), nn.Linear(12, 1)).double()


def residuals(model: nn.Module) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """``u' = cos 3x`` inside and ``u(0) = 0``, each with its weight."""
    places = torch.linspace(0, 1, 16, dtype=torch.float64).unsqueeze(1)
    places.requires_grad_()
    (slope,) = torch.autograd.grad(model(places).sum(), places, create_graph=True)
    inside = slope - torch.cos(3 * places.detach())
    border = model(torch.zeros(1, 1, dtype=torch.float64))
    return (inside, border), inside.square().mean() + 2 * border.square().mean()


RULES: dict[str, dict[str, Any]] = {
    "gradients": {"rule": natgrad.EigenAdam(source="gradients"), "damping": 1e-3},
    "activations": {"damping": "auto"},
}


@pytest.mark.parametrize("source", RULES)
def test_a_differential_equation_is_solved_without_a_learning_rate(source: str) -> None:
    model = network()
    optimizer = natgrad.SPNGD(model, lr="auto", momentum="auto", **RULES[source])
    losses = [float(optimizer.step(lambda: residuals(model))) for _ in range(30)]
    assert losses[-1] < losses[0] / 50
    health = optimizer.health()
    assert health["lr"] == optimizer.param_groups[0]["lr"] > 0
    assert abs(health["momentum"]) <= 1


def rows_of(model: nn.Module, number: int) -> list[tuple[Tensor, Tensor]]:
    """Fill it in a forward: inputs and outputs of a layer, whose gradients are kept."""
    seen: list[tuple[Tensor, Tensor]] = []

    def keep(_: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        output.retain_grad()
        seen.append((inputs[0].detach(), output))

    model.get_submodule(str(number)).register_forward_hook(keep)
    return seen


@pytest.mark.parametrize("number", [0, 2])
def test_factors_are_of_the_forwards_whose_outputs_the_loss_reaches(
    number: int,
) -> None:
    # the last layer's output inside is only in a derivative: its backward does not come
    model = network()
    seen = rows_of(model, number)
    host = torch.optim.SGD(model.parameters(), lr=0.0)
    kfac = natgrad.KFAC(model, host)
    kfac.set_loss_terms(16)
    _, loss = residuals(model)
    for _, output in seen:
        output.grad = None  # of the backward that made a graph
    loss.backward()
    host.step()
    reached = [(x, z.grad) for x, z in seen if z.grad is not None]
    assert len(reached) == (2 if number == 0 else 1)
    x = torch.cat([nn.functional.pad(x, (0, 1), value=1.0) for x, _ in reached])
    g = torch.cat([g for _, g in reached])
    torch.testing.assert_close(kfac.statistic(f"{number}/A")[0], x.T @ x / len(x))
    torch.testing.assert_close(kfac.statistic(f"{number}/G")[0], 16 * g.T @ g)


def test_factors_of_gradients_are_those_of_the_whole_residual() -> None:
    model = network()
    host = torch.optim.SGD(model.parameters(), lr=0.0)
    rule = natgrad.EigenAdam(source="gradients")
    kfac = natgrad.KFAC(model, host, options=replace(natgrad.KFAC.defaults, rule=rule))
    residuals(model)[1].backward()
    g = next(model.parameters()).grad  # the bias has a rule of its own
    assert g is not None
    g = g.clone()
    host.step()
    torch.testing.assert_close(kfac.statistic("0/R")[0], g.T @ g)
    torch.testing.assert_close(kfac.statistic("0/L")[0], g @ g.T)
