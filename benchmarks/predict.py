"""Predicted against measured step time on this machine, from a profile made here.

    python -m benchmarks.predict
    python -m benchmarks.predict --models mlp --worlds 1 2 --rounds 4

Calibrates, then trains three models on random data with 1, 2 and 4 processes and every
strategy, each process with one thread, and compares the median of mean seconds a step
with the simulation's. Also says whether ``strategy="auto"`` picks the fastest strategy
measured. Writes predict.json, predict.md, predict.png and predict_profile.toml.

Run it on a machine that does nothing else. The strategies of a model and world take
turns in the same processes, a cycle of steps each, so that drift hits all equally.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import RESULTS, describe, machine, markdown_table
from natgrad import KFAC, Every
from natgrad.plan import (
    HardwareProfile,
    choose_strategy,
    find_strategy,
    load_profile,
)
from natgrad.plan.autotune.profile import ModelTimes
from natgrad.plan.autotune.profile_file import save_profile
from natgrad_lab.models import build
from natgrad_lab.simulate.calibrate import Calibrate, calibrate
from natgrad_lab.simulate.modeltimes import in_own_process
from natgrad_lab.simulate.policy import every
from natgrad_lab.simulate.roles import Conditions
from natgrad_lab.simulate.run import SGD, Method, simulate
from natgrad_lab.simulate.work import lab_settings, work_of
from natgrad_lab.train.processes import World, processes

MODELS = ("mlp", "resnet8", "resnet20")
STRATEGIES = ("layer_wise", "factor_wise", "hybrid(0.5)", "spngd")
WORLDS = (1, 2, 4)
STATISTICS, INVERSES = 2, 4
BATCH = 16
ROUNDS = 6
WITHIN, NEAR = 0.20, 0.05

METHOD = f"""\
Mean seconds a step of {{batch}} examples a rank, statistics every {STATISTICS} steps,
inverses (eigendecomposition) every {INVERSES}; the median of {{rounds}} cycles of
{INVERSES} steps, the strategies taking turns; `spread` is between the quartiles. gloo
over loopback, one thread a rank, gradients reduced by natgrad; `sgd` is with
DistributedDataParallel. `predicted` is the simulation with the profile that `natgrad
calibrate --models ...` makes in the same run: the model's own seconds on one rank
(measured {{when}} the runs that are predicted), and what ranks cost each other. `from
operations` knows nothing of the model but its shapes."""


NOISE = """\
Some strategies are the same program under two names: all of them on one process,
`layer_wise` and `hybrid(0.5)` on two. `noise` is how much such names differed, so how
much of `slower by` means nothing."""


# -- measured, in the processes that torchrun started ---------------------------------


def contender(name: str, strategy: str, world: World) -> Callable[[], None]:
    """One cycle of steps of a strategy, or of SGD."""
    torch.manual_seed(0)
    settings, shape = lab_settings(name)
    model = build(name, **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    replica = world.data_parallel(model) if strategy == "sgd" else model
    if strategy != "sgd":
        refresh = Every(statistics=STATISTICS, inverses=INVERSES)
        KFAC(model, optimizer, refresh=refresh, strategy=strategy)
    x, y = torch.randn(BATCH, *shape), torch.randint(10, (BATCH,))

    def cycle() -> None:
        for _ in range(INVERSES):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(replica(x), y).backward()
            optimizer.step()

    return cycle


def train(name: str, strategies: Sequence[str], rounds: int) -> dict[str, list[float]]:
    """Mean seconds a step of each cycle, after one round of warm-up."""
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {strategy: [] for strategy in strategies}
    with processes() as world:
        cycles = {s: contender(name, s, world) for s in strategies}
        for turn in range(rounds + 1):
            names = list(strategies)
            # In another order each round.
            for strategy in names[turn % len(names) :] + names[: turn % len(names)]:
                cycle = cycles[strategy]
                world.barrier()
                start = time.perf_counter()
                cycle()
                world.barrier()
                if turn:
                    spent = (time.perf_counter() - start) / INVERSES
                    found[strategy].append(spent)
    return found


def measure(name: str, world: int, rounds: int) -> dict[str, list[float]]:
    """`train` in ``world`` processes; what rank 0 saw."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "seconds.json"
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launch += ["--nproc-per-node", str(world), "-m", "benchmarks.predict"]
        launch += ["--worker", name, str(rounds), str(file)]
        subprocess.run(launch, check=True, stdout=subprocess.DEVNULL)
        return json.loads(file.read_text(encoding="utf-8"))


