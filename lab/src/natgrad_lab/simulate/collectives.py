"""What ranks cost each other, timed in the processes that torchrun started.

Exchanges run through the library's own `Communicator`, on plans of made-up layers, so
that what is measured is what a step does. Also: how much ranks that compute at once
slow each other, and how much of an exchange runs beside compute. Written as JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from natgrad.distributed import Communicator
from natgrad.plan import (
    BlockSpec,
    Plan,
    StatisticSpec,
    bucket_limit,
    make_buckets,
    make_crates,
    make_plan,
)
from natgrad.plan.autotune import BUCKET_BYTES
from natgrad_lab.train.processes import World, processes

CASES = ((4, 8), (24, 24), (12, 96), (6, 320), (2, 800))
"""Layers and their size: from many small tensors to a few large ones."""
SHARES = (
    ("layer_wise", "reduce_statistics", "reduce"),
    ("layer_wise", "reduce_gradients", "reduce"),
    ("layer_wise", "share_updates", "gather"),
    ("factor_wise", "reduce_gradients", "all_reduce"),
    ("factor_wise", "share_inverses", "gather"),
    ("sharded", "reduce_gradients", "all_to_all"),
    ("sharded", "share_updates", "all_to_all"),
)
"""Strategy, or "sharded" for pieces, and exchange that are all of one kind."""
REPEATS = 15
BUSY = 0.15
"""Seconds of each measurement of crowding, on a rank alone."""
TURNS = 5


def made_up(count: int, size: int) -> list[BlockSpec]:
    """``count`` layers of ``size`` inputs and outputs."""
    return [_block(f"layer{i}", size) for i in range(count)]


def _block(name: str, size: int) -> BlockSpec:
    sides = (("A", "right"), ("G", "left"))
    specs = tuple(
        StatisticSpec(
            name=f"{name}/{kind}", block=name, kind=kind, side=side, stack=1, size=size
        )
        for kind, side in sides
    )
    return BlockSpec(name=name, stack=1, rows=size, cols=size, statistics=specs)


def features(plan: Plan, name: str) -> tuple[int, int, int]:
    """Collectives, tensors and bytes of an exchange, as it is sent."""
    exchange = plan.exchanges[name]
    names = [item.name for item in exchange.items]
    if exchange.swaps:
        crates = make_crates(exchange, names, BUCKET_BYTES // 4)
        moves = [move for crate in crates for move in crate.parcels]
        return len(crates), len(moves), 4 * sum(move.elements for move in moves)
    limit = bucket_limit(exchange, names, BUCKET_BYTES // 4)
    buckets, _ = make_buckets(exchange, names, limit)
    whole = [1 if b.kind == "all_reduce" else len(b.segments) for b in buckets]
    size = 4 * sum(b.elements for b in buckets)
    return sum(whole), sum(len(b.parcels) for b in buckets), size


def fly(comm: Communicator, name: str, device: torch.device) -> None:
    """Run one exchange with everything in it."""
    items = comm.plan.exchanges[name].items
    flight = comm.begin(name, [i.name for i in items], torch.float32, device)
    for item in items:
        if comm.rank in item.sources:
            flight.put(item.name, torch.zeros(item.elements, device=device))
    flight.finish()


def timed(world: World, work: Callable[[], Any], repeats: int = REPEATS) -> float:
    """The median of so many runs, each from a barrier to this rank's end."""
    work()
    spent: list[float] = []
    for _ in range(repeats):
        world.barrier()
        start = _now(world)
        work()
        spent.append(_now(world) - start)
    return statistics.median(spent)


def _now(world: World) -> float:
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def exchanges(world: World) -> list[dict[str, Any]]:
    """A row an exchange and case: its kind, what is in it, and seconds."""
    rows: list[dict[str, Any]] = []
    for count, size in CASES:
        for strategy, name, kind in SHARES:
            plan = plan_for(made_up(count, size), world.size, strategy)
            comm = Communicator(plan)
            spent = timed(world, lambda c=comm, n=name: fly(c, n, world.device))
            comm.close()
            calls, items, moved = features(plan, name)
            row = {"kind": kind, "calls": calls, "items": items, "bytes": moved}
            rows.append(row | {"seconds": spent})
    return rows


