"""Train contenders to the end of their schedules and keep every run's record.

    python -m benchmarks.quality run language --steps 400 --sequences 16
    python -m benchmarks.quality table

Runs that are in the ledger already (benchmarks/results/quality.jsonl) are not run
again, so that an interrupted command goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.quality import autoencoder, language
from benchmarks.quality.contenders import CONTENDERS, make

LEDGER = Path(__file__).parents[1] / "results" / "quality.jsonl"
KEY = ("protocol", "contender", "lr", "seed", "steps", "batch")


def factor(protocol: str, step: int, steps: int) -> float:
    """Of the learning rate: to zero over the last 70% (language), or linearly."""
    flat = 0.3 if protocol == "language" else 0.0
    return min(1.0, (1 - step / steps) / (1 - flat))


def train(protocol: str, contender: str, lr: float, seed: int, steps: int, batch: int):
    """One run: its record."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    if protocol == "language":
        task, model, (data, held_out) = language, language.Language(), language.text()
        rest_lr = 0.004
    else:
        task, model = autoencoder, autoencoder.Autoencoder()
        data, held_out = autoencoder.images()
        rest_lr = 0.004
    row = CONTENDERS[contender]
    optimizer = make(row, model, model.is_hidden, lr=lr, rest_lr=rest_lr)
    rates = [group["lr"] for group in optimizer.param_groups]
    began, curve = time.process_time(), []
    for step, (x, y) in enumerate(task.batches(data, batch, seed)):
        if step == steps:
            break
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor(protocol, step, steps)
        optimizer.zero_grad()
        loss = task.loss(model, x, y)
        loss.backward()
        optimizer.step()
        if (step + 1) % max(1, steps // 10) == 0:
            curve.append([step + 1, task.value(model, held_out), loss.item()])
            print(
                f"{protocol} {contender} lr {lr:g} seed {seed}: {curve[-1]}", flush=True
            )
    return {
        **dict(zip(KEY, (protocol, contender, lr, seed, steps, batch), strict=True)),
        "value": curve[-1][1],
        "cpu_seconds": round(time.process_time() - began, 1),
        "curve": curve,
    }


def ledger() -> list[dict[str, Any]]:
    """All records."""
    if not LEDGER.exists():
        return []
    return [json.loads(line) for line in LEDGER.read_text().splitlines()]


def run(asked: argparse.Namespace) -> None:
    """What is asked for and not yet there."""
    names = asked.contenders or list(CONTENDERS)
    for name in names:
        for lr in asked.lrs or CONTENDERS[name].lrs:
            for seed in asked.seeds:
                key = (asked.protocol, name, lr, seed, asked.steps, asked.batch)
                if any(tuple(r[k] for k in KEY) == key for r in ledger()):
                    continue
                record = train(*key)
                with LEDGER.open("a") as file:
                    file.write(json.dumps(record) + "\n")


def table() -> str:
    """Best rate of each contender, by protocol, steps and batch."""
    groups: dict[tuple[Any, ...], dict[float, list[float]]] = {}
    for r in ledger():
        key = (r["protocol"], r["steps"], r["batch"], r["contender"])
        groups.setdefault(key, {}).setdefault(r["lr"], []).append(r["value"])
    rows = [
        "| protocol | steps | batch | contender | best lr | n | value | rates tried |"
    ]
    rows.append("|---|---|---|---|---|---|---|---|")
    for (protocol, steps, batch, name), by_lr in sorted(
        groups.items(), key=lambda item: (item[0][:3], min(map(min, item[1].values())))
    ):
        lr, values = min(by_lr.items(), key=lambda item: statistics.mean(item[1]))
        spread = f" ({min(values):.4f} to {max(values):.4f})" if len(values) > 1 else ""
        rows.append(
            f"| {protocol} | {steps} | {batch} | {name} | {lr:g} | {len(values)} | "
            f"{statistics.mean(values):.4f}{spread} | {len(by_lr)} |"
        )
    return "\n".join(rows)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    runner = commands.add_parser("run")
    runner.add_argument("protocol", choices=("language", "autoencoder"))
    runner.add_argument("--contenders", nargs="*")
    runner.add_argument("--lrs", nargs="*", type=float)
    runner.add_argument("--seeds", nargs="*", type=int, default=[1])
    runner.add_argument("--steps", type=int, default=400)
    runner.add_argument("--batch", type=int, default=16)
    commands.add_parser("table")
    asked = parser.parse_args()
    if asked.command == "run":
        run(asked)
    else:
        print(table())


if __name__ == "__main__":
    main()