# -- predicted ------------------------------------------------------------------------


def predict(name: str, strategy: str, world: int, profile: HardwareProfile) -> float:
    """The simulation's mean seconds a step."""
    method = Method(
        strategy=strategy, policy=every(STATISTICS, INVERSES), costs="library"
    )
    method = SGD if strategy == "sgd" else method
    conditions = Conditions(batch=BATCH)
    return simulate(work_of(name), profile, world, method, conditions).seconds


def auto(name: str, world: int, profile: HardwareProfile) -> str:
    """What ``strategy="auto"`` takes."""
    return choose_strategy(
        work_of(name).specs,
        world,
        profile,
        statistics=STATISTICS,
        inverses=INVERSES,
        candidates=("layer_wise", "spngd", "hybrid(0.5)", "factor_wise"),
    ).strategy


# -- together -------------------------------------------------------------------------


def run(
    models: Sequence[str],
    worlds: Sequence[int],
    rounds: int,
    profile: HardwareProfile,
    out: Path,
) -> dict[str, Any]:
    """Measure and predict all cases, and write what is known after each."""
    rows: list[dict[str, Any]] = []
    choices: list[dict[str, Any]] = []
    report: dict[str, Any] = {"machine": machine(), "rounds": rounds, "batch": BATCH}
    report["when"] = "before and after, because this machine's speed drifts,"
    report |= {"rows": rows, "choices": choices, "cycles": {}}
    for model in models:
        before = in_own_process(model, BATCH)
        found = {world: measure(model, world, rounds) for world in worlds}
        times = mean_times(before, in_own_process(model, BATCH))
        profile = replace(profile, models={**profile.models, model: times})
        for world, cycles in found.items():
            cells = [row(model, world, s, cycles[s], profile) for s in cycles]
            rows += cells
            choices.append(judge(model, world, cycles, auto(model, world, profile)))
            print(
                "\n".join(map(_line, cells)), _said(choices[-1]), sep="\n", flush=True
            )
        save_profile(profile, out / "predict_profile.toml")
        report["profile"] = asdict(profile)
        report["cycles"] |= {f"{model} {world}": each for world, each in found.items()}
        write(report, out)
    return report


def mean_times(before: ModelTimes, after: ModelTimes) -> ModelTimes:
    """The mean of two measurements of a model."""
    pairs = {k: (v, asdict(after)[k]) for k, v in asdict(before).items()}
    means = {k: (a + b) / 2 for k, (a, b) in pairs.items() if k != "batch"}
    return ModelTimes(batch=before.batch, **means)


def row(
    model: str,
    world: int,
    strategy: str,
    seconds: Sequence[float],
    profile: HardwareProfile,
) -> dict[str, Any]:
    """One cell: measured, predicted, and the errors."""
    measured = statistics.median(seconds)
    low, _, high = statistics.quantiles(seconds, n=4)
    own = predict(model, strategy, world, profile)
    operations = predict(model, strategy, world, replace(profile, models={}))
    return {
        "model": model,
        "world": world,
        "strategy": strategy,
        "measured": measured,
        "low": low,
        "high": high,
        "predicted": own,
        "error": own / measured - 1,
        "from_operations": operations,
        "operations_error": operations / measured - 1,
    }


def judge(
    model: str, world: int, cycles: dict[str, list[float]], chosen: str
) -> dict[str, Any]:
    """How much slower the chosen strategy was than the fastest.

    Strategies that do the same on so many ranks (all of them on one) are one program,
    whose rounds count together; by how much such names differ is ``noise``.
    """
    same: dict[tuple[int, bool], list[str]] = {}
    for name in cycles:
        if name != "sgd":
            strategy = find_strategy(name)
            key = (strategy.workers(world), strategy.shard_plain and world > 1)
            same.setdefault(key, []).append(name)
    pools = [([x for n in names for x in cycles[n]], names) for names in same.values()]
    medians = {
        n: statistics.median(cycles[n]) for names in same.values() for n in names
    }
    fastest, best = min(pools, key=lambda pool: statistics.median(pool[0]))
    taken = next(pool for pool, names in pools if chosen in names)
    spans = [[medians[n] for n in names] for _, names in pools]
    return {
        "model": model,
        "world": world,
        "auto": chosen,
        "best": " = ".join(best),
        "loss": statistics.median(taken) / statistics.median(fastest) - 1,
        "noise": max(max(span) / min(span) - 1 for span in spans),
    }


