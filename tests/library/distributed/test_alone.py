"""Several ranks need torch and nothing else."""

from typing import Any

import torch
from tests.support.world import run_world
from torch import Tensor, nn
from torch.nn import functional as F

import natgrad


def without_numpy(rank: int, kind: str) -> Tensor:
    """One step where a tensor cannot become an array, as without NumPy."""

    def numpy(self: Tensor, **_: Any) -> None:
        raise RuntimeError("Numpy is not available")

    torch.Tensor.numpy = numpy  # type: ignore[method-assign,assignment]
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    if kind == "KFAC":
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        natgrad.KFAC(model, optimizer)
    else:
        optimizer = natgrad.Polar(model, strategy="auto")
    x = torch.full((4, 3), 1.0 + rank)
    F.cross_entropy(model(x), torch.tensor([0, 1, 0, 1])).backward()
    optimizer.step()
    return model.weight.detach()


def test_ranks_need_no_numpy() -> None:
    for kind in ("KFAC", "Polar"):
        first, second = run_world(2, without_numpy, kind)
        assert torch.equal(first, second)
