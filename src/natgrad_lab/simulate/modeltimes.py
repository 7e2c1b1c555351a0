"""One model's own seconds on one rank: forward, backward, statistics, update."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

from natgrad import KFAC, Every
from natgrad.plan.profile import ModelTimes
from natgrad_lab.models import build
from natgrad_lab.simulate.work import lab_settings


def model_times(name: str, batch: int, repeats: int = 5) -> ModelTimes:
    """Measure a lab model; ``statistics`` is what estimating adds to a plain pass."""
    settings, shape = lab_settings(name)
    model = build(name, **settings)
    x = torch.randn(batch, *shape)
    if name == "gpt":
        x = torch.randint(settings["vocabulary"], (batch, *shape))
    plain = _passes(model, x, repeats)
    kfac = KFAC(model, kl_clip=None, refresh=Every(statistics=1, inverses=10**6))
    try:
        observed = _passes(model, x, repeats)
    finally:
        kfac.close()
    added = sum(observed) - sum(plain)
    return ModelTimes(
        batch=batch,
        forward=plain[0],
        backward=plain[1],
        statistics=max(0.0, added),
        update=_update(model, repeats),
    )


def _passes(model: nn.Module, x: Tensor, repeats: int) -> tuple[float, float]:
    """The least seconds of a forward and of a backward."""
    best = (float("inf"), float("inf"))
    for _ in range(repeats + 1):
        model.zero_grad()
        start = time.perf_counter()
        loss = model(x).square().mean()
        middle = time.perf_counter()
        loss.backward()
        end = time.perf_counter()
        best = (min(best[0], middle - start), min(best[1], end - middle))
    return best


def _update(model: nn.Module, repeats: int) -> float:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9, momentum=0.9)
    best = float("inf")
    for _ in range(repeats + 1):
        start = time.perf_counter()
        optimizer.step()
        best = min(best, time.perf_counter() - start)
    return best
