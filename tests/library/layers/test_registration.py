"""What cannot be trained is refused in words, and what is not ours is left alone."""

from functools import partial
from typing import Any

import pytest
import torch
from tests.support.toys import backward, batch, mlp, train
from tests.support.world import run_world
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from natgrad import KFAC, SPNGD, Every, Polar

# -- what is given in the wrong place -------------------------------------------------


@pytest.mark.parametrize("make", [partial(SPNGD, lr=0.1), Polar, KFAC])
@pytest.mark.parametrize("given", ["generator", "list", "optimizer"])
def test_a_model_that_is_none(make: Any, given: str) -> None:
    model = mlp()
    wrong: Any = {
        "generator": model.parameters(),
        "list": [{"params": list(model.parameters())}],
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
    }[given]
    with pytest.raises(TypeError, match=r"Must be the model itself.*Polar\(model"):
        make(wrong)


@pytest.mark.parametrize("given", ["swapped", "parameters"])
def test_an_optimizer_that_is_none(given: str) -> None:
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    wrong: Any = (sgd, model) if given == "swapped" else (model, model.parameters())
    with pytest.raises(TypeError, match=r"after the model: KFAC\(model, optimizer\)"):
        KFAC(*wrong)


def named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters())


@pytest.mark.parametrize("make", [SPNGD, Polar])
def test_a_parameter_outside_of_the_model_is_refused_by_name(make: Any) -> None:
    model, temperature = mlp(), nn.Parameter(torch.ones(1))
    groups: Any = [{"params": named(model)}]
    extra: Any = {"params": [("temperature", temperature)]}
    match = r"temperature of group \d, of shape \(1,\).*optimizer of its own"
    with pytest.raises(ValueError, match=match):
        make(model, [*groups, extra], lr=0.1)
    assert not model[0]._forward_hooks


def test_a_parameter_outside_of_the_model_is_its_optimizer_s_under_kfac() -> None:
    model, temperature = mlp(), nn.Parameter(torch.ones(1).double())
    sgd = torch.optim.SGD([*model.parameters(), temperature], lr=0.1)
    with KFAC(model, sgd):
        x, y = batch(0)
        F.cross_entropy(model(x) * temperature, y).backward()
        sgd.step()
        moved = temperature.item()
        assert moved != 1.0
        sgd.zero_grad()
        F.cross_entropy(model(x) * temperature * float("nan"), y).backward()
        with pytest.warns(UserWarning, match="skipped"):
            sgd.step()
        assert temperature.item() == moved


# -- what belongs to others -----------------------------------------------------------


def test_a_skipped_step_leaves_the_gradients_of_another_optimizer() -> None:
    model = mlp()
    body = torch.optim.SGD(model[0].parameters(), lr=0.1)
    head = torch.optim.SGD([*model[1].parameters(), *model[3].parameters()], lr=0.1)
    with KFAC(model, body, refresh=Every()):
        backward(model, 0)
        weight = model[0].get_parameter("weight")
        assert weight.grad is not None
        weight.grad[0, 0] = float("nan")
        before = [p.grad.clone() for p in model[3].parameters() if p.grad is not None]
        with pytest.warns(UserWarning, match="skipped"):
            body.step()
        assert weight.grad is None
        after = [p.grad for p in model[3].parameters()]
        assert len(before) == 2
        for g, old in zip(after, before, strict=True):
            assert isinstance(g, Tensor)
            assert torch.equal(g, old)
        old = model[3].get_parameter("weight").detach().clone()
        head.step()
        assert not torch.equal(old, model[3].get_parameter("weight"))


# -- what was replaced ----------------------------------------------------------------


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind != "kfac":
        return {"spngd": SPNGD, "polar": Polar}[kind](model, lr=0.01)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    KFAC(model, sgd)
    return sgd


def replaced(model: nn.Sequential, how: str) -> None:
    if how == "sharded":
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    elif how == "parametrised":
        nn.utils.parametrizations.weight_norm(model[0])
    else:
        layer = model[0]
        layer.weight = nn.Parameter(layer.get_parameter("weight").detach().clone())


@pytest.mark.parametrize("kind", ["kfac", "spngd", "polar"])
@pytest.mark.parametrize("how", ["parametrised", "assigned"])
def test_a_weight_that_was_replaced_since(kind: str, how: str) -> None:
    model = mlp()
    optimizer = optimizer_of(kind, model)
    replaced(model, how)
    with pytest.raises(RuntimeError, match=r"weight of 0.*make the optimizer after it"):
        train(model, optimizer, range(1))


def sharded(_: int) -> None:
    for kind in ("kfac", "spngd", "polar"):
        model = mlp()
        optimizer = optimizer_of(kind, model)
        replaced(model, "sharded")
        with pytest.raises(RuntimeError, match=r"of 0.*fully_shard.*after it"):
            train(model, optimizer, range(1))


@pytest.mark.processes
def test_a_model_that_was_sharded_since() -> None:
    run_world(1, sharded)
