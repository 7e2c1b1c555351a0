"""The README's first snippet for 2,000 steps, against AdamW.

    python -m benchmarks.constant_rate

An MLP 64-128-10 on digits (1,437 to train, 360 to test), with a batch norm and without,
batches of 64 and 512, rates that stay and rates that fall to zero along a cosine.
AdamW has three rates and `Polar` its default. Test losses of three seeds; writes
constant_rate.md.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import natgrad
from benchmarks.common import RESULTS, describe, machine, markdown_table, say

TRAINED = 1437
RATES = (3e-4, 1e-3, 3e-3)
SETTINGS = tuple(
    (norm, batch, falling)
    for batch in (64, 512)
    for norm in (False, True)
    for falling in (False, True)
)
STEPS = {64: 2000, 512: 500}
Make = Callable[[nn.Module], Optimizer]


def digits() -> tuple[Tensor, Tensor]:
    """Images as vectors, and labels, in one random order."""
    pixels, labels = load_digits(return_X_y=True)
    x = torch.tensor(pixels, dtype=torch.float32) / 16
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return ((x - x.mean()) / x.std())[order], torch.tensor(labels)[order]


def train(
    make: Make, seed: int, norm: bool, batch: int, falling: bool, steps: int
) -> float:
    """The test loss in the end."""
    x, y = digits()
    torch.manual_seed(seed)
    between = [nn.BatchNorm1d(128)] if norm else []
    model = nn.Sequential(nn.Linear(64, 128), *between, nn.ReLU(), nn.Linear(128, 10))
    optimizer = make(model)
    rates = [group["lr"] for group in optimizer.param_groups]
    source = torch.Generator().manual_seed(seed + 10)
    order = torch.arange(TRAINED)
    for step in range(steps):
        if step * batch % TRAINED < batch:
            order = torch.randperm(TRAINED, generator=source)
        index = order[torch.arange(step * batch, (step + 1) * batch) % TRAINED]
        if falling:
            part = 0.5 * (1 + math.cos(math.pi * step / steps))
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * part + 1e-12
        optimizer.zero_grad()
        F.cross_entropy(model(x[index]), y[index]).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        return F.cross_entropy(model(x[TRAINED:]), y[TRAINED:]).item()


def adamw(rate: float) -> Make:
    """As torch has it."""
    return lambda model: torch.optim.AdamW(model.parameters(), lr=rate)


def row(
    norm: bool, batch: int, falling: bool, seeds: Sequence[int], steps: int | None
) -> tuple[str, ...]:
    """Of the table: AdamW at its best rate, and `Polar`."""
    count = STEPS[batch] if steps is None else steps

    def losses(make: Make) -> list[float]:
        return [train(make, s, norm, batch, falling, count) for s in seeds]

    by_rate = {rate: losses(adamw(rate)) for rate in RATES}
    rate = min(by_rate, key=lambda r: sum(by_rate[r]))
    return (
        "batch norm" if norm else "none",
        str(batch),
        str(count),
        "falls to zero" if falling else "constant",
        f"{_summary(by_rate[rate])} ({rate:g})",
        _summary(losses(natgrad.Polar)),
    )


def _summary(losses: list[float]) -> str:
    each = ", ".join(f"{x:.3f}" for x in losses)
    return f"{sum(losses) / len(losses):.4f} ({each})"


def page(rows: Sequence[tuple[str, ...]], seeds: int) -> str:
    """The settings that were run."""
    heads = ("norm", "batch", "steps", "rate", "AdamW (rate)", "Polar")
    rates = ", ".join(f"{r:g}" for r in RATES)
    lines = [
        "# At a constant rate",
        "",
        f"Test losses of an MLP 64-128-10 on digits: means, and {seeds} seeds, from "
        f"`python -m benchmarks.constant_rate`. AdamW at the best of {rates}; "
        f"`Polar(model)`, whose rate is {natgrad.Polar.defaults.lr}. "
        f"{len(rows)} of {len(SETTINGS)} settings were run.",
        "",
        markdown_table(heads, rows),
        "",
        describe(machine()),
        "",
    ]
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> None:
    """Train, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="of all settings")
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args(words)
    torch.set_num_threads(1)
    rows: list[tuple[str, ...]] = []
    for setting in SETTINGS:
        rows.append(row(*setting, asked.seeds, asked.steps))
        say(" | ".join(rows[-1]))
        (asked.out / "constant_rate.md").write_text(page(rows, len(asked.seeds)))


if __name__ == "__main__":
    main()
