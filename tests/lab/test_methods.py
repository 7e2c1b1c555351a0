"""Update rules: each lowers a loss, Muon sees matrices, states load safely."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from torch import nn

import natgrad
from natgrad_lab import named
from natgrad_lab.errors import UserError
from natgrad_lab.train import methods
from natgrad_lab.train.config import CurvatureConfig, OptimizerConfig, TrainConfig
from natgrad_lab.train.flat import Flat, flat_view
from natgrad_lab.train.options import options_of

CURVED = CurvatureConfig(damping=0.1, norm="unit")


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(4 * 4 * 4, 3))


def backward(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(8, 2, 6, 6, generator=generator)
    model.zero_grad()
    model(inputs).square().mean().backward()


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_muon_steps_flattened_convolutions_as_matrices(layout: Any) -> None:
    model = net().to(memory_format=layout)  # type: ignore[call-overload]
    conv = model[0].weight  # type: ignore[index]
    optimizer = methods.make(
        model,
        TrainConfig(optimizer=OptimizerConfig(name="muon", lr=0.1, momentum=0.0)),
        examples=100,
    ).optimizer
    backward(model, 1)
    matrix = nn.Parameter(flat_view(conv.detach()).clone())
    moved = conv.grad if layout == torch.contiguous_format else conv.grad.movedim(1, -1)
    matrix.grad = moved.reshape(4, -1).clone()
    torch.optim.Muon([matrix], lr=0.1, momentum=0.0, weight_decay=0.0).step()
    optimizer.step()
    torch.testing.assert_close(flat_view(conv.detach()), matrix.detach())


def made(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    config = TrainConfig(optimizer=OptimizerConfig(**options))
    return methods.make(model, config, examples=100).optimizer


def test_muon_gives_the_rest_to_sgd_and_resumes() -> None:
    one, two = net(), net()
    options: Any = {"name": "muon", "lr": 0.05, "rest_lr": 0.2}
    first, second = made(one, **options), made(two, **options)
    backward(one, 0)
    bias = one[0].bias  # type: ignore[index]
    expected = bias.detach() - 0.2 * bias.grad
    first.step()
    torch.testing.assert_close(bias.detach(), expected)
    two.load_state_dict(one.state_dict())
    second.load_state_dict(deepcopy(first.state_dict()))
    for model, optimizer in ((one, first), (two, second)):
        backward(model, 1)
        optimizer.step()
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b)


def test_options_of_one_rule_are_refused_with_another() -> None:
    with pytest.raises(ValueError, match=r"optimizer.rest=.*unless .* is muon"):
        OptimizerConfig(name="sgd", rest="adamw")
    with pytest.raises(ValueError, match=r"optimizer.flat=.*unless .* is soap"):
        OptimizerConfig(name="muon", flat=True)


def test_muon_can_give_the_rest_to_adamw() -> None:
    model: Any = net()
    optimizer = made(model, name="muon", lr=0.05, rest="adamw")
    bias = model[0].bias.detach().clone()
    backward(model, 0)
    optimizer.step()
    moved = (model[0].bias.detach() - bias).abs()  # Adam's first step has lr's size
    torch.testing.assert_close(moved, torch.full_like(moved, 0.01), rtol=1e-3, atol=0)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("trust", [False, True])
def test_soap_can_see_convolutions_as_matrices(layout: Any, trust: bool) -> None:
    """It does to a convolution what it does to a linear layer of its matrix."""
    model: Any = net().to(memory_format=layout)  # type: ignore[call-overload]
    optimizer = made(model, name="soap", lr=0.05, flat=True, trust=trust, rest_lr=0.05)
    flat = nn.ParameterList([flat_view(model[0].weight.detach()).clone()])
    alone = made(flat, name="soap", lr=0.05, trust=trust)
    for step in range(3):
        backward(model, step)
        grad = model[0].weight.grad
        moved = grad if layout == torch.contiguous_format else grad.movedim(1, -1)
        flat[0].grad = moved.reshape(4, -1).clone()
        optimizer.step()
        alone.step()
    torch.testing.assert_close(flat_view(model[0].weight.detach()), flat[0].detach())


def test_a_schedule_reaches_the_optimizer_inside() -> None:
    p = nn.Parameter(torch.ones(2, 1, 1, 1))
    optimizer = Flat([p], lambda seen: torch.optim.SGD(seen, lr=1.0))
    optimizer.param_groups[0]["lr"] = 0.25
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert p.flatten().tolist() == [0.75, 0.75]


@pytest.mark.parametrize("name", ["sgd", "adamw", "muon", "soap", "shampoo", "spngd"])
def test_every_optimizer_lowers_the_loss_and_its_state_loads_safely(
    name: Any, tmp_path: Path
) -> None:
    model = net()
    settings = TrainConfig(
        optimizer=OptimizerConfig(name=name, lr=0.01), curvature=CURVED
    )
    method = methods.make(model, settings, examples=100)
    inputs, labels = torch.randn(32, 2, 6, 6), torch.randint(3, (32,))
    losses = []
    for _ in range(12):
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        method.optimizer.step()
        method.optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    torch.save(method.optimizer.state_dict(), tmp_path / "state.pt")
    torch.load(tmp_path / "state.pt", weights_only=True)
    assert method.facts(12)["lr"] == 0.01
    method.close()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pytorch_optimizer", None)
    settings = TrainConfig(optimizer=OptimizerConfig(name="soap"))
    with pytest.raises(UserError, match="pip install pytorch_optimizer"):
        methods.make(net(), settings, examples=100)


@pytest.mark.parametrize("name", ["sgd", "adamw", "muon", "soap"])
def test_a_trust_ratio_gives_a_change_the_weights_norm(name: Any) -> None:
    def make() -> tuple[Any, torch.optim.Optimizer]:
        model: Any = net()
        settings: Any = {"lr": 0.05, "momentum": 0.9, "trust": True}
        config = TrainConfig(optimizer=OptimizerConfig(name=name, **settings))
        return model, methods.make(model, config, examples=100).optimizer

    model, optimizer = make()
    for step in range(2):  # SOAP's first step only looks
        backward(model, step)
        before = model[0].weight.detach().clone()
        optimizer.step()
        change = model[0].weight.detach() - before
    torch.testing.assert_close(change.norm(), 0.05 * before.norm())  # pyright: ignore

    other, resumed = make()
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(deepcopy(optimizer.state_dict()))
    resumed.param_groups[0]["lr"] = 0.025  # as a scheduler does
    backward(other, 2)
    before = other[0].weight.detach().clone()
    resumed.step()
    change = other[0].weight.detach() - before
    torch.testing.assert_close(change.norm(), 0.025 * before.norm())


@pytest.mark.parametrize(("rest_lr", "rate"), [(0.03, 0.03), (None, 0.01)])
def test_a_trust_ratio_is_for_matrices_and_adamw_has_the_rest(
    rest_lr: float | None, rate: float
) -> None:
    model: Any = net()
    settings: Any = {"lr": 0.05, "momentum": 0.0, "trust": True, "rest_lr": rest_lr}
    config = TrainConfig(optimizer=OptimizerConfig(name="sgd", **settings))
    optimizer = methods.make(model, config, examples=100).optimizer
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([0.05, rate])
    weight, bias = model[0].weight.detach().clone(), model[0].bias.detach().clone()
    backward(model, 0)
    direction = -model[0].weight.grad / model[0].weight.grad.norm()
    optimizer.step()
    change = model[0].weight.detach() - weight
    torch.testing.assert_close(change, 0.05 * weight.norm() * direction)
    # Adam's first step has the learning rate's size
    moved = (model[0].bias.detach() - bias).abs()
    torch.testing.assert_close(moved, torch.full_like(moved, rate), rtol=1e-3, atol=0)


@pytest.mark.parametrize("kind", [natgrad.KFAC, natgrad.SPNGD, natgrad.Polar])
def test_what_a_config_does_not_say_is_the_optimizers_default(kind: Any) -> None:
    names = {natgrad.SPNGD: "spngd", natgrad.Polar: "polar"}
    name: Any = names.get(kind, "sgd")
    optimizer = OptimizerConfig(name=name, kfac=name == "sgd", lr=0.2)
    method = methods.make(net(), TrainConfig(optimizer=optimizer), examples=100)
    assert method.curved is not None
    found, wanted = method.curved.engine.options, kind.defaults
    assert callable(found.damping)
    assert found.damping(0) == wanted.damping
    rate = wanted.lr if name == "sgd" else 0.2
    usual = replace(found, damping=wanted.damping, comm=wanted.comm)
    assert usual == replace(wanted, lr=rate)
    assert method.optimizer.param_groups[0]["momentum"] == wanted.momentum
    method.close()


def test_what_a_config_says_changes_the_defaults() -> None:
    curvature = CurvatureConfig(
        rule="eigen_adam",
        sides="outputs",
        beta2=0.9,
        length="free",
        fallback_rate=0.5,
        factor_decay=0.3,
        subsample=4,
        largest_factor="whole",
    )
    optimizer = OptimizerConfig(name="polar", momentum=0.6, average="updates")
    config = TrainConfig(optimizer=optimizer, curvature=curvature)
    found = options_of(config, examples=100)
    assert found.rule == natgrad.EigenAdam(sides="outputs", beta2=0.9)
    assert found.fallback == natgrad.Adam(rate=0.5, beta2=0.9)
    assert (found.length, found.subsample) == (natgrad.Free(), 4)
    assert (found.largest_factor, found.factor_decay) == (None, 0.3)
    assert found.average == natgrad.AverageUpdates()
    kept = natgrad.Polar.defaults
    assert (found.momentum, found.refresh, found.decay) == (
        0.6,
        kept.refresh,
        kept.decay,
    )


def test_a_setting_that_a_rule_does_not_have_is_refused() -> None:
    curvature = CurvatureConfig(rule="ekfac", whitening="full")
    config = TrainConfig(optimizer=OptimizerConfig(kfac=True), curvature=curvature)
    with pytest.raises(UserError, match="whitening='full': EKFAC has basis, moments"):
        options_of(config, examples=100)


def test_flags_call_parts_what_the_library_does() -> None:
    hints = get_type_hints(CurvatureConfig)
    known = {
        "rule": named.RULES,
        "fallback": named.FALLBACKS,
        "length": named.LENGTHS,
    }
    for name, kinds in known.items():
        words, _ = get_args(hints[name])
        assert set(get_args(words)) == set(kinds)


def test_how_processes_exchange_is_reached_from_a_config() -> None:
    config = TrainConfig(
        curvature=CurvatureConfig(
            wire="bfloat16",
            half=("reduce_statistics",),
            bucket_mib=0.5,
            hierarchical="no",
        )
    )
    comm = options_of(config, examples=100).comm
    assert (comm.precision, comm.half) == (torch.bfloat16, ("reduce_statistics",))
    assert (comm.bucket_bytes, comm.hierarchical) == (2**19, False)
    assert options_of(TrainConfig(), examples=100).comm.precision is None
    with pytest.raises(ValueError, match=r"curvature.half=.*curvature.wire"):
        CurvatureConfig(half=("share_updates",))
    wrong = TrainConfig(curvature=CurvatureConfig(wire="float16", half=("updates",)))
    with pytest.raises(ValueError, match=r"half=\('updates',\).*reduce_statistics"):
        options_of(wrong, examples=100)
