"""Batches without examples count for nothing, on one rank and when a rank has none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.construct import construct
from tests.support.fleet import METHODS, Fleet
from tests.support.world import run_world
from torch import Tensor, nn
from torch.nn import functional as F

import natgrad

OPTIONS: dict[str, dict[str, Any]] = {
    "K-FAC": {},
    "EKFAC": {"rule": natgrad.EKFAC()},
    "adaptive": {"rule": natgrad.EigenAdam()},
    "orthogonal": {"rule": natgrad.Orthogonal()},
    "full norms": {"norm": "full"},
    "tokens": {"loss": "tokens"},
    "subsample": {"subsample": 2},
    "enough": {"subsample": None},
}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3, groups=2, bias=False),
        nn.GroupNorm(2, 4),
        nn.Flatten(),
        nn.Linear(16, 5),
        nn.LayerNorm(5),
        nn.Linear(5, 3),
    ).double()


def examples(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 1, 4, 4, generator=source, dtype=torch.float64)
    return x, torch.randint(0, 3, (count,), generator=source)


def train(kfac: natgrad.KFAC, model: nn.Module, batches: list[tuple[Tensor, Tensor]]):
    """A step on micro-batches whose losses are divided by how many they are."""
    assert kfac.optimizer is not None
    kfac.optimizer.zero_grad()
    for x, y in batches:
        (F.cross_entropy(model(x), y) / len(batches)).backward()
    kfac.optimizer.step()


def made(model: nn.Module, lr: float = 0.1, **options: Any) -> natgrad.KFAC:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    chosen: dict[str, Any] = {"norm": "unit", "refresh": natgrad.Every(), **options}
    return construct(natgrad.KFAC, model, optimizer, **chosen)


def averages(kfac: natgrad.KFAC) -> dict[str, Tensor]:
    states = kfac.engine.statistics.states
    return {name: kfac.statistic(name).clone() for name in states}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_empty_batch_changes_nothing(name: str) -> None:
    model = network()
    kfac = made(model, **OPTIONS[name])
    for step in range(2):
        train(kfac, model, [examples(8, step)])
    weights = [p.detach().clone() for p in model.parameters()]
    known = averages(kfac)
    train(kfac, model, [examples(0)])
    for p, old in zip(model.parameters(), weights, strict=True):
        assert torch.equal(p, old)
    for key, old in known.items():
        if not key.endswith("/S"):  # it follows the bases that are made again
            assert torch.equal(kfac.statistic(key), old), key
    train(kfac, model, [examples(8, 3)])
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    assert not kfac.health()["quarantined"]


@pytest.mark.parametrize("name", OPTIONS)
def test_an_empty_micro_batch_adds_nothing(name: str) -> None:
    """But it is one of those by whose number the loss was divided."""
    models = network(), network()
    with_it, without = (made(model, lr=0.0, **OPTIONS[name]) for model in models)
    for step in range(2):
        train(with_it, models[0], [examples(8, step), examples(0)])
        train(without, models[1], [examples(8, step)])
    for key, old in averages(without).items():
        torch.testing.assert_close(with_it.statistic(key), old, msg=key)


@pytest.mark.parametrize("likelihood", ["cross_entropy", "mse"])
def test_an_empty_batch_of_sampled_labels(likelihood: str) -> None:
    model = network()
    kfac = made(model, fisher="sampled")
    assert kfac.optimizer is not None
    for count in (8, 0, 8):
        x, y = examples(count)
        kfac.optimizer.zero_grad()
        outputs = model(x)
        kfac.sampled_backward(outputs, likelihood)
        F.cross_entropy(outputs, y).backward()
        kfac.optimizer.step()
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def one_has_none(rank: int, method: str, options: dict[str, Any]) -> Any:
    fleet = Fleet(method, rank, factor_decay=0.0, **options)
    for examples_here in ((8, 8), (8, 0), (0, 8), (0, 0), (8, 8)):
        fleet.backward(examples_here[rank])
        fleet.optimizer.step()
    flat = fleet.weights()
    return flat, fleet.natural.health()


@pytest.mark.processes
@pytest.mark.parametrize("method", [*METHODS, "kfac ekfac"])
def test_ranks_without_examples_take_part(method: str) -> None:
    options: dict[str, Any] = {"norm": "unit"} if method != "polar" else {}
    if method == "kfac ekfac":
        method, options = "kfac", {"rule": natgrad.EKFAC()}
    (flat, health), (other, _) = run_world(2, one_has_none, method, options)
    assert torch.equal(flat, other)
    assert bool(flat.isfinite().all())
    assert not health["quarantined"]


def statistics_of(rank: int, ranks: int) -> dict[str, Tensor]:
    """From rank 0's batch alone; another has none."""
    model = network()
    kfac = made(model, lr=0.0)
    train(kfac, model, [examples(0 if rank else 8)])
    if ranks > 1:
        kfac.gather()
    return averages(kfac)


@pytest.mark.processes
def test_a_rank_without_examples_leaves_the_estimates_as_they_are() -> None:
    alone = statistics_of(0, 1)
    for key, found in run_world(2, statistics_of, 2)[0].items():
        torch.testing.assert_close(found, alone[key], msg=key)
