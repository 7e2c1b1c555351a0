"""Times all-reduces over the ranks that torchrun started; writes them as JSON."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

from natgrad_lab.train.processes import World, processes

SIZES = (1_000, 16_000, 256_000, 1_000_000, 4_000_000, 16_000_000)
"""Bytes."""


def all_reduce_seconds(world: World, size: int, repeats: int) -> float:
    """The fastest of a few all-reduces of ``size`` bytes."""
    tensor = torch.zeros(size // 4, device=world.device)
    best = float("inf")
    for _ in range(repeats + 1):
        world.barrier()
        start = time.perf_counter()
        world.sum(tensor)
        if tensor.is_cuda:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best


def main() -> None:
    """Measure every size and let rank 0 write ``sys.argv[1]``."""
    torch.set_num_threads(1)
    with processes() as world:
        rows = [(size, all_reduce_seconds(world, size, 5)) for size in SIZES]
        # Compute on all ranks at once, against what one rank needs alone.
        busy = products()
        if world.main:
            found = {"world": world.size, "all_reduce": rows, "products": busy}
            Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")


def products(n: int = 384, repeats: int = 30) -> float:
    """Seconds of a matrix product on this rank, on average."""
    x, y = torch.randn(n, n), torch.empty(n, n)
    torch.mm(x, x, out=y)
    start = time.perf_counter()
    for _ in range(repeats):
        torch.mm(x, x, out=y)
    return (time.perf_counter() - start) / repeats


if __name__ == "__main__":
    main()
