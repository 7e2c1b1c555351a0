"""Self-tuned K-FAC with nothing set, against rivals tuned with six trials each.

Every rival has six settings at a constant rate with seed 0; the one with the least
final training loss runs the other seeds too. ``auto`` has nothing to tune. The tasks: a
picture, autoencoders of digits, of patches of a photograph and of Fashion-MNIST (which
needs its files), Poisson's equation on a square, and a small classification.

    python -m benchmarks.quality.no_setting run --tasks digits,picture --seeds 1
    python -m benchmarks.quality.no_setting profile
    python -m benchmarks.quality.no_setting report

A line of results/no_setting.jsonl is one run; those that are there are not run again.
``profile`` times the parts of a step, ``report`` writes results/no_setting.md.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import natgrad
from benchmarks.quality import no_setting_profile
from benchmarks.quality.no_setting_report import final, page
from benchmarks.quality.no_setting_tasks import TASKS, Task

RESULTS = Path(__file__).parents[1] / "results" / "no_setting.jsonl"
PROFILE, PAGE = RESULTS.with_name("no_setting_profile.json"), RESULTS.with_suffix(".md")
LOOKS = 40
"""Values in a curve."""
FINE = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
RATES: dict[str, tuple[Any, ...]] = {
    "auto": ("none",),
    "adam": FINE,
    "soap": (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1),
    "muon": (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1),
    "polar": (0.003, 0.01, 0.03, 0.1, 0.2, 0.4),
    # rate, history
    "lbfgs": ((1.0, 10), (1.0, 100), (0.3, 10), (0.3, 100), (0.1, 10), (0.1, 100)),
}


def contender(name: str, rate: Any, model: nn.Module) -> Any:
    """The optimizer of that name at that setting."""
    if name == "auto":
        return natgrad.SPNGD(model, lr="auto", momentum="auto", damping="auto")
    if name == "adam":
        return torch.optim.Adam(model.parameters(), lr=rate)
    if name == "lbfgs":
        lr, history = rate
        return torch.optim.LBFGS(
            model.parameters(),
            lr=lr,
            max_iter=1,
            history_size=history,
            line_search_fn="strong_wolfe",
        )
    kinds: dict[str, Any] = {
        "soap": natgrad.SOAP,
        "muon": natgrad.Muon,
        "polar": natgrad.Polar,
    }
    return kinds[name](model, lr=rate)


def advance(name: str, optimizer: Any, task: Task, model: nn.Module, at: Any) -> None:
    """One step on a batch."""
    if name == "auto":
        optimizer.step(lambda: task.closure(model, at))
        return

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = task.closure(model, at)[1]
        loss.backward()
        return loss

    if name == "lbfgs":
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()


def run(task: Task, name: str, rate: Any, seed: int) -> dict[str, Any]:
    """Training loss and test error over steps and over CPU seconds of the steps."""
    torch.manual_seed(seed)
    model = task.network()
    optimizer = contender(name, rate, model)
    looks = {round(task.steps * (i + 1) / LOOKS) for i in range(LOOKS)}
    curve: list[tuple[int, float, float, float]] = []
    spent = 0.0
    for step, at in zip(range(1, task.steps + 1), task.batches(seed), strict=False):
        began = time.process_time()
        advance(name, optimizer, task, model, at)
        spent += time.process_time() - began
        if step in looks:
            curve.append((step, round(spent, 3), *task.values(model)))
            if not math.isfinite(curve[-1][2]):
                break
    if hasattr(optimizer, "close"):
        optimizer.close()
    found = {"task": task.name, "contender": name, "rate": rate, "seed": seed}
    return {**found, "steps": task.steps, "curve": curve}


def known() -> list[dict[str, Any]]:
    """The runs that were done."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    return [json.loads(line) for line in lines]


def best(runs: list[dict[str, Any]], task: str, name: str) -> Any:
    """The setting with the least final training loss of seed 0."""
    mine = [
        r for r in runs if (r["task"], r["contender"], r["seed"]) == (task, name, 0)
    ]
    return min(mine, key=final)["rate"]


def run_all(tasks: list[str], names: list[str], seeds: int, seconds: float) -> None:
    """Run what is missing, until time is up: trials first, then the other seeds."""
    began = time.monotonic()
    for seed in range(seeds):
        for task in tasks:
            for name in names:
                rates = RATES[name] if seed == 0 else (best(known(), task, name),)
                for rate in rates:
                    if time.monotonic() - began > seconds:
                        return
                    _run_one(task, name, rate, seed)


def _run_one(task: str, name: str, rate: Any, seed: int) -> None:
    wanted = json.loads(json.dumps([task, name, rate, seed]))
    for r in known():
        if [r["task"], r["contender"], r["rate"], r["seed"]] == wanted:
            return
    record = run(TASKS[task](), name, rate, seed)
    with RESULTS.open("a") as file:
        file.write(json.dumps(record) + "\n")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("run", "profile", "report"))
    parser.add_argument("--tasks", default=",".join(t for t in TASKS if t != "fashion"))
    parser.add_argument("--contenders", default=",".join(RATES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=math.inf)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.what == "profile":
        rows = no_setting_profile.profile(given.tasks.split(","))
        PROFILE.write_text(json.dumps(rows, indent=1) + "\n")
        return
    if given.what == "report":
        rows = json.loads(PROFILE.read_text()) if PROFILE.exists() else {}
        PAGE.write_text(page(known(), RATES, no_setting_profile.table(rows)))
        return
    names = given.contenders.split(",")
    run_all(given.tasks.split(","), names, given.seeds, given.seconds)


if __name__ == "__main__":
    main()
