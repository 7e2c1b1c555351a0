"""CPU seconds of the slowest rank in the inversions, by the number of ranks.

    python -m benchmarks.superlinear            # superlinear.md, superlinear.png

Osawa et al. 2020, Figure 5: with full batch norm, steps get faster than linearly up to
64 GPUs, because each rank inverts fewer factors (Stage 4 of Algorithm 3). Here
processes on gloo share a few cores, so their seconds by the clock mean nothing. What
the main thread of each spends on the processor while it inverts does: a rank that has
to wait for a core spends nothing. Against it stands what the plan expects, with the
cost of one rank's inversions taken from the measurement on one rank.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from torch.nn import functional as F

from benchmarks.common import markdown_table
from natgrad import SPNGD, Every
from natgrad.diagnostics.timer import Reader, phase_sum
from natgrad.plan import make_plan
from natgrad.plan.loads import inversion_loads
from natgrad_lab.models import build
from natgrad_lab.simulate.work import work_of
from natgrad_lab.train.processes import processes

RESULTS = Path(__file__).parent / "results"
WORLDS = {"resnet20": (1, 2, 4, 8, 16), "resnet50": (1, 2, 4)}
"""16 processes with the statistics of a ResNet-50, 1 GiB each, need 40 GB."""
INPUTS = {"resnet20": (8, 3, 32, 32), "resnet50": (2, 3, 64, 64)}
STEPS = 3
STRATEGY, PLACEMENT = "spngd", "longest_first"
TEXT = """# Inversions by the number of ranks

From `python -m benchmarks.superlinear`: {module}

Full batch norm, damped inverses by Cholesky, all statistics fresh, layers placed
{placement} (`strategy="spngd"`), one thread a rank, the least of {steps} steps on each
rank, then the slowest rank.
"""


def train(name: str) -> float:
    """The least CPU seconds of this rank in the inversions of a step."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with processes() as world:
        model = build(name)
        options = replace(SPNGD.defaults, norm="full", placement=PLACEMENT)
        optimizer = SPNGD(
            model, lr=1e-4, refresh=Every(1, 1), strategy=STRATEGY, options=options
        )
        meter = optimizer.engine.meter
        meter.clock = time.thread_time
        reader, found = Reader(meter), []
        size = INPUTS[name]
        x, y = torch.randn(size), torch.randint(10, size[:1])
        for _ in range(STEPS):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            found.append(phase_sum(reader.take(), "invert"))
            world.barrier()
        return min(found)


def measure(name: str, world: int) -> float:
    """`train` in ``world`` processes; the slowest of them."""
    with tempfile.TemporaryDirectory() as folder:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launch += ["--nproc-per-node", str(world), "-m", "benchmarks.superlinear"]
        launch += ["--worker", name, folder]
        subprocess.run(launch, check=True, stdout=subprocess.DEVNULL)
        files = sorted(Path(folder).iterdir())
        assert len(files) == world
        return max(json.loads(file.read_text()) for file in files)


def planned(name: str, world: int) -> float:
    """What the slowest rank inverts, in the plan's own seconds."""
    specs = work_of(name, norm="full").specs
    plan = make_plan(specs, world=world, strategy=STRATEGY, placement=PLACEMENT)
    return max(inversion_loads(plan))


def markdown(rows: list[dict[str, Any]]) -> str:
    """The page."""
    heads = ("network", "ranks", "slowest rank, CPU s", "speedup", "plan's speedup")
    cells: list[list[str]] = []
    for row in rows:
        first = next(r for r in rows if r["model"] == row["model"])
        ours, plans = (first[key] / row[key] for key in ("measured", "planned"))
        cells.append([row["model"], str(row["world"]), f"{row['measured']:.3f}"])
        cells[-1] += [f"{ours:.2f}", f"{plans:.2f}"]
    module = " ".join((__doc__ or "").split("\n\n")[2].split())
    text = TEXT.format(module=module, placement=PLACEMENT, steps=STEPS)
    picture = "![The slowest rank by the number of ranks](superlinear.png)\n"
    return f"{text}\n{markdown_table(heads, cells)}\n\n{picture}"


def figure(rows: list[dict[str, Any]], path: Path) -> None:
    """Measured and planned seconds of the slowest rank."""
    fig, axis = plt.subplots(figsize=(5.6, 3.8))
    for name in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == name]
        worlds = [row["world"] for row in mine]
        scale = mine[0]["measured"] / mine[0]["planned"]
        (line,) = axis.plot(worlds, [r["measured"] for r in mine], "o-", label=name)
        plan = [scale * row["planned"] for row in mine]
        axis.plot(worlds, plan, "x--", color=line.get_color(), label=f"{name}, planned")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xlabel("ranks")
    axis.set_ylabel("CPU s of the slowest rank in inversions")
    axis.legend()
    fig.tight_layout()
    fig.savefig(path, dpi=110)
    plt.close(fig)


def main() -> None:
    """Run as the benchmark, or as one of its processes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=WORLDS, default=list(WORLDS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        name, folder = asked.worker
        seconds = train(name)
        file = Path(folder) / f"{os.environ.get('RANK', '0')}.json"
        file.write_text(json.dumps(seconds))
        return
    rows: list[dict[str, Any]] = []
    for name in asked.models:
        for world in WORLDS[name]:
            seconds = measure(name, world)
            row = {"model": name, "world": world, "measured": seconds}
            rows.append({**row, "planned": planned(name, world)})
            print(f"{name}, {world} ranks: {seconds:.3f} CPU s", flush=True)
    (asked.out / "superlinear.md").write_text(markdown(rows))
    figure(rows, asked.out / "superlinear.png")


if __name__ == "__main__":
    main()
