"""How the cost of natgrad grows with batch size, width and depth, as ratios to SGD.

    python -m benchmarks.scaling
    python -m benchmarks.scaling --quick --only width

Each sweep writes scaling_<sweep>.json and scaling_<sweep>.png. Methods as in
`step_time`: contenders take turns, and 10/100 is computed from the kinds of steps.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import Case, perceptron
from benchmarks.common import (
    BASELINE,
    RESULTS,
    interleave,
    keep_memory,
    machine,
    say,
    summarise,
    write_json,
)
from benchmarks.contenders import make_all
from benchmarks.figures import Line, lines_figure
from natgrad_lab.models import CifarResNet

CONTENDERS = ("KFAC eigen", "KFAC factored")


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """One size that varies, for each of a few models.

    Attributes:
        label: of the horizontal axis.
        panels: title -> the case at a size, and the sizes.
        quick: the sizes of a quick run.
    """

    label: str
    panels: dict[str, tuple[Callable[[int], Case], tuple[int, ...]]]
    quick: tuple[int, ...]


def _mlp(batch: int = 512, hidden: tuple[int, ...] = (512, 512)) -> Case:
    label = "MLP 784-" + "-".join(map(str, (*hidden, 10)))
    make = partial(perceptron, hidden)
    return Case(label=label, make=make, batch=batch, shape=(784,))


def _resnet(batch: int = 64, depth: int = 8, width: int = 16) -> Case:
    return Case(
        label=f"CIFAR ResNet-{depth}, width {width}",
        make=partial(CifarResNet, depth, width=width),
        batch=batch,
        shape=(3, 32, 32),
    )


SWEEPS: dict[str, Sweep] = {
    "batch": Sweep(
        label="batch size",
        panels={
            "MLP 784-512-512-10": (
                lambda n: _mlp(batch=n),
                (32, 64, 128, 256, 512, 1024, 2048, 4096),
            ),
            "CIFAR ResNet-8": (
                lambda n: _resnet(batch=n),
                (32, 64, 128, 256, 512, 1024, 2048, 4096),
            ),
        },
        quick=(4, 8),
    ),
    "width": Sweep(
        label="width",
        panels={
            "MLP, 2 hidden layers, batch 512": (
                lambda n: _mlp(hidden=(n, n)),
                (64, 128, 256, 512, 1024, 2048),
            ),
            "CIFAR ResNet-8, batch 64": (
                lambda n: _resnet(width=n),
                (8, 16, 32, 64, 96),
            ),
        },
        quick=(4, 8),
    ),
    "depth": Sweep(
        label="layers",
        panels={
            "MLP, hidden layers of 256, batch 512": (
                lambda n: _mlp(hidden=(256,) * n),
                (1, 2, 4, 8, 16, 32),
            ),
            "CIFAR ResNet, width 16, batch 64": (
                lambda n: _resnet(depth=n),
                (8, 14, 20, 32, 44, 56),
            ),
        },
        quick=(8,),
    ),
}


def measure(case: Case, options: Any) -> list[dict[str, Any]]:
    """The rows of one size, with one thread unless told."""
    contenders = make_all(case, "contiguous", CONTENDERS, say)
    samples = interleave(
        contenders,
        seconds=0.0 if options.quick else options.seconds,
        least=1,
        most=1 if options.quick else 15,
    )
    clock = "cpu" if options.threads == 1 else "wall"
    return summarise(samples, contenders, clock)


def run(name: str, sweep: Sweep, options: Any) -> None:
    """All sizes of one sweep, with its files."""
    panels: dict[str, list[dict[str, Any]]] = {}
    for title, (case_at, sizes) in sweep.panels.items():
        panels[title] = []
        for size in sweep.quick if options.quick else sizes:
            case = case_at(size)
            if options.quick:
                case = replace(case, batch=min(case.batch, 16))
            rows = measure(case, options)
            panels[title].append({"size": size, "rows": rows})
            ratios = ", ".join(f"{r['ratio']:.2f}" for r in rows[1:])
            say(f"{name}: {title}, {size}: {ratios}")
    facts = machine() | {"settings": {"threads": options.threads}}
    write_json(
        options.out / f"scaling_{name}.json",
        {"machine": facts, "sweep": sweep.label, "panels": panels},
    )
    lines = {title: lines_of(points) for title, points in panels.items()}
    lines_figure(lines, sweep.label, options.out / f"scaling_{name}.png")


def lines_of(points: list[dict[str, Any]]) -> dict[str, Line]:
    """Ratio against size, a line for each contender and policy."""
    lines: dict[str, tuple[list[float], list[float]]] = {}
    for point in points:
        for row in point["rows"]:
            if row["contender"] != BASELINE:
                name = f"{row['contender']}, {row['policy']}"
                x, y = lines.setdefault(name, ([], []))
                x.append(point["size"])
                y.append(row["ratio"])
    return dict(lines)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="tiny sizes, one round")
    add("--only", nargs="+", default=list(SWEEPS), choices=SWEEPS)
    add("--threads", type=int, default=1)
    add("--seconds", type=float, default=3.0, help="time budget of a size")
    add("--out", type=Path, default=RESULTS)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Run, print and write."""
    options = parse(arguments)
    if arguments is None:
        keep_memory("benchmarks.scaling")
    torch.set_num_threads(options.threads)
    for name in options.only:
        run(name, SWEEPS[name], options)
    say(f"written to {options.out}")


if __name__ == "__main__":
    main()
