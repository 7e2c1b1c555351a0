"""Small models, data and loops for tests that need a training run, not a result."""

from collections.abc import Iterator
from typing import Any

import torch
from tests.support.construct import construct
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import natgrad

FEATURES, CLASSES = 5, 3


def mlp(dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Sequential:
    """Two linear layers, ``0`` and ``3``, with a batch norm, ``1``, between them."""
    torch.manual_seed(seed)
    layers = (nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3))
    return nn.Sequential(*layers).to(dtype)


def batch(step: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Sixteen examples that depend on the step alone."""
    source = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(16, FEATURES, generator=source, dtype=torch.float64)
    return x.to(dtype), x[:, :CLASSES].argmax(1)


def backward(model: nn.Module, step: int) -> Tensor:
    """Fresh gradients of the step's batch; returns the loss."""
    dtype = next(model.parameters()).dtype
    x, y = batch(step, dtype)
    model.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return loss.detach()


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> list[Tensor]:
    """The losses of some steps of training."""
    losses: list[Tensor] = []
    for step in steps:
        losses.append(backward(model, step))
        optimizer.step()
    return losses


def sgd(model: nn.Module, **options: Any) -> tuple[Optimizer, natgrad.KFAC]:
    """SGD with momentum, preconditioned."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return optimizer, construct(natgrad.KFAC, model, optimizer, **options)


def tensors(tree: Any) -> Iterator[Tensor]:
    """Every tensor in nested dicts and sequences."""
    if isinstance(tree, Tensor):
        yield tree
    for leaf in tree.values() if isinstance(tree, dict) else ():
        yield from tensors(leaf)
    for leaf in tree if isinstance(tree, list | tuple) else ():
        yield from tensors(leaf)


def snapshot(*sources: Any) -> list[Tensor]:
    """Copies of every tensor that models, optimizers and KFACs would save."""
    return [x.clone() for s in sources for x in tensors(s.state_dict())]


def parameters(model: nn.Module) -> list[Tensor]:
    """Copies of a model's parameters."""
    return [p.detach().clone() for p in model.parameters()]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    """Whether two lists of tensors are equal to the last bit."""
    pairs = zip(left, right, strict=True)
    return all(torch.equal(a, b) for a, b in pairs)
