"""Bytes of statistics a step under `Adaptive`, as in Figure 6 of SP-NGD.

    torchrun --nproc-per-node 2 -m benchmarks.traffic

Trains a ResNet-8 on digits with SPNGD at two batch sizes and draws what each step's
reduce-scatter moves for A and for G and the norm layers' statistics. The counts come
from `traffic()` and `refreshes()`, not from a model. Writes ``results/traffic.*``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib
import torch
import torch.distributed as dist

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from torch import nn

import natgrad
from natgrad_lab.data import load
from natgrad_lab.models import build_for

RESULTS = Path(__file__).parent / "results"
BATCHES = (128, 1024)


def train(batch: int, steps: int, tolerance: float) -> dict[str, Any]:
    """Bytes by step, for A and for the rest, summed over ranks; and the rate."""
    rank, world = dist.get_rank(), dist.get_world_size()
    data = load("digits")
    x, y = data.train.fetch(torch.arange(len(data.train)))
    x = x.float() / 255
    torch.manual_seed(0)
    model = build_for("resnet8", data.shape, len(data.classes))
    refresh = natgrad.Adaptive(tolerance)
    spngd = natgrad.SPNGD(model, lr=0.02, damping=0.03, refresh=refresh)
    element = spngd.engine.like.element_size()
    specs = {n: s.spec for n, s in spngd.engine.statistics.states.items()}
    before = dict.fromkeys(specs, 0)
    rows: list[tuple[int, int, int]] = []
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        mine = torch.randperm(len(x), generator=generator)[:batch][rank::world]
        spngd.zero_grad()
        nn.functional.cross_entropy(model(x[mine]), y[mine]).backward()
        spngd.step()
        done = spngd.refreshes()["statistics"]
        fresh = [n for n in specs if done[n]["refreshed"] > before[n]]
        before = {n: done[n]["refreshed"] for n in specs}
        sizes = {n: element * (world - 1) * specs[n].packed for n in fresh}
        inputs = sum(size for n, size in sizes.items() if n.endswith("/A"))
        step = spngd.traffic()["step"].get("reduce_statistics", {"sent": 0})
        rows.append((inputs, sum(sizes.values()) - inputs, step["sent"]))
    sent = torch.tensor([float(row[2]) for row in rows], dtype=torch.float64)
    dist.all_reduce(sent)
    # what was counted on the way is what the refreshed statistics weigh
    assert sent.tolist() == [float(a + rest) for a, rest, _ in rows]
    rate = spngd.refreshes()["reduction_rate"]
    spngd.close()
    return {"batch": batch, "bytes": [row[:2] for row in rows], "rate": rate}


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """One stacked panel a batch size."""
    figure, axes = plt.subplots(1, len(results), figsize=(10, 3.2), sharey=True)
    for axis, result in zip(axes, results, strict=True):
        kib = [[n / 1024 for n in row] for row in result["bytes"]]
        steps = range(len(kib))
        axis.stackplot(steps, *zip(*kib, strict=True), labels=["A", "G and norms"])
        axis.set_title(f"batch {result['batch']}: {100 * result['rate']:.1f}% moved")
        axis.set_xlabel("step")
    axes[0].set_ylabel("KiB of statistics")
    axes[0].legend(loc="upper right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--tolerance", type=float, default=0.3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    results = [train(batch, chosen.steps, chosen.tolerance) for batch in BATCHES]
    if dist.get_rank() == 0:
        chosen.out.mkdir(exist_ok=True)
        content = {"tolerance": chosen.tolerance, "runs": results}
        (chosen.out / "traffic.json").write_text(json.dumps(content) + "\n")
        draw(results, chosen.out / "traffic.png")
        for result in results:
            print(f"batch {result['batch']}: {100 * result['rate']:.1f}% moved")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
