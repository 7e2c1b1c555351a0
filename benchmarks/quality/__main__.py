"""Train contenders to the end of their schedules and keep every run's record.

    python -m benchmarks.quality run language --steps 400 --batch 16
    python -m benchmarks.quality report      # quality.md, quality.png, README's table

Runs that are in the ledger already (benchmarks/results/quality.jsonl) are not run
again, so that an interrupted command goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import keep_memory
from benchmarks.quality import airbench, autoencoder, cifar, language, report, shorter
from benchmarks.quality.contenders import Contender, make
from benchmarks.quality.readme import README, replaced
from benchmarks.quality.rows import CONTENDERS
from natgrad import Free

LEDGER = Path(__file__).parents[1] / "results" / "quality.jsonl"
KEY = ("protocol", "contender", "lr", "seed", "steps", "batch")


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """A network, its data and its schedule.

    Attributes:
        task: the module that has ``batches``, ``loss`` and ``value``.
        load: the data to train on and to judge by.
        model: the network.
        flat: the part of the steps after which the rate falls linearly to zero.
        momentum: of hidden matrices.
        rest_lr: Adam's rate for all else; None: the task's own ``rest``.
        together: examples in a forward pass of a task whose loss is a sum: larger
            batches take several (None: never).
    """

    task: Any
    load: Callable[[], tuple[Any, Any]]
    model: Callable[[], Any]
    flat: float = 0.0
    momentum: float = 0.95
    rest_lr: float | None = 0.004
    together: int | None = None


PROTOCOLS = {
    "airbench": Protocol(
        task=airbench,
        load=airbench.images,
        model=airbench.Airbench,
        momentum=0.6,
        rest_lr=None,
        together=12_500,
    ),
    "language": Protocol(
        task=language, load=language.text, model=language.Language, flat=0.3
    ),
    "resnet": Protocol(task=cifar, load=cifar.images, model=cifar.ResNet),
    "autoencoder": Protocol(
        task=autoencoder, load=autoencoder.images, model=autoencoder.Autoencoder
    ),
    "vit": Protocol(task=cifar, load=cifar.images, model=cifar.Transformer),
}


def optimizers(
    protocol: Protocol, contender: Contender, model: Any, lr: float, batch: int
) -> list[torch.optim.Optimizer]:
    """Of all parameters: the contender's, and what the protocol has for the rest."""
    if protocol.together is not None and isinstance(contender.length, Free):
        lr = lr / batch
    first = make(
        contender,
        model,
        model.is_hidden,
        lr=lr,
        momentum=protocol.momentum,
        rest_lr=protocol.rest_lr,
    )
    alone = protocol.rest_lr is not None or contender.whole is not None
    return [first] if alone else [first, protocol.task.rest(model, batch)]


def set_rates(groups: list[dict[str, Any]], step: int, steps: int, flat: float) -> None:
    """A group's first rate until ``flat``, then linearly to zero at its last step."""
    for group in groups:
        first, until = group.setdefault("first_lr", group["lr"]), group.get("until")
        part = 1 - step / (until or steps)
        group["lr"] = first * min(1.0, max(0.0, part) / (1 - flat))


def train(name: str, contender: str, lr: float, seed: int, steps: int, batch: int):
    """One run: its record."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    protocol, row = PROTOCOLS[name], CONTENDERS[contender]
    task, model = protocol.task, protocol.model()
    data, held_out = protocol.load()
    chosen = optimizers(protocol, row, model, lr, batch)
    rescale = getattr(model, "before_step", None) if row.whole is None else None
    began, curve = time.process_time(), []
    for step, (x, y) in enumerate(task.batches(data, batch, seed)):
        if step == steps:
            break
        for optimizer in chosen:
            set_rates(optimizer.param_groups, step, steps, protocol.flat)
            optimizer.zero_grad()
        size = protocol.together or len(x)
        loss = 0.0
        for part in zip(x.split(size), y.split(size), strict=True):
            summed = task.loss(model, *part)
            summed.backward()
            loss += summed.item()
        if rescale is not None:
            rescale()
        for optimizer in chosen:
            optimizer.step()
        if (step + 1) % max(5, steps // 12) == 0 or step + 1 == steps:
            curve.append([step + 1, task.value(model, held_out), loss])
            print(f"{name} {contender} lr {lr:g} seed {seed}: {curve[-1]}", flush=True)
    return {
        **dict(zip(KEY, (name, contender, lr, seed, steps, batch), strict=True)),
        "value": curve[-1][1],
        "cpu_seconds": round(time.process_time() - began, 1),
        "curve": curve,
    }


def ledger(path: Path) -> list[dict[str, Any]]:
    """All records."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(asked: argparse.Namespace) -> None:
    """What is asked for and not yet there."""
    names = asked.contenders or list(CONTENDERS)
    for name in names:
        for lr in asked.lrs or CONTENDERS[name].lrs:
            for seed in asked.seeds:
                key = (asked.protocol, name, lr, seed, asked.steps, asked.batch)
                if any(tuple(r[k] for k in KEY) == key for r in ledger(asked.out)):
                    continue
                record = train(*key)
                with asked.out.open("a") as file:
                    file.write(json.dumps(record) + "\n")


def write(records: list[dict[str, Any]], folder: Path) -> None:
    """quality.md and its figures."""
    every = report.by_setting(records)
    settings = {s: found for s, found in every.items() if report.chosen(found)}
    picture = "![The tuned runs of the best contenders](quality.png)\n"
    sections = [report.TEXT, picture]
    report.figure(settings, folder / "quality.png")
    if pairs := [*shorter.pairs(every)]:
        sections += [shorter.section(pairs), "![By length](quality_shorter.png)\n"]
        shorter.figure(pairs, folder / "quality_shorter.png")
    if batches := report.by_batch(settings):
        shown = "![Accuracy and steps by batch](quality_batch.png)\n"
        sections += [report.batch_section(batches), shown]
        report.batch_figure(batches, folder / "quality_batch.png")
    sections += [report.section(s, contenders) for s, contenders in settings.items()]
    (folder / "quality.md").write_text("\n".join(sections))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    runner = commands.add_parser("run")
    runner.add_argument("protocol", choices=tuple(PROTOCOLS))
    runner.add_argument(
        "--contenders", nargs="*", choices=tuple(CONTENDERS), metavar="NAME"
    )
    runner.add_argument("--lrs", nargs="*", type=float)
    runner.add_argument("--seeds", nargs="*", type=int, default=[1])
    runner.add_argument("--steps", type=int, default=400)
    runner.add_argument("--batch", type=int, default=16)
    reporter = commands.add_parser("report")
    for command in (runner, reporter):
        command.add_argument("--out", type=Path, default=LEDGER)
    asked = parser.parse_args()
    if asked.command == "run":
        keep_memory("benchmarks.quality")  # half of the time of a large batch
        run(asked)
    else:
        records = ledger(asked.out)
        write(records, asked.out.parent)
        if asked.out == LEDGER:
            README.write_text(replaced(README.read_text(), records))


if __name__ == "__main__":
    main()
