"""What self-tuned K-FAC finds over a run: damping, ratio, learning rate, momentum.

Trains the digits autoencoder of `benchmarks.quality.no_setting` with nothing set, and
draws the four beside the loss into docs/figures/found_rates.png.

    python -m benchmarks.found_rates
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import natgrad
from benchmarks.figures import BLUES, GREY
from benchmarks.quality.no_setting_tasks import Digits

FIGURE = Path(__file__).parents[1] / "docs" / "figures" / "found_rates.png"
SHOWN = ("damping", "ratio", "lr", "momentum")


def train(steps: int) -> dict[str, list[float]]:
    """The loss of each step's batch, and what `health` has after it."""
    torch.manual_seed(0)
    task = Digits()
    model = task.network()
    optimizer = natgrad.SPNGD(model, lr="auto", momentum="auto", damping="auto")
    found: dict[str, list[float]] = {name: [] for name in ("loss", *SHOWN)}
    for _, at in zip(range(steps), task.batches(0), strict=False):
        found["loss"].append(
            float(optimizer.step(lambda at=at: task.closure(model, at)))
        )
        health = optimizer.health()
        for name in SHOWN:
            found[name].append(float(health[name]))
    return found


def draw(found: dict[str, list[float]], path: Path) -> None:
    """A panel for each."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(found), figsize=(15, 2.8))
    for axis, (name, values) in zip(axes, found.items(), strict=True):
        axis.plot(values, color=BLUES[0], linewidth=1.0)
        axis.set_title(name)
        axis.set_xlabel("step")
        if name in ("loss", "damping"):
            axis.set_yscale("log")
        if name == "ratio":
            axis.set_ylim(-1, 2)
            for bound in (0.25, 0.75):
                axis.axhline(bound, color=GREY, linewidth=0.8, linestyle="--")
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    plt.close(figure)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    torch.set_num_threads(1)
    found = train(parser.parse_args().steps)
    draw(found, FIGURE)
    last = {name: f"{values[-1]:.3g}" for name, values in found.items()}
    print(last)


if __name__ == "__main__":
    main()
