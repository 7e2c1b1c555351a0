"""Who has hooks on a model, whose parameters are touched, and what errors leave."""

import copy
import gc
from typing import Any

import pytest
import torch
from tests.support.construct import construct
from torch import Tensor, nn

import natgrad
from natgrad import KFAC, SPNGD, Every
from natgrad.capture.hooks import _STANCE


def made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def backward(model: nn.Module) -> None:
    torch.manual_seed(1)
    model.zero_grad()
    model(torch.randn(16, 4).double()).square().sum(1).mean().backward()


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) for m in model.modules())


@pytest.mark.parametrize("wrong", ["a name", "a setting"])
def test_a_constructor_that_fails_leaves_no_hooks(wrong: str) -> None:
    gc.collect()
    model, watched = made(), len(_STANCE.watched)
    params = list(model[0].named_parameters())
    group: dict[str, Any] = {"params": params, "momentum": 1.5}
    if wrong == "a name":
        group = {"params": [*params, ("again", params[0][1]), object()]}
    with pytest.raises((ValueError, TypeError)):
        SPNGD(model, [group], lr=0.1)
    assert hooks(model) + len(model._forward_pre_hooks) == 0
    assert len(_STANCE.watched) == watched


def test_a_second_one_on_a_model_is_refused_until_the_first_is_closed() -> None:
    model = made()
    first = KFAC(model, sgd(model))
    for make in (lambda: KFAC(model, sgd(model)), lambda: SPNGD(model[2], lr=0.1)):
        with pytest.raises(RuntimeError, match="close"):
            make()
    first.close()
    with KFAC(model, sgd(model)):
        assert hooks(model) == 3  # two layers' and the model's own


def test_one_that_was_dropped_is_gone() -> None:
    """The hooks keep nothing alive: its optimizer does."""
    model = made()
    for _ in range(3):
        optimizer = sgd(model)
        natgrad.KFAC(model, optimizer)
        assert hooks(model) == 3
        gc.collect()
        backward(model)
        plain = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        pairs = zip(model.parameters(), plain, strict=True)
        assert not all(torch.equal(p.grad, g) for p, g in pairs if p.grad is not None)
        del optimizer
    gc.collect()
    assert hooks(model) == 0


def test_a_copy_of_a_watched_model_is_free() -> None:
    model = made()
    with KFAC(model, sgd(model)):
        twin = copy.deepcopy(model)
        with KFAC(twin, sgd(twin)) as kfac:
            backward(twin)
            kfac.optimizer.step()  # pyright: ignore[reportOptionalMemberAccess]


@pytest.mark.parametrize("rule", [natgrad.Plain(), natgrad.Adam()])
def test_layers_that_the_optimizer_does_not_have_are_left_alone(rule: Any) -> None:
    model = made()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    options: dict[str, Any] = {"fallback": rule, "length": natgrad.Free()}
    options["refresh"] = Every()
    with construct(KFAC, model, optimizer, damping=1e-4, **options) as kfac:
        backward(model)
        grads: dict[str, Tensor] = {
            name: p.grad.clone()
            for name, p in model.named_parameters()
            if p.grad is not None
        }
        optimizer.step()
        for name, p in model.named_parameters():
            assert p.grad is not None
            assert torch.equal(p.grad, grads[name]) == name.startswith("2."), name
        lines = [x for x in kfac.report().splitlines() if x.startswith("2.")]
        assert all("not the optimizer's" in line for line in lines)


def test_a_bias_that_the_optimizer_does_not_have_is_left_alone() -> None:
    model = made()
    bias = model[2].bias
    params = [p for p in model.parameters() if p is not bias]
    options: dict[str, Any] = {
        "fallback": natgrad.Adam(),
        "length": natgrad.Free(),
        "refresh": Every(),
    }
    optimizer = torch.optim.SGD(params, lr=0.1)
    with construct(KFAC, model, optimizer, **options) as kfac:
        backward(model)
        assert isinstance(bias.grad, Tensor)
        before = bias.grad.clone()
        optimizer.step()
        assert torch.equal(bias.grad, before)
        assert kfac.engine.block["2.bias"].kind is None
        assert kfac.engine.block["2"].parameters == (model[2].weight,)


def test_an_optimizer_of_another_model_is_refused() -> None:
    model = made()
    with pytest.raises(ValueError, match="no parameter of this Sequential"):
        KFAC(model, sgd(made()))
    assert hooks(model) == 0


def test_the_spectrum_of_a_corrected_block_is_that_of_its_factors() -> None:
    model = made()
    optimizer = sgd(model)
    options: dict[str, Any] = {"rule": natgrad.EKFAC(style="eigen")}
    with construct(
        KFAC, model, optimizer, refresh=Every(), length=natgrad.Free(), **options
    ) as kfac:
        kfac.watch(1)
        for _ in range(3):
            backward(model)
            optimizer.step()
        found = kfac.diagnostics()
        right, left = (found["statistics"][f"0/{kind}"] for kind in "AG")
        block = found["blocks"]["0"]
        for name in ("largest", "smallest", "effective_rank"):
            assert block[name] == pytest.approx(right[name] * left[name]), name
        assert block["effective_rank"] <= block["size"]
