"""A `GradScaler` where the optimizer reduces gradients itself: one verdict for all."""

from typing import Any

import pytest
import torch
from tests.support.construct import construct
from tests.support.toys import CLASSES, FEATURES
from tests.support.world import run_world
from torch import Tensor, nn
from torch.nn import functional as F

import natgrad
from natgrad import Every

STEPS, EXAMPLES = 7, 8
OVERFLOWS = {1: 0, 4: 1}
"""Step: which half of the examples overflows."""
METHODS: dict[str, Any] = {
    "spngd": lambda m, **x: construct(
        natgrad.SPNGD, m, lr=0.1, refresh=Every(2, 2), **x
    ),
    "polar": lambda m, **x: construct(
        natgrad.Polar, m, lr=0.1, refresh=Every(2, 2), **x
    ),
}


def examples(step: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(step)
    x = torch.randn(EXAMPLES, FEATURES, generator=source, dtype=torch.float64)
    return x, x[:, :CLASSES].argmax(1)


def train(
    rank: int, world: int, method: str, unscale: bool
) -> tuple[Tensor, list[float], dict[str, Any]]:
    """Weights, the loss scale after each step, and health."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, CLASSES))
    model = model.double()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    optimizer = METHODS[method](model, damping=0.1, grad_scaler=scaler)
    share = EXAMPLES // world
    scales = []
    for step in range(STEPS):
        x, y = (part[rank * share :][:share] for part in examples(step))
        loss = F.cross_entropy(model(x), y)
        first = OVERFLOWS.get(step, -1) * EXAMPLES // 2
        if rank * share <= first < (rank + 1) * share:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        if unscale:  # as one does before clipping
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    health = optimizer.health()
    optimizer.close()
    return torch.cat([p.detach().flatten() for p in model.parameters()]), scales, health


@pytest.mark.processes
@pytest.mark.parametrize(("method", "unscale"), [("spngd", False), ("polar", True)])
def test_two_ranks_with_a_scaler_are_one_process(method: str, unscale: bool) -> None:
    """Whichever rank overflows, all skip, and all scales fall and grow together."""
    weights, scales, health = train(0, 1, method, unscale)
    assert scales == [1024, 512, 512, 1024, 512, 512, 1024]
    for own, seen, told in run_world(2, train, 2, method, unscale):
        assert seen == scales
        assert told == health
        assert told["skipped_steps"] == 0
        torch.testing.assert_close(own, weights, rtol=1e-9, atol=1e-12)
