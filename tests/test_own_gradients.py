"""Training on several ranks without DDP: natgrad reduces gradients itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.world import run_world
from torch import Tensor, nn

import natgrad
from natgrad import CommOptions, Every

pytestmark = pytest.mark.processes


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def spngd(model: nn.Module, **options: Any) -> Any:
    known = {"lr": 0.1, "damping": 0.1, "refresh": Every(10, 10)}
    return natgrad.SPNGD(model, **{**known, **options})


def backward(model: nn.Module, rank: int, batch: int) -> None:
    torch.manual_seed(100 * batch + rank)
    dtype = next(model.parameters()).dtype
    x, y = torch.randn(16, 6, dtype=dtype), torch.randint(0, 3, (16,))
    nn.functional.cross_entropy(model(x), y).backward()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


# -- gradients that are not those that were sent --------------------------------------


def forget(model: nn.Module, rank: int) -> None:
    """A batch whose loss was not finite, say, and that is thrown away."""
    backward(model, rank, 7)
    next(model.parameters()).grad.fill_(float("nan"))
    model.zero_grad()
    backward(model, rank, 1)


def forget_on_one(model: nn.Module, rank: int) -> None:
    forget(model, rank) if rank else backward(model, rank, 1)


def forget_in_place(model: nn.Module, rank: int) -> None:
    backward(model, rank, 7)
    next(model.parameters()).grad.fill_(float("nan"))
    model.zero_grad(set_to_none=False)
    backward(model, rank, 1)


def plain(model: nn.Module, rank: int) -> None:
    backward(model, rank, 1)


def replace(model: nn.Module, rank: int) -> None:
    backward(model, rank, 1)
    for p in model.parameters():
        p.grad = 0.5 * p.grad


def change(model: nn.Module, rank: int) -> None:
    backward(model, rank, 1)
    for p in model.parameters():
        p.grad.mul_(0.5)


Act = Callable[[nn.Module, int], None]
SAME: dict[str, tuple[Act, Act]] = {
    "zero_grad": (forget, plain),
    "zero_grad on one rank": (forget_on_one, plain),
    "zero_grad in place": (forget_in_place, plain),
    "p.grad = f(p.grad)": (replace, change),
}


def after(rank: int, act: Act, overlap: bool) -> Tensor:
    """Weights after a step that refreshes, one that does not, and one more."""
    model = net()
    optimizer = spngd(model, comm=CommOptions(overlap=overlap))
    for do in (plain, act, plain):
        optimizer.zero_grad()
        do(model, rank)
        optimizer.step()
    optimizer.close()
    return flat(model)


def compare(rank: int) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    return {
        name: (
            after(rank, one, True),
            after(rank, other, True),
            after(rank, one, False),
        )
        for name, (one, other) in SAME.items()
    }


def test_only_the_gradients_at_the_step_count() -> None:
    for result in run_world(2, compare):
        for name, (got, wanted, late) in result.items():
            assert torch.equal(got, wanted), name
            assert torch.equal(late, wanted), name
