"""What one factor costs by size: decompose, follow, invert, take a root, apply.

    python -m benchmarks.factors

Milliseconds of one CPU thread in float32, the median of several calls, beside those of
a product of the same size. Writes factors.md.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.common import RESULTS, describe, machine, markdown_table, say
from natgrad.math.inverse import (
    damped_inverses,
    damped_roots,
    eigendecompositions,
    track,
)
from natgrad.math.polar import polar

SIZES = (64, 144, 288, 576, 785, 1152)
OPERATIONS = (
    "product",
    "eigendecomposition",
    "tracked basis",
    "inverse",
    "root",
    "polar factor",
)


def factor(size: int) -> Tensor:
    """A second moment whose spectrum falls like that of a layer's inputs."""
    generator = torch.Generator().manual_seed(size)
    rows = torch.randn(2 * size, size, generator=generator)
    rows *= torch.arange(1, size + 1).pow(-0.5)
    return (rows.mT @ rows / len(rows)).unsqueeze(0)


def operations(size: int) -> dict[str, Callable[[], object]]:
    """Every operation on one factor of a size, by name."""
    matrix = factor(size)
    basis = eigendecompositions([matrix])[0]
    assert isinstance(basis, tuple)
    gradient = torch.randn(1, size, size, generator=torch.Generator().manual_seed(0))
    return {
        "product": lambda: matrix @ gradient,
        "eigendecomposition": lambda: eigendecompositions([matrix]),
        "tracked basis": lambda: track(matrix, basis),
        "inverse": lambda: damped_inverses([matrix], [1e-2]),
        "root": lambda: damped_roots([matrix], [1e-2]),
        "polar factor": lambda: polar(gradient),
    }


def milliseconds(call: Callable[[], object], seconds: float) -> float:
    """The median of at least five calls, and of as many as fit into ``seconds``."""
    call()
    found: list[float] = []
    end = time.monotonic() + seconds
    while len(found) < 5 or time.monotonic() < end:
        began = time.process_time()
        call()
        found.append(1e3 * (time.process_time() - began))
    return statistics.median(found)


def table(sizes: tuple[int, ...], seconds: float) -> str:
    """A row a size."""
    rows: list[tuple[str, ...]] = []
    for size in sizes:
        calls = operations(size)
        found = {name: milliseconds(calls[name], seconds) for name in OPERATIONS}
        rows.append((str(size), *(f"{found[name]:.2f}" for name in OPERATIONS)))
        say("  ".join(rows[-1]))
    return markdown_table(("n", *OPERATIONS), rows)


def main(arguments: list[str] | None = None) -> None:
    """Run, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each number")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    text = [
        "# What one factor costs",
        describe(machine()),
        "Milliseconds of one thread, float32, median; `product` is n x n times n x n, "
        "the yardstick. Made by `python -m benchmarks.factors`.",
        table(tuple(options.sizes), options.seconds),
    ]
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "factors.md").write_text("\n\n".join(text) + "\n")


if __name__ == "__main__":
    main()