def plan_for(blocks: list[BlockSpec], world: int, strategy: str) -> Plan:
    """By a strategy, or "sharded": of pieces that move to workers and back."""
    if strategy == "sharded":
        return make_plan(blocks, world=world, gradients="sharded")
    return make_plan(blocks, world=world, strategy=strategy)


def agreement(world: World) -> float:
    """Seconds of a small sum."""
    comm = Communicator(make_plan(made_up(1, 4), world=world.size))
    vector = torch.zeros(64, dtype=torch.float64, device=world.device)
    spent = timed(world, lambda: comm.agree(vector).tolist(), 40)
    comm.close()
    return spent


def workloads(device: torch.device) -> dict[str, Callable[[], Any]]:
    """What a step computes: a small network's passes, and dense linear algebra."""
    channels = (16, 32, 32)
    layers = [nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise(channels)]
    model = nn.Sequential(*(x for layer in layers for x in (layer, nn.ReLU())))
    model = model.to(device)
    images = torch.randn(16, 16, 16, 16, device=device)
    x = torch.randn(160, 160, device=device)
    matrix = x @ x.T

    def dense() -> None:
        torch.linalg.eigh(matrix)
        for _ in range(8):
            torch.mm(matrix, x)

    return {"passes": lambda: model(images).sum().backward(), "dense": dense}


def crowding(world: World) -> list[dict[str, float]]:
    """Seconds until the first k ranks have all done the same work, for every k.

    The numbers of ranks take turns, so that a drift of the machine's speed hits all.
    """
    found: list[dict[str, float]] = [{} for _ in range(world.size)]
    for name, work in workloads(world.device).items():
        count = _agreed(world, BUSY / _alone(world, work))
        spent: list[list[float]] = [[] for _ in range(world.size)]
        for _ in range(TURNS):
            for rank in range(world.size):
                mine = count if world.rank <= rank else 0
                spent[rank].append(_together(world, work, mine))
        for row, times in zip(found, spent, strict=True):
            row[name] = statistics.median(times)
    return found


def _alone(world: World, work: Callable[[], Any]) -> float:
    """Seconds of the work on rank 0, while the others wait."""
    work()
    spent = [_together(world, work, int(world.main)) for _ in range(5)]
    return statistics.median(spent)


def _agreed(world: World, count: float) -> int:
    """Rank 0's count, on all ranks."""
    return max(1, round(float(world.share(str(count)))))


def _together(world: World, work: Callable[[], Any], count: int) -> float:
    """From a barrier until every rank has done its part."""
    world.barrier()
    start = _now(world)
    for _ in range(count):
        work()
    world.barrier()
    return _now(world) - start


def overlap(world: World) -> float:
    """Share of an exchange that is hidden under as much compute."""
    comm = Communicator(make_plan(made_up(6, 320), world=world.size))
    work, device = workloads(world.device)["passes"], world.device
    alone = timed(world, lambda: fly(comm, "reduce_gradients", device))
    count = max(1, round(alone / timed(world, work)))

    def both() -> None:
        items = comm.plan.exchanges["reduce_gradients"].items
        names = [i.name for i in items]
        flight = comm.begin("reduce_gradients", names, torch.float32, device)
        for item in items:
            flight.put(item.name, torch.zeros(item.elements, device=device))
        for _ in range(count):
            work()
        flight.finish()

    compute = timed(world, lambda: [work() for _ in range(count)])
    together = timed(world, both)
    comm.close()
    hidden = (alone + compute - together) / min(alone, compute)
    return min(1.0, max(0.0, hidden))


def cores(device: torch.device) -> int:
    """Processors that this machine's ranks share; 0: each has its own."""
    return 0 if device.type == "cuda" else len(os.sched_getaffinity(0))


def main() -> None:
    """Measure everything and let rank 0 write ``sys.argv[1]``."""
    torch.set_num_threads(1)
    with processes() as world:
        found = {
            "world": world.size,
            "exchanges": exchanges(world),
            "agree": agreement(world),
            "overlap": overlap(world),
            "crowding": crowding(world),
            "cores": cores(world.device),
        }
        if world.main:
            Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
