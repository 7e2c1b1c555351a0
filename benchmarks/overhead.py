"""What looking costs, and whether `Budget` keeps to its overhead. About a minute.

    python -m benchmarks.overhead

A CIFAR ResNet-20 on random images, one process. Methods take turns, several steps each,
so that whatever else the machine does falls on all equally; processor seconds are told
beside those of the clock, for a machine that is not idle. Writes
``results/overhead.json``.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from torch import nn

import natgrad
from natgrad_lab.models import build_for

RESULTS = Path(__file__).parent / "results"
TURN = 5
SKIPPED = 0.2  # of the steps, before which a budget has not settled


class Method:
    """A model with its optimizer, stepped and timed."""

    def __init__(self, name: str, batch: int, wrap: Callable[..., Any] | None) -> None:
        torch.manual_seed(0)
        self.name, self.seconds, self.cpu = name, list[float](), list[float]()
        self.model = build_for("resnet20", (3, 32, 32), 10)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.kfac = wrap(self.model, self.optimizer) if wrap else None
        self.x, self.y = torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))

    def step(self) -> None:
        began, busy = time.perf_counter(), time.process_time()
        loss = nn.functional.cross_entropy(self.model(self.x), self.y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds.append(time.perf_counter() - began)
        self.cpu.append(time.process_time() - busy)


def methods(batch: int, every: int) -> list[Method]:
    """SGD; K-FAC as it is by default, watched and not; and under budgets."""
    default, factored = natgrad.KFAC, {"rule": natgrad.Kronecker(style="factored")}

    def watched(model: Any, optimizer: Any) -> Any:
        kfac = default(model, optimizer)
        kfac.watch(every=every)
        time_looks(kfac)
        return kfac

    def budget(overhead: float) -> Callable[..., Any]:
        refresh = natgrad.Budget(overhead)
        return lambda m, o: default(m, o, refresh=refresh, **factored)

    wraps: dict[str, Any] = {"sgd": None, "kfac": default, "kfac, watched": watched}
    wraps |= {f"budget {x:.0%}": budget(x) for x in (0.3, 0.1)}
    return [Method(name, batch, wrap) for name, wrap in wraps.items()]


def time_looks(kfac: Any) -> None:
    """Add up processor seconds of looking: too few to be seen between two methods."""
    probe = kfac.engine.probe
    probe.spent = 0.0

    def timed(method: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any) -> None:
            began = time.process_time()
            method(*args)
            probe.spent += time.process_time() - began

        return call

    probe.note, probe.finish = timed(probe.note), timed(probe.finish)


def measure(steps: int, batch: int, every: int) -> dict[str, Any]:
    """Seconds a step by method, and what the budgets say of themselves."""
    contenders = methods(batch, every)
    began = time.perf_counter()
    for turn in range(steps // TURN):
        for each in contenders:
            # a budget takes the time between its steps for the plain step's
            for _ in range(TURN):
                each.step()
        if turn == 0:
            print(f"first turns: {time.perf_counter() - began:.1f} s")
    first = int(SKIPPED * steps)
    plain = mean(contenders[0].seconds[first:])
    busy = mean(contenders[0].cpu[first:])
    rows = [
        {
            "method": each.name,
            "mean_ms": 1000 * mean(each.seconds[first:]),
            "median_ms": 1000 * median(each.seconds[first:]),
            "over_sgd": mean(each.seconds[first:]) / plain - 1,
            "cpu_ms": 1000 * mean(each.cpu[first:]),
            "cpu_over_sgd": mean(each.cpu[first:]) / busy - 1,
            "says": _says(each),
        }
        for each in contenders
    ]
    settings = {"steps": steps, "batch": batch, "every": every}
    return settings | {"threads": torch.get_num_threads(), "rows": rows}


def _says(method: Method) -> str:
    if method.kfac is None:
        return ""
    probe, summary = method.kfac.engine.probe, method.kfac.refreshes()
    if probe is not None:
        share = probe.spent / sum(method.cpu)
        return f"Looking took {share:.2%} of all processor seconds."
    return summary.get("budget", {}).get("says", "")


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--every", type=int, default=20, help="steps between looks")
    parser.add_argument("--out", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    result = measure(chosen.steps, chosen.batch, chosen.every)
    for row in result["rows"]:
        wall = f"{row['mean_ms']:8.1f} ms {100 * row['over_sgd']:+7.1f}%"
        cpu = f"{row['cpu_ms']:8.1f} ms {100 * row['cpu_over_sgd']:+7.1f}%"
        print(f"{row['method']:<14} a step {wall}   on the processor {cpu}")
        if row["says"]:
            print(f"    {row['says']}")
    chosen.out.mkdir(parents=True, exist_ok=True)
    (chosen.out / "overhead.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
