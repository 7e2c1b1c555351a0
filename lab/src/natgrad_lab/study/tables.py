"""A study's tables: rows of plain values, as CSV and Parquet."""

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from natgrad_lab.study.curves import Trial
from natgrad_lab.study.reading import (
    Criterion,
    best_trial,
    compute_seconds,
    costs_to,
    examples,
    final,
    good_share,
    ideal_speedup,
    quantile,
    score,
    speedups,
    value_at,
    wall_seconds,
)
from natgrad_lab.study.results import METRICS, Results

Row = dict[str, Any]


def all_tables(results: Results) -> dict[str, list[Row]]:
    """Every table by name."""
    return {
        "best": best_table(results),
        "targets": target_table(results),
        "robustness": robustness_table(results),
        "cost": cost_table(results),
        "trials": trial_table(results),
        "curves": curve_table(results),
    }


def _where(trial: Trial) -> Row:
    point, sgd = trial.point, trial.method == "sgd"
    return {
        "method": point.method,
        "batch": point.batch,
        "lr": point.lr,
        "momentum": point.other if sgd else None,
        "damping": None if sgd else point.other,
        "style": point.style or None,
        "schedule": point.schedule,
    }


def trial_table(results: Results) -> list[Row]:
    """A row a trial, repeats apart."""
    rows = []
    columns = (results.single, results.keys, results.attempts, results.notes)
    for trial, key, attempts, data in zip(*columns, strict=True):
        curve = trial.curve
        row: Row = {"key": key, **_where(trial), "seed": trial.point.seed}
        row |= {"data": data or None, "ending": curve.ending, "attempts": attempts}
        row["best_accuracy"] = max(curve.accuracies, default=None)
        row["final_accuracy"] = next(iter(curve.accuracies[-1:]), None)
        row["least_loss"] = min(filter(math.isfinite, curve.losses), default=None)
        row["steps"] = curve.steps[-1] if curve.steps else 0
        row["seconds"] = curve.seconds[-1] if curve.steps else 0.0
        row["cpu_seconds"] = curve.cpu_seconds[-1] if curve.steps else 0.0
        rows.append(row)
    return rows


def curve_table(results: Results) -> list[Row]:
    """A row an evaluation."""
    rows = []
    for trial, key in zip(results.single, results.keys, strict=True):
        curve = trial.curve
        for index, step in enumerate(curve.steps):
            row: Row = {"key": key, "step": step, "epoch": curve.epochs[index]}
            row["loss"] = finite(curve.losses[index])
            row["accuracy"] = curve.accuracies[index]
            row["seconds"] = curve.seconds[index]
            row["cpu_seconds"] = curve.cpu_seconds[index]
            rows.append(row)
    return rows


def best_table(results: Results) -> list[Row]:
    """The best configuration of each method and batch, by accuracy and by loss."""
    rows = []
    for method in results.methods:
        for batch in results.batches:
            group = results.of(method, batch)
            for metric in METRICS if group else ():
                best = best_trial(group, metric)
                row: Row = {"by": metric, **_where(best), "data": results.data}
                row["accuracy"] = score(best.curve, "accuracy")
                row["loss"] = finite(score(best.curve, "loss"))
                row["steps"] = best.curve.steps[-1] if best.curve.steps else 0
                rows.append(row)
    return rows


def target_table(results: Results) -> list[Row]:
    """Cost to each target: iterations, examples, seconds; and speedups."""
    rows = []
    for metric in METRICS:
        for stage, criterion in enumerate(results.targets(metric), start=1):
            for method in results.methods:
                rows += _to_target(results, method, stage, criterion)
    return rows


def _to_target(
    results: Results, method: str, stage: int, criterion: Criterion
) -> list[Row]:
    trials, base = results.of(method), results.base
    counts = costs_to(trials, criterion)
    gained = speedups(counts, base)
    total = {
        "examples": costs_to(trials, criterion, examples),
        "wall_seconds": costs_to(trials, criterion, wall_seconds),
        "cpu_seconds": costs_to(trials, criterion, compute_seconds),
    }
    cost = results.step_cost(method)
    rows = []
    for batch in results.batches:
        ideal, speedup = ideal_speedup(batch, base), gained.get(batch)
        row: Row = {"metric": criterion.metric, "stage": stage}
        row |= {"target": criterion.value, "method": method, "batch": batch}
        row["iterations"] = counts.get(batch)
        row |= {"speedup": speedup, "ideal": ideal}
        row["efficiency"] = None if speedup is None else speedup / ideal
        row |= {name: found.get(batch) for name, found in total.items()}
        shared = counts[batch] * cost.shared(base) if batch in counts else None
        row["cluster_seconds"] = None if shared is None else finite(shared)
        rows.append(row)
    return rows


def good_criterion(results: Results) -> Criterion | None:
    """What a good configuration reaches: the last stage's target accuracy."""
    targets = results.targets("accuracy")
    return targets[-1] if targets else None


def robustness_table(results: Results) -> list[Row]:
    """Share of good configurations: at the end, and under equal budgets."""
    criterion = good_criterion(results)
    epochs, steps = results.common_epochs(), results.common_steps()
    rows = []
    for method in results.methods:
        for batch in results.batches:
            group = results.of(method, batch)
            if not group or criterion is None:
                continue
            ends = [final(each.curve, "accuracy") for each in group]
            early = [value_at(x.curve, "accuracy", epoch=epochs) for x in group]
            few = [value_at(x.curve, "accuracy", step=steps) for x in group]
            row: Row = {"method": method, "batch": batch, "trials": len(group)}
            row["diverged"] = sum(each.curve.diverged for each in group)
            row["target"] = criterion.value
            row["good_at_end"] = good_share(ends, criterion)
            row["epochs"] = epochs
            row["good_in_epochs"] = good_share(early, criterion)
            row["iterations"] = steps
            row["good_in_iterations"] = good_share(few, criterion)
            row |= _quartiles(ends)
            rows.append(row)
    return rows


def _quartiles(values: Sequence[float]) -> Row:
    shares = {"lowest": 0.0, "quarter": 0.25, "median": 0.5, "highest": 1.0}
    return {f"{name}_accuracy": quantile(values, s) for name, s in shares.items()}


def cost_table(results: Results) -> list[Row]:
    """Processor time an update, and what a method adds to SGD's."""
    plain = results.step_seconds("sgd") if "sgd" in results.methods else {}
    rows = []
    for method in results.methods:
        cost = results.step_cost(method)
        for batch, seconds in results.step_seconds(method).items():
            row: Row = {"method": method, "batch": batch}
            row["milliseconds_a_step"] = 1000 * seconds
            row["over_sgd"] = seconds / plain[batch] if batch in plain else None
            row["fixed_milliseconds"] = 1000 * cost.fixed
            row["microseconds_an_example"] = 1e6 * cost.example
            rows.append(row)
    return rows


def finite(value: float) -> float | None:
    """The number, or None for what a table cannot show."""
    return value if math.isfinite(value) else None


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """A table as CSV; empty where there is no value."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]) if rows else [])
        writer.writeheader()
        writer.writerows(rows)


def write_parquet(rows: Sequence[Row], path: Path) -> None:
    """A table as Parquet; null where there is no value."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = list(rows[0]) if rows else []
    columns = {name: [row[name] for row in rows] for name in names}
    pq.write_table(pa.table(columns), path, compression="zstd")
