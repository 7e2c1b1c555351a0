"""Rates and damping on three ranks: those of one process with all of the data."""

import copy
import dataclasses
from typing import Any

import pytest
import torch
from tests.library.quadratic.test_quadratic import case, closure_of, theta_of
from tests.support.quadratic import Dense, followed
from tests.support.world import run_world
from torch import Tensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import natgrad

WORLD, STEPS = 3, 4
NAMES = ("squared error", "cross-entropy", "binary cross-entropy", "gaussian", "own")
STRATEGIES: tuple[Any, ...] = (
    "spngd",
    "layer_wise",
    "factor_wise",
    natgrad.hybrid(0.5),
)
PARTS = len(NAMES) + len(STRATEGIES) + 3
"""Where the traces of parts of batches begin."""
FOUND = ("damping", "ratio", "lr", "momentum", "trust")
Trace = list[tuple[Tensor, dict[str, float]]]


def options_of(**changes: Any) -> natgrad.Options:
    fixed: dict[str, Any] = {
        "refresh": natgrad.Every(),
        "fisher": "empirical",
        "weight_decay": 0.01,
        "damping": natgrad.AutoDamping(every=2),
    }
    return dataclasses.replace(natgrad.SPNGD.auto, **{**fixed, **changes})


def to_be(y: Tensor) -> Any:
    return lambda outputs: 1e3 * F.mse_loss(outputs[0], y)


def trace(name: str, seeds: list[int], how: str = "", **changes: Any) -> Trace:
    """Weights and findings after each step; several seeds are micro-batches."""
    model, _, own = case(name)
    parts = [case(name, seed)[1] for seed in seeds]
    whole: Any = DistributedDataParallel(model) if how == "ddp" else model
    options = options_of(**own, **changes)
    if how == "host":
        names = {"lr": None, "momentum": 0.9, "length": None, "strategy": "factor_wise"}
        names |= {"weight_decay": 0.0}  # that is the host's
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        options = dataclasses.replace(options, **names)  # pyright: ignore
        found: Any = natgrad.KFAC(whole, optimizer, options=options)
    else:
        optimizer = found = natgrad.SPNGD(whole, options=options)
    kept: Trace = []
    with torch.no_grad():
        first = [model(part.inputs) for part in parts] if how == "other batches" else []
    for i in range(STEPS):
        # from here on by another optimizer, from its state
        if i == 2 and how in ("", "other batches"):
            found.gather()
            state = copy.deepcopy(found.state_dict())
            found.close()
            optimizer = found = natgrad.SPNGD(whole, options=options)
            found.load_state_dict(state)
        if how == "other batches" and i == 1:  # which ask for what was at first
            parts = [
                dataclasses.replace(p, loss=to_be(y))
                for p, y in zip(parts, first, strict=True)
            ]
        optimizer.step([closure_of(whole, part) for part in parts])
        health = found.health()
        numbers = {n: health[n] for n in FOUND}
        kept.append((theta_of(model), numbers))
    found.close()
    return kept


def on_rank(rank: int) -> list[Trace]:
    found = [trace(name, [rank]) for name in NAMES]
    found += [trace("squared error", [rank], strategy=s) for s in STRATEGIES]
    hows = "ddp", "host", "other batches"
    found += [trace("squared error", [rank], how) for how in hows]
    return found + [trace(name, [rank], batch_part=0.8) for name in NAMES]


@pytest.fixture(scope="module")
def traces() -> list[list[Trace]]:
    return run_world(WORLD, on_rank)


def same(one: Trace, other: Trace) -> None:
    for (x, found), (y, want) in zip(one, other, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-7, atol=1e-9)
        assert found == pytest.approx(want, rel=1e-5, nan_ok=True)


def test_all_ranks_take_the_same_step(traces: list[list[Trace]]) -> None:
    first, *others = traces
    for other in others:
        for one, another in zip(first, other, strict=True):
            for (x, found), (y, want) in zip(one, another, strict=True):
                assert torch.equal(x, y)
                assert repr(found) == repr(want)


@pytest.mark.parametrize("i", range(len(NAMES)))
def test_ranks_find_what_one_process_finds(traces: list[list[Trace]], i: int) -> None:
    """With a resume in the middle, and as micro-batches in the one process."""
    same(traces[0][i], trace(NAMES[i], [*range(WORLD)]))


@pytest.mark.parametrize("i", range(len(NAMES)))
def test_ranks_have_parts_of_their_batches(traces: list[list[Trace]], i: int) -> None:
    one = trace(NAMES[i], [*range(WORLD)], batch_part=0.8)
    assert one[-1][1]["lr"] != traces[0][i][-1][1]["lr"]
    same(traces[0][PARTS + i], one)


@pytest.mark.parametrize("i", range(len(STRATEGIES) + 1))
def test_every_strategy_finds_the_same(traces: list[list[Trace]], i: int) -> None:
    same(traces[0][len(NAMES) + i], traces[0][0])


def test_a_host_on_ranks_has_the_damping_of_one_process(
    traces: list[list[Trace]],
) -> None:
    same(traces[0][PARTS - 2], trace("squared error", [*range(WORLD)], "host"))


def test_ranks_take_a_bad_step_back_together(traces: list[list[Trace]]) -> None:
    one = trace("squared error", [*range(WORLD)], "other batches")
    assert one[1][1]["damping"] > one[0][1]["damping"]
    assert one[1][1]["momentum"] == 0.0
    same(traces[0][PARTS - 1], one)


@pytest.mark.parametrize(("i", "kept"), [(0, None), (PARTS, 6)])
def test_ranks_agree_with_the_dense_matrix_of_all_data(
    traces: list[list[Trace]], i: int, kept: int | None
) -> None:
    model, _, _ = case("squared error")
    parts = [case("squared error", rank)[1] for rank in range(WORLD)]
    dense = Dense(model, parts, 0.01, kept)
    (before, _), (theta, old), (after, now) = traces[0][i][:3]
    step, last = after - theta, theta - before
    two = torch.stack([(step - now["momentum"] * last) / now["lr"], last])
    damped = dense.matrix(theta) @ two.T + old["damping"] * two.T
    best = torch.linalg.solve(two @ damped, -two @ dense.gradient(theta)).tolist()
    rates = followed((old["lr"] / old["trust"], old["momentum"]), best, now["trust"])
    expected = now["trust"] * rates[0], rates[1]
    assert (now["lr"], now["momentum"]) == pytest.approx(expected, rel=1e-7)
    true = dense.objective(after) - dense.objective(theta)
    predicted = dense.gradient(theta) @ step + step @ dense.matrix(theta) @ step / 2
    assert now["ratio"] == pytest.approx(float(true / predicted))
