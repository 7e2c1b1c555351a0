"""What once went wrong, or nearly: orders, skips, freezes and exceptions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.support.construct import construct
from tests.support.world import run_world
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import natgrad
from natgrad import CommOptions, Every
from natgrad.layers import LayerOptions
from natgrad.layers.table import TABLE, kind_of

DOUBLE = torch.float64


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def data(seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 4, generator=generator, dtype=DOUBLE)
    return x, torch.randint(0, 3, (8,), generator=generator)


def backward(model: Any, seed: int = 1) -> None:
    x, y = data(seed)
    nn.functional.cross_entropy(model(x), y).backward()


def kfac(model: nn.Module, **options: Any) -> natgrad.KFAC:
    options = {"refresh": Every(), "length": natgrad.Free(), **options}
    return construct(natgrad.KFAC, model, **options)


def test_each_parameter_decays_as_its_own_group_says() -> None:
    model = net()
    groups = [
        {"params": [("0.weight", model[0].weight), ("2.weight", model[2].weight)]},
        {
            "params": [("0.bias", model[0].bias), ("2.bias", model[2].bias)],
            "weight_decay": 0.0,
        },
    ]
    spngd = natgrad.SPNGD(model, groups, lr=0.1, weight_decay=0.5)
    before = model[0].bias.detach().clone()
    weight = model[0].weight.detach().clone()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    with pytest.warns(UserWarning, match="saw no forward"):
        spngd.step()
    assert torch.equal(model[0].bias, before)
    assert torch.allclose(model[0].weight, weight * (1 - 0.1 * 0.5))


@pytest.mark.parametrize("wrong", ["damping", "interval"])
def test_a_step_that_raised_leaves_nothing_behind(wrong: str) -> None:
    def bad(step: int) -> int:
        return -1 if step == 1 and broken else 1

    broken = True
    options: dict[str, Any] = {"factor_decay": 0.0}
    if wrong == "damping":
        options["damping"] = bad
    else:
        options["refresh"] = Every(statistics=bad, inverses=bad)
    model = net()
    natural = kfac(model, **options)
    backward(model)
    natural.step()
    first = {n: s.mean_eigenvalue for n, s in natural.engine.statistics.states.items()}
    model.zero_grad()
    backward(model)
    with pytest.raises(ValueError, match="Invalid"):
        natural.step()
    broken = False
    model.zero_grad()
    backward(model)
    natural.step()
    for name, s in natural.engine.statistics.states.items():
        assert s.mean_eigenvalue == pytest.approx(first[name])
        assert s.timing.refreshed == 2


def test_gradients_cleared_between_forward_and_backward() -> None:
    model = net()
    natural = kfac(model, factor_decay=0.5)
    backward(model, seed=2)  # a step that is skipped, as a GradScaler would
    x, y = data(seed=1)
    loss = nn.functional.cross_entropy(model(x), y)
    model.zero_grad()
    loss.backward()
    natural.step()
    other = net()
    expected = kfac(other, factor_decay=0.5)
    backward(other)
    expected.step()
    for name in natural.engine.statistics.states:
        assert torch.allclose(natural.statistic(name), expected.statistic(name))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_model_estimates_every_layer(reentrant: bool) -> None:
    model, plain = net(), net()
    natural, expected = (kfac(m, factor_decay=0.5) for m in (model, plain))
    x, y = data()
    outputs = checkpoint(model, x.requires_grad_(), use_reentrant=reentrant)
    assert isinstance(outputs, Tensor)
    nn.functional.cross_entropy(outputs, y).backward()
    natural.step()
    backward(plain)
    expected.step()
    for name in natural.engine.statistics.states:
        assert torch.allclose(natural.statistic(name), expected.statistic(name)), name


def test_sampling_with_a_frozen_layer() -> None:
    model = net()
    natural = kfac(model, fisher="sampled", factor_decay=0.5)
    model[0].requires_grad_(False)
    x, y = data()
    outputs = model(x)
    natural.sampled_backward(outputs)
    nn.functional.cross_entropy(outputs, y).backward()
    with pytest.warns(UserWarning, match="saw no forward and backward of 0"):
        natural.step()
    assert natural.statistic("2/G").any()


def test_freezing_with_zeroed_gradients() -> None:
    model = net()
    spngd = natgrad.SPNGD(model, lr=0.1, refresh=Every())
    backward(model)
    spngd.step()
    spngd.zero_grad(set_to_none=False)
    model[0].requires_grad_(False)
    frozen = model[0].weight.detach().clone()
    backward(model)
    spngd.step()
    assert torch.equal(model[0].weight, frozen)


def test_what_spngd_would_not_train_is_an_error() -> None:
    model = net()
    model[0].requires_grad_(False)
    spngd = natgrad.SPNGD(model, lr=0.1)
    model[0].requires_grad_(True)
    backward(model)
    with pytest.raises(RuntimeError, match=r"0\.weight was added, frozen or unf"):
        spngd.step()


def test_momentum_of_narrow_parameters_loads_in_float32() -> None:
    def make() -> tuple[nn.Module, natgrad.SPNGD]:
        model = net().to(torch.bfloat16)
        return model, natgrad.SPNGD(model, lr=0.1)

    model, spngd = make()
    x, y = data()
    nn.functional.cross_entropy(model(x.bfloat16()).float(), y).backward()
    spngd.step()
    other_model, other = make()
    other.load_state_dict(spngd.state_dict())
    for p, q in zip(model.parameters(), other_model.parameters(), strict=True):
        assert other.state[q]["velocity"].dtype == torch.float32
        assert torch.equal(other.state[q]["velocity"], spngd.state[p]["velocity"])


def test_a_row_of_none_leaves_a_subclass_out() -> None:
    class Mine(nn.Linear):
        pass

    options = LayerOptions()
    assert kind_of(Mine(2, 2), options) is not None
    natgrad.register_layer(Mine, None)
    try:
        assert kind_of(Mine(2, 2), options) is None
        assert kind_of(nn.Linear(2, 2), options) is not None
    finally:
        del TABLE[Mine]


def test_float16_sums_are_refused() -> None:
    with pytest.raises(ValueError, match="range sums exceed"):
        CommOptions(precision=torch.float16, half=("reduce_statistics",))


class Branches(nn.Module):
    """A layer that runs on rank 0 only."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4).double() for _ in range(3))

    def forward(self, x: Tensor, extra: bool) -> Tensor:
        x = torch.tanh(self.a(x))
        if extra:
            x = torch.tanh(self.c(x))
        return self.b(x)


