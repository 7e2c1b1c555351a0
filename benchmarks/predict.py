"""Predicted against measured step time on this machine, from a profile made here.

    python -m benchmarks.predict [--quick] [--out results/predict.json]

Calibrates, then trains three models on random data with 1, 2 and 4 processes and every
strategy, each process with one thread, and compares mean seconds a step with the
simulation's. Also says whether `choose_strategy` picked the fastest strategy measured.
Run it on a machine that does nothing else. More processes than cores are slowed by each
other, which the profile's ``contention`` models as one number.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from natgrad import KFAC, Every
from natgrad.plan import HardwareProfile, choose_strategy
from natgrad_lab.models import build
from natgrad_lab.simulate.calibrate import Calibrate, calibrate
from natgrad_lab.simulate.policy import every
from natgrad_lab.simulate.roles import Conditions
from natgrad_lab.simulate.run import Method, simulate
from natgrad_lab.simulate.work import lab_settings, work_of
from natgrad_lab.train.processes import processes

MODELS = ("mlp", "resnet8", "resnet20")
STRATEGIES = ("layer_wise", "factor_wise", "hybrid(0.5)", "spngd")
WORLDS = (1, 2, 4)
STATISTICS, INVERSES = 2, 4
BATCH = 32


def train(model_name: str, strategy: str, steps: int) -> float:
    """Mean seconds a step on this process's world, after one round of warm-up."""
    torch.set_num_threads(1)
    with processes() as world:
        torch.manual_seed(0)
        settings, shape = lab_settings(model_name)
        model = build(model_name, **settings)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        refresh = Every(statistics=STATISTICS, inverses=INVERSES)
        kfac = KFAC(model, optimizer, refresh=refresh, strategy=strategy)
        x = torch.randn(BATCH, *shape)
        y = torch.randint(10, (BATCH,))
        start = 0.0
        for step in range(INVERSES + steps):
            if step == INVERSES:
                world.barrier()
                start = time.perf_counter()
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        world.barrier()
        seconds = (time.perf_counter() - start) / steps
        kfac.close()
    return seconds


def measure(model: str, strategy: str, world: int, steps: int) -> float:
    """`train` in ``world`` processes; what rank 0 saw."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "seconds"
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launch += ["--nproc-per-node", str(world), "-m", "benchmarks.predict"]
        launch += ["--worker", model, strategy, str(steps), str(file)]
        subprocess.run(launch, check=True, capture_output=True)
        return float(file.read_text(encoding="utf-8"))


def predict(model: str, strategy: str, world: int, profile: HardwareProfile) -> float:
    """The simulation's mean seconds a step."""
    method = Method(strategy=strategy, policy=every(STATISTICS, INVERSES))
    conditions = Conditions(batch=BATCH)
    return simulate(work_of(model), profile, world, method, conditions).seconds


def auto(model: str, world: int, profile: HardwareProfile) -> str:
    """What `choose_strategy` says."""
    times = profile.models[model]
    return choose_strategy(
        work_of(model).specs,
        world,
        profile,
        statistics=STATISTICS,
        inverses=INVERSES,
        compute=times.forward + times.backward,
        estimate=times.statistics,
        candidates=STRATEGIES,
    ).strategy


def run(quick: bool) -> dict[str, Any]:
    """Calibrate, measure and predict all cases."""
    models = MODELS[:1] if quick else MODELS
    worlds = WORLDS[:2] if quick else WORLDS
    steps = INVERSES if quick else 10 * INVERSES
    profile = calibrate(
        Calibrate(worlds=worlds[1:], models=models, batch=BATCH, seconds=0.3)
    )
    rows: list[dict[str, Any]] = []
    choices: list[dict[str, Any]] = []
    for model in models:
        for world in worlds:
            found: dict[str, float] = {}
            for strategy in STRATEGIES:
                found[strategy] = measure(model, strategy, world, steps)
                seconds = predict(model, strategy, world, profile)
                row = {"model": model, "world": world, "strategy": strategy}
                row |= {"measured": found[strategy], "predicted": seconds}
                rows.append(row | {"error": seconds / found[strategy] - 1})
                print(_line(rows[-1]), flush=True)
            chosen = auto(model, world, profile)
            loss = found[chosen] / min(found.values()) - 1
            choices.append(
                {"model": model, "world": world, "auto": chosen, "loss": loss}
            )
            print(f"  auto: {chosen}, {100 * loss:.1f}% over the measured best")
    return {"rows": rows, "choices": choices}


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['model']:<10}{row['world']:>3} {row['strategy']:<13}"
        f"{1e3 * row['measured']:>9.2f} ms measured {1e3 * row['predicted']:>9.2f} "
        f"predicted {100 * row['error']:>+7.1f}%"
    )


def main() -> None:
    """Parse; run as the benchmark, or as one of its processes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        model, strategy, steps, file = asked.worker
        seconds = train(model, strategy, int(steps))
        Path(file).write_text(str(seconds), encoding="utf-8")
        return
    report = run(asked.quick)
    within = sum(abs(row["error"]) <= 0.2 for row in report["rows"])
    good = sum(choice["loss"] <= 0.05 for choice in report["choices"])
    print(
        f"{within} of {len(report['rows'])} within 20%; auto within 5% of the best in "
        f"{good} of {len(report['choices'])}"
    )
    asked.out.mkdir(parents=True, exist_ok=True)
    (asked.out / "predict.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
