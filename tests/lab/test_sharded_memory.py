"""What ranks keep of a sharded model is what `natgrad plan` says, byte by byte."""

from contextlib import closing
from typing import Any

import pytest
import torch
from benchmarks.sharded.memory import STATE, planned, state
from benchmarks.sharded.models import SIZES, Transformer
from benchmarks.sharded.peak import Rank
from tests.support.world import run_world
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import natgrad
from natgrad.math.packing import packed_size
from natgrad.math.shards import local
from natgrad.plan import make_plan
from natgrad_lab.simulate.memory import momentum_of

STEPS = 3


def bytes_of(tensors: Any) -> int:
    found = (local(x) for x in tensors if isinstance(x, Tensor))
    return sum(x.numel() * x.element_size() for x in found)


def make(method: str, model: Any) -> tuple[Any, Any]:
    if method == "kfac":
        host = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        return host, natgrad.KFAC(model, host)
    kinds: dict[str, Any] = {
        "polar": natgrad.Polar,
        "muon": natgrad.Muon,
        "shampoo": natgrad.Shampoo,
        "adamw": lambda model, lr: torch.optim.AdamW(model.parameters(), lr),
    }
    optimizer = kinds[method](model, lr=1e-3)
    return optimizer, optimizer


def kept(rank: int, methods: list[str]) -> dict[str, dict[str, int]]:
    """What this rank keeps after a few steps."""
    found: dict[str, dict[str, int]] = {}
    for method in methods:
        torch.manual_seed(0)
        size = SIZES["tiny"]
        model = Transformer(size)
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        stepper, own = make(method, model)
        for _ in range(STEPS):
            stepper.zero_grad()
            words = torch.randint(size.words, (4, 9))
            scores = model(words[:, :-1])
            F.cross_entropy(scores.flatten(0, 1), words[:, 1:].flatten()).backward()
            stepper.step()
        buffers = [x for s in stepper.state.values() for x in s.values()]
        big = [x for x in buffers if isinstance(x, Tensor) and x.dim()]
        mine = {"momentum": bytes_of(big), "weights": bytes_of(model.parameters())}
        if method != "adamw":
            with closing(own):
                states = [*own.engine.statistics.states.values()]
                moments = own.engine.moments.states.values()
                kept = [x for m in moments for x in (m.square, m.mean)]
                mine |= {
                    "statistics": bytes_of(s.average for s in states),
                    "history": bytes_of(x for s in states for x in s.history),
                    "inverses": bytes_of(x for s in states for x in s.inverse or ()),
                    "moments": bytes_of(x for x in kept if x is not None),
                }
        found[method] = mine
    return found


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_keep_what_was_planned_and_less_with_more_of_them(world: int) -> None:
    methods = ["polar", "muon", "shampoo", "kfac", "adamw"]
    results = run_world(world, kept, methods, timeout=200)
    for method in methods[:-1]:
        _, rows = planned("tiny", method, world)
        for found, row in zip(results, rows, strict=True):
            parts = (*STATE, "weights")
            want = {part: row[part] for part in parts}
            assert {part: found[method][part] for part in parts} == want, method
        if world > 1:
            alone = state(planned("tiny", method, 1)[1][0])
            assert max(map(state, rows)) < alone
    for found in results:
        assert found["adamw"]["momentum"] == 2 * found["adamw"]["weights"]


def in_use(rank: int, methods: list[str]) -> dict[str, dict[str, int]]:
    return {method: Rank(method, "tiny").run() for method in methods}


def test_a_rank_has_in_use_what_was_planned_and_peaks_fall_with_more_of_them() -> None:
    """Beyond the plan: index tables of packed triangles, and a few numbers."""
    size = SIZES["tiny"]
    widths = size.width, size.keys, size.inner, size.words
    tables = sum(4 * (2 * n * n + packed_size(n)) for n in widths)
    methods, alone = ["polar", "kfac", "muon"], dict[str, dict[str, int]]()
    for world in (1, 2, 4):
        results = run_world(world, in_use, methods, timeout=200)
        for method in methods:
            _, rows = planned("tiny", method, world)
            for found, row in zip(results, rows, strict=True):
                more = found[method]["after"] - state(row) - 2 * row["weights"]
                assert 0 <= more <= tables + 1000, (method, world)
            points = results[0][method]
            most = {point: max(r[method][point] for r in results) for point in points}
            # more than the square root of the world: some parts are those of a layer
            for point, bytes_ in alone.setdefault(method, most).items():
                assert most[point] <= bytes_ / world**0.5, (method, world, point)


def test_planned_momentum_falls_with_the_world() -> None:
    wide = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8)), nn.PReLU(256))

    def most(world: int) -> int:
        plan = make_plan(wide, world=world, gradients="sharded")
        return max(momentum_of(plan, sharded=True))

    assert most(4) < 0.35 * most(1)
