"""Sharded models: ranks that are lost or disagree, five ranks, experts without work."""

import os
from contextlib import closing
from functools import partial
from typing import Any

import pytest
import torch
from tests.library.distributed.test_sharded import whole
from tests.support.fleet import outcome, quick, store_of_test
from tests.support.world import run_world
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F

import natgrad

pytestmark = pytest.mark.processes
WIDTH, EXPERTS = 4, 3


class Expert(nn.Module):
    """A linear layer for each expert, of tokens that are sorted by expert."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 2)

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        rows = x.split(sizes.tolist())
        return torch.cat([a @ w.T for a, w in zip(rows, self.weight, strict=True)])


natgrad.register_layer(Expert, "experts")


class Experts(nn.Module):
    """Each token goes to one of three, now and then none to the third."""

    def __init__(self) -> None:
        super().__init__()
        # without a bias: that of keys has no gradient but rounding
        self.attention = nn.MultiheadAttention(WIDTH, 2, bias=False, batch_first=True)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.experts = Expert()
        self.norm = nn.GroupNorm(2, WIDTH)
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, who: Tensor) -> Tensor:
        h = torch.tanh(self.first(self.attention(x, x, x)[0].sum(1)))
        order, sizes = who.argsort(), torch.bincount(who, minlength=EXPERTS)
        h = self.experts(h[order], sizes)[order.argsort()]
        return self.last(self.norm(h))


def build() -> Experts:
    torch.manual_seed(0)
    return Experts().double()


def make(name: str, model: nn.Module) -> tuple[Any, Any]:
    """What steps, and what is natgrad's in it."""
    if name == "kfac":
        host = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return host, natgrad.KFAC(model, host, damping=1e-2)
    kinds: dict[str, Any] = {
        "muon": partial(natgrad.Muon, lr=1e-2),
        "shampoo": partial(natgrad.Shampoo, lr=1e-2),
        "polar": partial(natgrad.Polar, lr=1e-2),
        "spngd": partial(natgrad.SPNGD, lr=1e-2, momentum=0.9, damping=1e-2),
    }
    optimizer = kinds[name](model)
    return optimizer, optimizer


def step(model: Any, optimizer: Any, seed: int, part: int = 0, parts: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(20, 4, WIDTH, dtype=torch.float64, generator=generator)
    # in every other step the third expert has no token
    who = torch.randint(0, EXPERTS - seed % 2, (20,), generator=generator)
    y = torch.randint(0, 3, (20,), generator=generator)
    x, who, y = (t.chunk(parts)[part] for t in (x, who, y))
    optimizer.zero_grad()
    F.cross_entropy(model(x, who), y).backward()
    optimizer.step()


def five(rank: int, world: int, steps: int) -> Any:
    found: dict[str, Any] = {}
    for name in ("muon", "shampoo", "polar", "spngd", "kfac"):
        model = build()
        fully_shard(model)
        stepper, optimizer = make(name, model)
        with closing(optimizer):
            for i in range(steps):
                step(model, stepper, i, rank, world)
            optimizer.engine.plan.check()
            states = optimizer.engine.statistics.states
            kept = [n for n, s in states.items() if s.average is not None]
            found[name] = whole(model), kept
    return found


def test_five_ranks_and_an_expert_without_tokens() -> None:
    results = run_world(5, five, 5, 20, timeout=200)
    for name in results[0]:
        model = build()
        stepper, optimizer = make(name, model)
        with closing(optimizer):
            for i in range(20):
                step(model, stepper, i)
            report = str(optimizer)
        if name in ("muon", "shampoo"):  # what is one matrix and what is many
            for row in ("attention.in_proj_weight", "experts.weight"):
                line = next(x for x in report.splitlines() if x.startswith(row))
                assert "3 matrices" in line, report
        for found in results:
            for key, x in whole(model).items():
                away = float((found[name][0][key] - x).abs().max())
                assert away < 1e-10, (name, key, away)
        held = [s for found in results for s in found[name][1]]
        assert len(held) == len(set(held)), f"{name}: an average is kept twice"


def sharded(rank: int, kind: str) -> tuple[Any, Any, int, int]:
    """A model and its optimizer, and which part of how many of the batch is its."""
    model = build()
    if kind == "fully_shard":
        fully_shard(model)
        return model, natgrad.SPNGD(model, lr=0.05, momentum=0.9), rank, 2
    mesh = init_device_mesh("cpu", (2,))
    styles: dict[str, Any] = {
        "first": ColwiseParallel(output_layouts=Replicate()),
        "last": RowwiseParallel(input_layouts=Replicate()),
    }
    parallelize_module(model, mesh, styles)
    return model, natgrad.SPNGD(model, lr=0.05, momentum=0.9), 0, 1


def lost(rank: int, kind: str) -> Any:
    """Rank 1 ends between its backward and its step."""
    quick()
    model, optimizer, part, parts = sharded(rank, kind)
    step(model, optimizer, 0, part, parts)
    own = optimizer.step
    if rank == 1:
        optimizer.step = partial(os._exit, 3)
    found: list[Any] = []
    if rank == 0:
        optimizer.step = lambda: found.append(outcome(own))
    step(model, optimizer, 1, part, parts)
    return found[0]


@pytest.mark.parametrize("kind", ["fully_shard", "parallel"])
def test_a_rank_that_was_killed_is_named(kind: str) -> None:
    kind, message, _ = run_world(2, lost, kind, may_die=[1])[0]
    assert kind == "CommError", (kind, message)
    assert "Rank 1 is gone" in message


def disagree(rank: int, kind: str) -> Any:
    quick()
    model, optimizer, part, parts = sharded(rank, kind)
    step(model, optimizer, 0, part, parts)
    group = optimizer.param_groups[0]
    group["lr"] = 0.05 - 0.04 * rank
    before = whole(model)
    told = outcome(lambda: step(model, optimizer, 1, part, parts))[:2]
    same = all(torch.equal(x, before[n]) for n, x in whole(model).items())
    group["lr"] = 0.05
    step(model, optimizer, 2, part, parts)
    after = whole(model)
    store_of_test().set(f"done {rank}", "")
    store_of_test().wait(["done 0", "done 1"])
    return told, same, torch.equal(after["last.weight"], before["last.weight"])


@pytest.mark.parametrize("kind", ["fully_shard", "parallel"])
def test_ranks_that_disagree_say_so_and_may_go_on(kind: str) -> None:
    first, second = run_world(2, disagree, kind, checked=False)
    assert first == second
    (kind, message), same, stood = first
    words = "lr of group 0: 0.05 on ranks [0], 0.01"
    assert (kind, words in message) == ("ValueError", True), (kind, message)
    assert same
    assert not stood