def _branches(rank: int) -> tuple[dict[str, float], Tensor]:
    torch.manual_seed(0)
    model = Branches()
    spngd = construct(natgrad.SPNGD, model, lr=0.1, refresh=Every(), factor_decay=0.5)
    for step in range(3):
        spngd.zero_grad()
        x, y = data(seed=10 * step + rank)
        nn.functional.cross_entropy(model(x, rank == 0), y).backward()
        spngd.step()
    means = {n: s.mean_eigenvalue for n, s in spngd.engine.statistics.states.items()}
    return means, torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.processes
def test_a_layer_that_runs_on_one_rank_only() -> None:
    first, second = run_world(2, _branches)
    assert first[0] == second[0]
    assert all(value > 0 for value in first[0].values())
    assert torch.equal(first[1], second[1])


def _clipped(rank: int, overlap: bool) -> Tensor:
    model = net()
    comm = CommOptions(overlap=overlap)
    spngd = construct(natgrad.SPNGD, model, lr=0.1, refresh=Every(), comm=comm)
    for step in range(3):
        spngd.zero_grad()
        backward(model, seed=10 * step + rank)
        nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
        spngd.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.processes
def test_clipping_counts_under_overlap() -> None:
    with_overlap = run_world(2, _clipped, True)[0]
    without = run_world(2, _clipped, False)[1]
    assert torch.allclose(with_overlap, without, rtol=0, atol=1e-12)


def _half_inverses(rank: int) -> Tensor:
    model = net().float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    comm = CommOptions(precision=torch.float16)
    construct(natgrad.KFAC, model, optimizer, refresh=Every(), comm=comm)
    for step in range(3):
        optimizer.zero_grad()
        x, y = data(seed=10 * step + rank)
        nn.functional.cross_entropy(model(x.float()), y).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.processes
