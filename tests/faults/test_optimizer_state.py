"""An optimizer's state through torch's own ways of saving, loading and sharding it."""

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.support.construct import construct
from tests.support.toys import (
    backward,
    mlp,
    parameters,
    same,
    sgd,
    snapshot,
    tensors,
    train,
)
from tests.support.world import run_world
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import natgrad

Make = Callable[[nn.Module], Optimizer]


def kfac(model: nn.Module) -> Optimizer:
    return sgd(model, refresh=natgrad.Every(2, 3), factor_decay=0.6, norm="unit")[0]


def plain_sgd(model: nn.Module) -> Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    natgrad.KFAC(model, optimizer, refresh=natgrad.Adaptive(), factor_decay=0.6)
    return optimizer


def adam(model: nn.Module) -> Optimizer:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    natgrad.KFAC(
        model, optimizer, rule=natgrad.Kronecker(style="factored"), norm="diag"
    )
    return optimizer


def spngd(model: nn.Module) -> Optimizer:
    return natgrad.SPNGD(model, lr=0.02, weight_decay=1e-3)


def adaptive(model: nn.Module) -> Optimizer:
    return construct(
        natgrad.SPNGD,
        model,
        lr=0.02,
        rule=natgrad.EigenAdam(),
        fallback=natgrad.Adam(),
        norm="skip",
    )


MAKERS: dict[str, Make] = {
    m.__name__: m for m in (kfac, plain_sgd, adam, spngd, adaptive)
}