def _line(cell: dict[str, Any]) -> str:
    return (
        f"{cell['model']:<10}{cell['world']:>3} {cell['strategy']:<13}"
        f"{1e3 * cell['measured']:>9.2f} ms measured {1e3 * cell['predicted']:>9.2f} "
        f"predicted {100 * cell['error']:>+7.1f}%  from operations "
        f"{100 * cell['operations_error']:>+7.1f}%"
    )


def _said(choice: dict[str, Any]) -> str:
    return (
        f"  auto: {choice['auto']}, {100 * choice['loss']:.1f}% over the measured "
        f"best, {choice['best']}"
    )


def summary(report: dict[str, Any]) -> str:
    """How many cells are within the bounds."""
    curved = [r for r in report["rows"] if r["strategy"] != "sgd"]
    within = sum(abs(r["error"]) <= WITHIN for r in curved)
    loose = sum(abs(r["operations_error"]) <= WITHIN for r in curved)
    good = sum(c["loss"] <= NEAR for c in report["choices"])
    plain = [r for r in report["rows"] if r["strategy"] == "sgd"]
    right = sum(abs(r["error"]) <= WITHIN for r in plain)
    return (
        f"{within} of {len(curved)} predictions within {100 * WITHIN:.0f}% (worst "
        f"{_worst(curved)}), {loose} from operations alone. Of SGD's own steps, with "
        f"DistributedDataParallel, {right} of {len(plain)} (worst {_worst(plain)}). "
        f"`auto` is within {100 * NEAR:.0f}% of the measured best in {good} of "
        f"{len(report['choices'])} cases."
    )


def _worst(rows: Sequence[dict[str, Any]]) -> str:
    """The row that is most off."""
    if not rows:
        return "none"
    row = max(rows, key=lambda r: abs(r["error"]))
    return (
        f"{100 * row['error']:+.1f}%: {row['model']}, {row['world']} processes, "
        f"{row['strategy']}"
    )


def markdown(report: dict[str, Any]) -> str:
    """The report as a page."""
    heads = ("model", "processes", "strategy", "measured ms", "spread", "predicted")
    heads += ("error", "from operations", "error")
    rows = [
        (
            r["model"],
            str(r["world"]),
            r["strategy"],
            f"{1e3 * r['measured']:.1f}",
            f"{1e3 * r['low']:.1f} to {1e3 * r['high']:.1f}",
            f"{1e3 * r['predicted']:.1f}",
            f"{100 * r['error']:+.1f}%",
            f"{1e3 * r['from_operations']:.1f}",
            f"{100 * r['operations_error']:+.1f}%",
        )
        for r in report["rows"]
    ]
    chosen = [
        (
            c["model"],
            str(c["world"]),
            c["auto"],
            c["best"],
            f"{100 * c['loss']:.1f}%",
            f"{100 * c['noise']:.1f}%" if c["noise"] else "",
        )
        for c in report["choices"]
    ]
    choice_heads = ("model", "processes", "auto", "measured best", "slower by", "noise")
    return "\n\n".join(
        [
            "# Predicted and measured step times",
            describe(report["machine"]),
            METHOD.format(**report),
            summary(report),
            *report.get("notes", ()),
            markdown_table(heads, rows),
            "## What `auto` picks",
            NOISE,
            markdown_table(choice_heads, chosen),
        ]
    )


def write(report: dict[str, Any], out: Path) -> None:
    """Results as JSON, as a page and as a figure."""
    from benchmarks.figures import predict_figure

    out.mkdir(parents=True, exist_ok=True)
    (out / "predict.json").write_text(json.dumps(report, indent=1) + "\n")
    (out / "predict.md").write_text(markdown(report) + "\n")
    predict_figure(report["rows"], out / "predict.png", WITHIN)


def main() -> None:
    """Parse; run as the benchmark, or as one of its processes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--worlds", nargs="+", type=int, default=WORLDS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--profile", type=Path, help="use this one, do not calibrate")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        name, rounds, file = asked.worker
        seconds = train(name, ("sgd", *STRATEGIES), int(rounds))
        if os.environ.get("RANK", "0") == "0":
            Path(file).write_text(json.dumps(seconds), encoding="utf-8")
        return
    if asked.profile:
        profile = load_profile(asked.profile)
    else:
        several = tuple(world for world in asked.worlds if world > 1)
        profile = calibrate(Calibrate(worlds=several, batch=BATCH))
    report = run(asked.models, asked.worlds, asked.rounds, profile, asked.out)
    print(summary(report))


if __name__ == "__main__":
    main()
