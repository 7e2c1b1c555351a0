"""What once went wrong, or nearly: orders, skips, freezes and exceptions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.world import run_world
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
    options = {"refresh": Every(), "kl_clip": None, **options}
    return natgrad.KFAC(model, **options)


def test_each_parameter_decays_as_its_own_group_says() -> None:
    model = net()
    groups = [
        {"params": [("0.weight", model[0].weight), ("2.weight", model[2].weight)]},
        {
            "params": [("0.bias", model[0].bias), ("2.bias", model[2].bias)],
            "weight_decay": 0.0,
        },
    ]
    spngd = natgrad.SPNGD(model, lr=0.1, weight_decay=0.5, param_groups=groups)
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
    options: dict[str, Any] = {"decay": 0.0}
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
    natural = kfac(model, decay=0.5)
    backward(model, seed=2)  # a step that is skipped, as a GradScaler would
    x, y = data(seed=1)
    loss = nn.functional.cross_entropy(model(x), y)
    model.zero_grad()
    loss.backward()
    natural.step()
    other = net()
    expected = kfac(other, decay=0.5)
    backward(other)
    expected.step()
    for name in natural.engine.statistics.states:
        assert torch.allclose(natural.statistic(name), expected.statistic(name))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_model_estimates_every_layer(reentrant: bool) -> None:
    model, plain = net(), net()
    natural, expected = (kfac(m, decay=0.5) for m in (model, plain))
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
    natural = kfac(model, fisher="sampled", decay=0.5)
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
    spngd = natgrad.SPNGD(model, lr=0.1, refresh=Every(), decay=0.5)
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
    spngd = natgrad.SPNGD(model, lr=0.1, refresh=Every(), comm=comm)
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
    natgrad.KFAC(model, optimizer, refresh=Every(), comm=comm)
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
    other = natgrad.SPNGD(model, lr=0.1, placement="round_robin")
    try:
        other.load_state_dict(saved)
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.processes
def test_a_part_under_another_plan_is_refused() -> None:
    assert "under plan" in run_world(2, _other_plan)[0]
