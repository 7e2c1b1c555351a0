"""How statistics change, and what `Adaptive` sends of them, by batch size.

    torchrun --nproc-per-node 2 -m benchmarks.traffic

A ResNet-8 of width 8 on CIFAR-10 under SPNGD, which averages no statistic over steps:

- with every statistic fresh, where `watch` says how much each changes from one step to
  the next (Figure 5 of Osawa et al. 2019);
- under `Adaptive` at two tolerances, where `traffic()` and `refreshes()` count what the
  reduce-scatter of each step moves (Figure 6 and Table 2 of SP-NGD).

Writes ``results/traffic.json``, ``traffic.png`` (the paper's tolerance) and
``changes.png``.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable
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
from natgrad_lab.data.dataset import Dataset
from natgrad_lab.inspect.records import change_rates
from natgrad_lab.models import build_for
from natgrad_lab.train.records import Record

RESULTS = Path(__file__).parent / "results"
BATCHES = (32, 128, 512)
TOLERANCES = (0.1, 0.3)
FAMILIES = ("A", "G", "norm")


@functools.cache
def _data() -> Dataset:
    return load("cifar10")


def train(
    batch: int,
    steps: int,
    refresh: natgrad.Refresh,
    begin: Callable[[natgrad.SPNGD], Any] = lambda spngd: None,
    after: Callable[[natgrad.SPNGD], Any] = lambda spngd: None,
) -> float:
    """The share of statistics that were refreshed; ``after`` sees each step."""
    rank, world = dist.get_rank(), dist.get_world_size()
    data = _data()
    torch.manual_seed(0)
    model = build_for("resnet8", data.shape, len(data.classes), width=8)
    spngd = natgrad.SPNGD(model, lr=0.02, damping=0.03, refresh=refresh)
    begin(spngd)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        drawn = torch.randperm(len(data.train), generator=generator)[:batch]
        x, y = data.train.fetch(drawn[rank::world])
        spngd.zero_grad()
        nn.functional.cross_entropy(model(x.float() / 128 - 1), y).backward()
        spngd.step()
        after(spngd)
    rate = spngd.refreshes()["reduction_rate"]
    spngd.close()
    return rate


def changes(batch: int, steps: int) -> dict[str, list[list[float]]]:
    """Step and {5, 25, 50, 75, 95}th percentiles over layers, by family."""
    records: list[Record] = []
    train(
        batch,
        steps,
        natgrad.Every(1),
        begin=lambda spngd: spngd.watch(every=1, sink=records.append),
    )
    return change_rates(records)


def moved(batch: int, steps: int, tolerance: float) -> dict[str, Any]:
    """Bytes by step, for A and for the rest, summed over ranks; and the rate."""
    before: dict[str, int] = {}
    rows: list[tuple[int, int, int]] = []

    def count(spngd: natgrad.SPNGD) -> None:
        specs = {n: s.spec for n, s in spngd.engine.statistics.states.items()}
        done = spngd.refreshes()["statistics"]
        fresh = [n for n in specs if done[n]["refreshed"] > before.get(n, 0)]
        before.update({n: done[n]["refreshed"] for n in specs})
        element = spngd.engine.like.element_size() * (dist.get_world_size() - 1)
        sizes = {n: element * specs[n].packed for n in fresh}
        inputs = sum(size for n, size in sizes.items() if n.endswith("/A"))
        step = spngd.traffic()["step"].get("reduce_statistics", {"sent": 0})
        rows.append((inputs, sum(sizes.values()) - inputs, step["sent"]))

    rate = train(batch, steps, natgrad.Adaptive(tolerance), after=count)
    sent = torch.tensor([float(row[2]) for row in rows], dtype=torch.float64)
    dist.all_reduce(sent)
    # what was counted on the way is what the refreshed statistics weigh
    assert sent.tolist() == [float(a + rest) for a, rest, _ in rows]
    return {
        "batch": batch,
        "tolerance": tolerance,
        "bytes": [row[:2] for row in rows],
        "rate": rate,
    }


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


def draw_changes(found: dict[str, dict[str, list[list[float]]]], path: Path) -> None:
    """A panel a family: the median over layers, between the quarters, by batch."""
    figure, axes = plt.subplots(1, len(FAMILIES), figsize=(10, 3.2), sharey=True)
    for axis, family in zip(axes, FAMILIES, strict=True):
        for batch, families in found.items():
            steps, _, low, middle, high, _ = zip(*families[family], strict=True)
            axis.plot(steps, middle, label=f"batch {batch}")
            axis.fill_between(steps, low, high, alpha=0.2)
        axis.set_title(family)
        axis.set_xlabel("step")
        axis.set_yscale("log")
    axes[0].set_ylabel("relative change in a step")
    axes[0].legend(loc="upper right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def tell(results: list[dict[str, Any]], found: dict[str, Any]) -> None:
    """What the tables say, in words."""
    for one in results:
        head = f"batch {one['batch']}, tolerance {one['tolerance']:g}"
        bytes_moved = sum(sum(row) for row in one["bytes"])
        share = bytes_moved / (len(one["bytes"]) * sum(one["bytes"][0]))
        print(f"{head}: {100 * one['rate']:.1f}% refreshed, {100 * share:.1f}% moved")
    for batch, families in found.items():
        # of the second half of the run
        middles = {
            name: sorted(row[3] for row in rows[len(rows) // 2 :])
            for name, rows in families.items()
        }
        words = ", ".join(f"{n} {m[len(m) // 2]:.3f}" for n, m in middles.items())
        print(f"batch {batch}: median change {words}")


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    found = {str(batch): changes(batch, chosen.steps) for batch in BATCHES}
    results = [
        moved(batch, chosen.steps, tolerance)
        for tolerance in TOLERANCES
        for batch in BATCHES
    ]
    if dist.get_rank() == 0:
        chosen.out.mkdir(exist_ok=True)
        content = {"changes": found, "runs": results}
        (chosen.out / "traffic.json").write_text(json.dumps(content) + "\n")
        draw(results[: len(BATCHES)], chosen.out / "traffic.png")
        draw_changes(found, chosen.out / "changes.png")
        tell(results, found)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