def test_half_precision_inverses_are_alike_on_all_ranks() -> None:
    first, second = run_world(2, _half_inverses)
    assert torch.equal(first, second)


def _other_plan(rank: int) -> str:
    model = nn.Sequential(*(nn.Linear(n, n + 1) for n in (3, 4, 5)))
    saved = natgrad.SPNGD(model, lr=0.1).state_dict()
    other = construct(natgrad.SPNGD, model, lr=0.1, placement="round_robin")
    try:
        other.load_state_dict(saved)
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.processes
def test_a_part_under_another_plan_is_refused() -> None:
    assert "under plan" in run_world(2, _other_plan)[0]


@pytest.mark.parametrize("name", ["KFAC", "Polar"])
def test_a_step_inside_autocast_is_as_exact_as_outside(name: str) -> None:
    """Also of a layer that has no statistics because it was used functionally."""

    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(self.first(x).tanh(), self.second.weight)

    def trained(cast: bool) -> list[Tensor]:
        model = Functional()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        if name == "KFAC":
            natgrad.KFAC(model, sgd)
        optimizer = natgrad.Polar(model, lr=0.1) if name == "Polar" else sgd
        x, y = data()
        nn.functional.cross_entropy(model(x.float()), y).backward()
        with torch.autocast("cpu", enabled=cast), pytest.warns(match="saw no forward"):
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    pairs = zip(trained(True), trained(False), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("make", [natgrad.SPNGD, natgrad.Polar])
@pytest.mark.parametrize("saved", [torch.float32, torch.float64])
def test_a_state_goes_on_in_another_precision(saved: torch.dtype, make: Any) -> None:
    other = torch.float64 if saved == torch.float32 else torch.float32
    losses = []
    state: Any = None
    for dtype in (saved, other):
        model = net().to(dtype)
        optimizer = make(model, lr=0.01)
        if state is not None:
            optimizer.load_state_dict(state)
        for seed in range(3):
            x, y = data(seed)
            loss = nn.functional.cross_entropy(model(x.to(dtype)), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        state = optimizer.state_dict()
        kept = [s for s in optimizer.engine.statistics.states.values() if s.inverse]
        assert kept
        assert all(x.dtype == dtype for s in kept for x in s.inverse or ())
        optimizer.close()
    assert all(map(math.isfinite, losses))


@pytest.mark.parametrize("freeze", [True, False])
@pytest.mark.parametrize("name", ["KFAC", "Polar"])
def test_a_bias_frozen_or_unfrozen_alone_is_named(name: str, freeze: bool) -> None:
    """Also in a step that estimates nothing."""
    model = net()
    bias = model[2].bias.requires_grad_(freeze)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    every = Every(statistics=5, inverses=5)
    if name == "KFAC":
        natgrad.KFAC(model, sgd, refresh=every)
    optimizer = sgd if name == "KFAC" else natgrad.Polar(model, lr=0.1, refresh=every)
    backward(model)
    optimizer.step()
    bias.requires_grad_(not freeze)
    backward(model)
    with pytest.raises(RuntimeError, match=r"(bias of 2|2\.bias) was"):
        optimizer.step()


def test_one_index_without_dims_is_a_batch_of_itself() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 2)).double()
    optimizer = natgrad.Polar(model, lr=0.1)
    before: Any = model[0].weight.detach().clone()  # type: ignore[operator]
    model(torch.tensor(3)).square().mean().backward()
    optimizer.step()
    changed = (model[0].weight.detach() != before).any(1)  # type: ignore[operator]
    assert changed.tolist() == [False, False, False, True]


@pytest.mark.parametrize(("option", "value"), [("momentum", 1.0), ("weight_decay", -1)])
def test_options_of_groups_are_checked(option: str, value: float) -> None:
    model = net()
    groups = [{"params": list(model.named_parameters()), option: value}]
    with pytest.raises(ValueError, match=f"Invalid {option}={value}"):
        natgrad.Polar(model, groups, lr=0.1)
