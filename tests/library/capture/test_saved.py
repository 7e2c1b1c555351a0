"""A model that is saved or copied while natgrad watches it is as if nobody did."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from tests.support.toys import mlp, train
from torch import Tensor, nn

import natgrad
from natgrad import KFAC, SPNGD, Polar

ALLOWED: Any = [nn.Sequential, nn.Linear, nn.BatchNorm1d, nn.Tanh, set]


def watched(kind: str, model: nn.Module) -> Any:
    if kind == "kfac":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        owner: Any = KFAC(model, optimizer)
    else:
        owner = optimizer = (SPNGD if kind == "spngd" else Polar)(model, lr=0.1)
    train(model, optimizer, range(1))
    model.zero_grad()
    return owner


def saved(model: nn.Module) -> bytes:
    file = io.BytesIO()
    torch.save(model, file)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["kfac", "spngd", "polar"])
def test_a_saved_model_is_the_same_to_the_last_byte(kind: str) -> None:
    model = mlp()
    with watched(kind, model):
        found, pickled = saved(model), pickle.dumps(model)
    assert found == saved(model)
    assert pickled == pickle.dumps(model)
    assert b"natgrad" not in found


def test_a_saved_model_loads_with_the_usual_names_allowed() -> None:
    model = mlp()
    with watched("kfac", model):
        file = io.BytesIO(saved(model))
    with torch.serialization.safe_globals(ALLOWED):
        loaded = torch.load(file, weights_only=True)
    x = torch.randn(3, 5).double()
    assert torch.equal(loaded.eval()(x), model.eval()(x))


def test_hooks_of_others_are_kept() -> None:
    model = mlp()
    model[0].register_forward_hook(doubled)
    with watched("kfac", model):
        loaded = pickle.loads(pickle.dumps(model))
        copied = copy.deepcopy(model)
    for other in (loaded, copied):
        assert list(other[0]._forward_hooks.values()) == [doubled]
        assert not other._forward_pre_hooks
        assert not other._forward_hooks


def doubled(_: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
    return 2 * output


def test_the_model_itself_stays_watched() -> None:
    model = mlp()
    with watched("kfac", model) as kfac:
        copy.deepcopy(model)
        saved(model)
        model(torch.randn(16, 5).double()).square().sum(1).mean().backward()
        kfac.optimizer.step()
        assert kfac.engine.step == 2


def test_a_class_with_a_reducer_of_its_own_keeps_it() -> None:
    class Mine(nn.Linear):
        def __reduce__(self) -> Any:
            return nn.Linear, (2, 3)

    model = Mine(5, 3).double()
    with natgrad.KFAC(model, length=natgrad.KLClip(lr=0.1)):
        assert pickle.loads(pickle.dumps(model)).in_features == 2
