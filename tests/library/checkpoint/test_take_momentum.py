"""Momentum of a state whose rules are others, and groups that a load never replaces."""

import io
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.world import run_world
from torch import Tensor, nn

import natgrad
from natgrad import SPNGD, AverageGradients, EigenAdam, Every, Free, Kronecker, Plain

SGD: dict[str, Any] = {"rule": Plain(), "length": Free(), "lr": 0.05, "momentum": 0.9}


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def backward(model: nn.Module, step: int, rank: int = 0, world: int = 1) -> None:
    source = torch.Generator().manual_seed(step)
    x, y = (torch.randn(8, n, generator=source).double() for n in (4, 3))
    share = slice(rank * 8 // world, (rank + 1) * 8 // world)
    model.zero_grad()
    (model(x[share]) - y[share]).square().sum(1).mean().backward()


def made(model: nn.Module, groups: Any = None, **parts: Any) -> SPNGD:
    return SPNGD(model, groups, options=replace(SPNGD.defaults, **(SGD | parts)))


def saved(optimizer: SPNGD) -> Any:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def after(steps: int, **parts: Any) -> tuple[Any, Any]:
    """A model after some steps, and the state of its optimizer."""
    model = net()
    with made(model, **parts) as optimizer:
        for step in range(steps):
            backward(model, step)
            optimizer.step()
        return model, saved(optimizer)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_another_rule_is_refused_with_both_side_by_side() -> None:
    model, state = after(2, rule=Kronecker())
    with made(model, rule=EigenAdam()) as optimizer:
        with pytest.raises(ValueError, match=r"saved: .*kronecker.*\n +here: .*eigen_"):
            optimizer.load_state_dict(state)
        with pytest.raises(ValueError, match=r"natgrad\.take_momentum"):
            optimizer.load_state_dict(state)


def test_momentum_is_taken_over_by_names_into_other_groups_and_rules() -> None:
    # From K-FAC to SGD in two groups, in another order: as torch's SGD with the buffer
    # that the velocity stands for, v = -lr buffer.
    model, state = after(3, rule=Kronecker(), refresh=Every(1, 1))
    copy = net()
    copy.load_state_dict(model.state_dict())
    sgd = torch.optim.SGD(copy.parameters(), lr=0.05, momentum=0.9)
    for i, p in enumerate(copy.parameters()):
        sgd.state[p]["momentum_buffer"] = state["state"][i]["velocity"] / -0.05
    named = list(model.named_parameters())
    with made(model, [{"params": named[2:]}, {"params": named[:2]}]) as optimizer:
        assert set(natgrad.take_momentum(optimizer, state)) == {n for n, _ in named}
        for step in range(3, 6):
            for each, host in ((model, optimizer), (copy, sgd)):
                backward(each, step)
                host.step()
    torch.testing.assert_close(weights(model), weights(copy), rtol=1e-12, atol=1e-12)


def test_only_an_average_of_the_same_thing_is_taken() -> None:
    model, state = after(2, average=AverageGradients())
    with made(model) as updates, pytest.raises(ValueError, match=r"AverageUpdates\(\)"):
        updates.load_state_dict(state)
    with made(model) as updates:
        assert natgrad.take_momentum(updates, state) == []
        assert not updates.state
    first, rest = (
        list(model.named_parameters())[0:1],
        list(model.named_parameters())[1:],
    )
    groups = [{"params": first, "average": AverageGradients()}, {"params": rest}]
    with made(model, groups) as both:
        assert natgrad.take_momentum(both, state) == ["0.weight"]
        assert both.state[model[0].weight]["mass"] == state["state"][0]["mass"]


def test_what_cannot_be_taken_changes_nothing() -> None:
    model, state = after(1)
    with made(model) as optimizer:
        backward(model, 1)
        optimizer.step()
        before = saved(optimizer)["state"]
        wrong = {**state, "state": {**state["state"], 1: {"velocity": torch.ones(2)}}}
        with pytest.raises(ValueError, match=r"momentum of '0.bias'.*\(4,\)"):
            natgrad.take_momentum(optimizer, wrong)
        renamed = dict(state["param_groups"][0], param_names=["a", "b", "c", "d"])
        with pytest.raises(ValueError, match=r"of other parameters: .*0\.bias"):
            natgrad.take_momentum(optimizer, {**state, "param_groups": [renamed]})
        part = {**state, "natgrad": {**state["natgrad"], "part": [0, 2, "x"]}}
        with pytest.raises(ValueError, match="Must be whole"):
            natgrad.take_momentum(optimizer, part)
        with pytest.raises(ValueError, match="Invalid optimizer state"):
            natgrad.take_momentum(optimizer, {})
        torch.testing.assert_close(saved(optimizer)["state"], before, rtol=0, atol=0)


def test_a_load_replaces_no_part_of_a_group() -> None:
    # The engine works by what it was made with: the group must not say otherwise.
    model = net()
    groups = [{"params": list(model.named_parameters()), "length": Free(), "lr": 0.1}]
    with made(model, groups, refresh=Every(1, 1)) as optimizer:
        backward(model, 0)
        optimizer.step()
        state = saved(optimizer)
    trust = natgrad.LayerTrust()
    groups = [{"params": list(model.named_parameters()), "length": trust, "lr": 0.2}]
    with made(model, groups) as other:
        mine = dict(other.param_groups[0])
        other.load_state_dict(state)
        assert other.param_groups[0]["length"] == mine["length"]
        assert other.param_groups[0]["lr"] == 0.1


def changed_rules(rank: int = 0, world: int = 1) -> Tensor:
    """Two steps of K-FAC, then two of SGD with its momentum."""
    model = net()
    with made(model, rule=Kronecker(), refresh=Every(1, 1)) as first:
        for step in range(2):
            backward(model, step, rank, world)
            first.step()
        first.gather()
        state = saved(first)
    with made(model, strategy="layer_wise") as second:
        natgrad.take_momentum(second, state)
        for step in range(2, 4):
            backward(model, step, rank, world)
            second.step()
    return weights(model)


def test_on_several_ranks_as_in_one_process() -> None:
    alone = changed_rules()
    for found in run_world(2, changed_rules, 2):
        torch.testing.assert_close(found, alone, rtol=1e-9, atol=1e-11)
