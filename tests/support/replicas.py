"""Small networks trained on one process or several, for tests that compare them."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from tests.support.construct import construct
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.parallel import DistributedDataParallel

import natgrad
from natgrad.layers.block import Observed
from natgrad.layers.norm import SyncBatchNorm

GLOBAL_BATCH = 12


class GlobalBatchNorm2d(nn.BatchNorm2d):
    """Batch statistics over all ranks, on CPU too, where SyncBatchNorm cannot run."""

    def forward(self, input: Tensor) -> Tensor:
        sums = torch.stack([input.sum((0, 2, 3)), input.square().sum((0, 2, 3))])
        count = input.numel() // input.shape[1]
        if dist.is_initialized():
            sums = all_reduce(sums)
            count *= dist.get_world_size()
        mean, square = sums / count
        self.moments = (mean.detach(), (square - mean**2).detach())
        shape = (1, -1, 1, 1)
        scale = torch.rsqrt(square - mean**2 + self.eps).reshape(shape)
        xhat = (input - mean.reshape(shape)) * scale
        return xhat * self.weight.reshape(shape) + self.bias.reshape(shape)


class GlobalBatchNorm(SyncBatchNorm):
    """The block kind of `GlobalBatchNorm2d`: its own statistics, not the rank's."""

    name = "global_batch_norm"

    def observe(self, module: Any, x: Tensor, y: Tensor, want: Any) -> Observed:
        mean, variance = module.moments
        return Observed(kept=(x, mean, torch.rsqrt(variance + module.eps)))


natgrad.register_layer(GlobalBatchNorm2d, GlobalBatchNorm)


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    """Convolutions, batch and layer norm, linear layers, and a plain parameter."""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(5))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        GlobalBatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 6, 3, stride=2, groups=2, bias=False),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(6 * 9, 5),
        Scale(),
        nn.LayerNorm(5),
        nn.Linear(5, 3),
    ).to(dtype)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to train.

    ``method`` is "kfac", "spngd" or "polar"; "ddp" (KFAC), "spngd ddp" or "polar ddp"
    with the model wrapped in DistributedDataParallel.
    """

    method: str
    options: dict[str, Any] = field(default_factory=lambda: {})
    steps: int = 20
    micro: int = 1
    dtype: torch.dtype = torch.float64
    lr: float = 0.02


def rank_and_world() -> tuple[int, int]:
    ready = dist.is_initialized()
    return (dist.get_rank(), dist.get_world_size()) if ready else (0, 1)


def build(case: Case) -> tuple[Any, torch.optim.Optimizer, Any]:
    """The model to call, the optimizer to step, and the KFAC or SPNGD."""
    model: Any = network(case.dtype)
    if case.method.endswith("ddp") and rank_and_world()[1] > 1:
        model = DistributedDataParallel(model)
    if case.method.startswith(("spngd", "polar")):
        kind = natgrad.SPNGD if case.method.startswith("spngd") else natgrad.Polar
        whole = construct(kind, model, lr=case.lr, momentum=0.9, **case.options)
        return model, whole, whole
    optimizer = torch.optim.SGD(model.parameters(), lr=case.lr, momentum=0.9)
    return model, optimizer, construct(natgrad.KFAC, model, optimizer, **case.options)


def batches(case: Case) -> list[tuple[Tensor, Tensor]]:
    """This rank's part of each global batch."""
    rank, world = rank_and_world()
    generator = torch.Generator().manual_seed(1)
    part, share = GLOBAL_BATCH // world, []
    for _ in range(case.steps):
        x = torch.randn(GLOBAL_BATCH, 1, 8, 8, generator=generator, dtype=torch.float64)
        y = torch.randint(0, 3, (GLOBAL_BATCH,), generator=generator)
        mine = slice(rank * part, (rank + 1) * part)
        share.append((x[mine].to(case.dtype), y[mine]))
    return share


def train(
    case: Case,
    steps: slice = slice(None),
    start: Any = None,
    save: bool = False,
) -> tuple[Tensor, Any, list[Any]]:
    """All parameters after the last step, the KFAC or SPNGD, and traffic by step.

    ``start`` is what an earlier part with ``save`` left in the KFAC's ``saved``.
    """
    model, optimizer, natural = build(case)
    if start is not None:
        getattr(model, "module", model).load_state_dict(start[0])
        optimizer.load_state_dict(start[1])
    traffic: list[Any] = []
    for x, y in batches(case)[steps]:
        optimizer.zero_grad()
        pieces = zip(x.chunk(case.micro), y.chunk(case.micro), strict=True)
        for small_x, small_y in pieces:
            loss = nn.functional.cross_entropy(model(small_x), small_y)
            (loss / case.micro).backward()
        optimizer.step()
        traffic.append(natural.traffic()["step"])
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    if save:
        natural.gather()
        plain = getattr(model, "module", model)
        natural.saved = copy.deepcopy((plain.state_dict(), optimizer.state_dict()))
    natural.close()
    return flat, natural, traffic