def filed(state: Any) -> Any:
    """Through a file that cannot run code."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("how", ["objects", "file", "dcp"])
@pytest.mark.parametrize("maker", MAKERS)
def test_get_and_set_optimizer_state_dict(maker: str, how: str, tmp_path: Path) -> None:
    model, other = mlp(torch.float32), mlp(torch.float32, seed=1)
    optimizer, resumed = MAKERS[maker](model), MAKERS[maker](other)
    train(model, optimizer, range(8))  # in the middle of an interval
    optimizer.zero_grad()
    state: Any = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    if how == "file":
        state = filed(state)
    if how == "dcp":
        dcp.save({"optimizer": state}, checkpoint_id=tmp_path)
        state = get_optimizer_state_dict(other, resumed)
        dcp.load({"optimizer": state}, checkpoint_id=tmp_path)
    other.load_state_dict(model.state_dict())
    set_optimizer_state_dict(other, resumed, state)
    assert same(snapshot(optimizer), snapshot(resumed))
    steps = range(8, 16)
    assert same(train(model, optimizer, steps), train(other, resumed, steps))
    assert same(snapshot(model, optimizer), snapshot(other, resumed))


@pytest.mark.parametrize("maker", MAKERS)
def test_initialising_an_optimizers_state_changes_nothing(maker: str) -> None:
    """To have a state, torch steps with zero gradients and a zero learning rate."""
    model, other = mlp(torch.float32), mlp(torch.float32)
    optimizer, reference = MAKERS[maker](model), MAKERS[maker](other)
    for step in range(6):
        weights, engine = parameters(model), optimizer.state_dict()["natgrad"]
        get_optimizer_state_dict(model, optimizer)
        assert same(weights, parameters(model))
        after = optimizer.state_dict()["natgrad"]
        assert engine["step"] == after["step"] == step
        assert repr(engine) == repr(after)
        train(model, optimizer, range(step, step + 1))
        train(other, reference, range(step, step + 1))
        optimizer.zero_grad()
        if maker != "adam":  # which counts that step in its own state
            assert same(parameters(model), parameters(other))


def test_a_real_step_at_a_zero_learning_rate_counts() -> None:
    model = mlp()
    optimizer, k = sgd(model)
    optimizer.param_groups[0]["lr"] = 0.0  # as a warmup from zero begins
    backward(model, 0)
    optimizer.step()
    assert k.engine.step == 1
    assert k.refreshes()["statistics"]["0/A"]["refreshed"] == 1


@pytest.mark.parametrize("how", ["torch", "dsd"])
def test_statistics_stay_float32_beside_bfloat16_parameters(how: str) -> None:
    model, other = mlp(torch.bfloat16), mlp(torch.bfloat16, seed=1)
    optimizer, resumed = spngd(model), spngd(other)
    train(model, optimizer, range(3))
    optimizer.zero_grad()
    if how == "torch":
        resumed.load_state_dict(filed(optimizer.state_dict()))
    else:
        state = filed(get_optimizer_state_dict(model, optimizer))
        set_optimizer_state_dict(other, resumed, state)
    assert same(snapshot(optimizer), snapshot(resumed))
    kept = list(tensors(resumed.state_dict()["natgrad"]))
    assert {x.dtype for x in kept} == {torch.float32}
    assert any(not torch.equal(x, x.bfloat16().float()) for x in kept)


def test_a_plain_state_dict_is_filed_once() -> None:
    """The form by parameter is for `get_optimizer_state_dict` only."""
    model = mlp()
    optimizer, _ = sgd(model)
    train(model, optimizer, range(2))
    state = optimizer.state_dict()
    assert all(set(entry) == {"momentum_buffer"} for entry in state["state"].values())
    assert "natgrad" in state


# -- sharded, on several ranks ---------------------------------------------------------


def wrapped(maker: str) -> tuple[nn.Module, Any, Optimizer]:
    model: Any = nn.Sequential(
        nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)
    )
    torch.manual_seed(0)
    for p in model.parameters():
        nn.init.normal_(p, std=0.5)
    if maker == "spngd":
        return model, model, natgrad.SPNGD(model, lr=0.02, damping=0.1)
    replica = model
    if torch.distributed.is_initialized():
        replica = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.05, momentum=0.9)
    options: dict[str, Any] = {"refresh": natgrad.Every(2, 3), "factor_decay": 0.6}
    construct(natgrad.KFAC, replica, optimizer, damping=0.1, **options)
    return model, replica, optimizer


def steps_of(replica: nn.Module, optimizer: Optimizer, steps: range) -> None:
    from tests.support.toys import batch

    ready = torch.distributed.is_initialized()
    rank = torch.distributed.get_rank() if ready else 0
    world = torch.distributed.get_world_size() if ready else 1
    for step in steps:
        x, y = batch(step, torch.float32)
        part = slice(rank * 16 // world, (rank + 1) * 16 // world)
        optimizer.zero_grad()
        nn.functional.cross_entropy(replica(x[part]), y[part]).backward()
        optimizer.step()
    optimizer.zero_grad()


def _save_shards(rank: int, folder: Path) -> None:
    for maker in ("spngd", "ddp"):
        model, replica, optimizer = wrapped(maker)
        steps_of(replica, optimizer, range(5))
        state = get_optimizer_state_dict(replica, optimizer)
        whole = {"model": model.state_dict(), "optimizer": state}
        dcp.save(whole, checkpoint_id=folder / maker)


def _load_shards(rank: int, folder: Path) -> dict[str, Tensor]:
    seen: dict[str, Tensor] = {}
    for maker in ("spngd", "ddp"):
        model, replica, optimizer = wrapped(maker)
        state = get_optimizer_state_dict(replica, optimizer)
        whole = {"model": model.state_dict(), "optimizer": state}
        dcp.load(whole, checkpoint_id=folder / maker)
        model.load_state_dict(whole["model"])
        set_optimizer_state_dict(
            replica, optimizer, whole["optimizer"], options=StateDictOptions()
        )
        steps_of(replica, optimizer, range(5, 10))
        seen[maker] = torch.cat([p.detach().flatten() for p in model.parameters()])
    return seen


@pytest.mark.processes
def test_shards_of_two_ranks_load_on_any_number(tmp_path: Path) -> None:
    run_world(2, _save_shards, tmp_path)
    seen = [_load_shards(0, tmp_path)]
    for world in (2, 4):
        seen += run_world(world, _load_shards, tmp_path)
    for maker in ("spngd", "ddp"):
        model, replica, optimizer = wrapped(maker)
        steps_of(replica, optimizer, range(10))
        expected = torch.cat([p.detach().flatten() for p in model.parameters()])
        away = [(each[maker] - expected).abs().max().item() for each in seen]
        assert max(away) < 1e-6, (maker, away)


def _part(rank: int) -> str:
    model, replica, optimizer = wrapped("spngd")
    steps_of(replica, optimizer, range(2))
    state: Any = get_optimizer_state_dict(model, optimizer)
    heard: list[Any] = [None, None]
    torch.distributed.all_gather_object(heard, state)
    try:
        set_optimizer_state_dict(model, optimizer, heard[1 - rank])
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.processes
def test_another_ranks_shard_alone_is_refused() -> None:
    messages = run_world(2, _part)
    assert all("call gather() on every rank" in text for text in messages)
