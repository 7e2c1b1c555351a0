"""Losses of derivatives: residuals of two kinds, trained with rates that are found."""

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
