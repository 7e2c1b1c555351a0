"""The figures of Ma et al. 2019, 1 to 10, and one of ours, for any study.

Every function takes `Results` and returns a matplotlib figure. Methods have a marker,
batch sizes a colour from dark (small) to bright (large), stages of training a colour.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from natgrad_lab.study import figures_grid as grid
from natgrad_lab.study.curves import Metric, Trial
from natgrad_lab.study.draw import (
    MARKERS,
    NAMES,
    batch_axis,
    batch_color,
    legend_below,
    mark_targets,
    metric_axis,
    panels,
    stage_color,
    stage_legend,
)
from natgrad_lab.study.reading import (
    Cost,
    Criterion,
    best_trial,
    by_batch,
    compute_seconds,
    costs_to,
    examples,
    ideal_costs,
    ideal_speedup,
    iterations,
    score,
    speedups,
    wall_seconds,
)
from natgrad_lab.study.results import METRICS, Results

DASHES = {"scaled": "-", "fixed": "--"}


def trajectories_by_schedule(results: Results) -> Figure:
    """Figure 1: best runs over epochs, scaled (solid) and fixed (dashed) schedules."""
    figure, axes = panels(len(METRICS), len(results.methods))
    for row, metric in enumerate(("accuracy", "loss")):
        for column, method in enumerate(results.methods):
            axis = axes[row][column]
            for schedule in results.spec.schedule.kinds:
                trials = results.of(method, schedule=schedule)
                _best_runs(axis, trials, metric, "epochs", DASHES[schedule], results)
            metric_axis(axis, metric)
            axis.set_title(NAMES[method])
            axis.set_xlabel("epoch")
    legend_below(figure, axes[0][0])
    return figure


def best_by_batch(results: Results) -> Figure:
    """Figure 2: best test accuracy and least training loss against batch size."""
    figure, axes = panels(1, 2)
    for axis, metric in zip(axes[0], ("accuracy", "loss"), strict=True):
        for method in results.methods:
            groups = by_batch(results.of(method))
            best = {
                m: score(best_trial(g, metric).curve, metric) for m, g in groups.items()
            }
            _series(axis, best, method)
        metric_axis(axis, metric, "best")
        batch_axis(axis, results.batches)
    legend_below(figure, axes[0][0])
    return figure


def iterations_to_target(results: Results) -> Figure:
    """Figure 3: least iterations to each target, and the ideal (dotted)."""
    figure, axes = panels(1, 2)
    for axis, metric in zip(axes[0], METRICS, strict=True):
        for stage, method, costs in _stages(results, metric, iterations):
            _series(axis, costs, method, color=stage_color(stage))
            ideal = ideal_costs(costs, results.base)
            axis.plot(ideal.keys(), ideal.values(), ":", color=stage_color(stage))
        targets = results.targets(metric)
        _target_axis(axis, targets, results, metric, "iterations to target")
    _stage_legend(figure, results)
    return figure


def speedup(results: Results) -> Figure:
    """Figure 4: speedup over the base batch, and the ideal (dotted)."""
    figure, axes = panels(1, 2)
    for axis, metric in zip(axes[0], METRICS, strict=True):
        for stage, method, costs in _stages(results, metric, iterations):
            found = speedups(costs, results.base)
            _series(axis, found, method, color=stage_color(stage))
        ideal = [ideal_speedup(m, results.base) for m in results.batches]
        axis.plot(results.batches, ideal, ":", color="0.3")
        _target_axis(axis, results.targets(metric), results, metric, "speedup")
    _stage_legend(figure, results)
    return figure


def trajectories_by_epoch(results: Results) -> Figure:
    """Figure 7: best runs of each batch over epochs; star: best; dotted: targets."""
    return _trajectories(results, "epochs", "epoch")


def trajectories_by_iteration(results: Results) -> Figure:
    """Figure 8: the same over iterations."""
    return _trajectories(results, "steps", "iteration")


def total_cost(results: Results) -> Figure:
    """Figure 11, ours: examples, and seconds of three clocks, to the last targets.

    Of the wall, of the processor, and of a cluster that shares the batch out.

    The seconds count K-FAC's own work, which Ma et al. leave out.
    """
    figure, axes = panels(len(METRICS), 4)
    for row, metric in zip(axes, METRICS, strict=True):
        _cost_panel(row[0], results, metric, examples, "examples to target")
        _cost_panel(row[1], results, metric, wall_seconds, "wall-clock seconds")
        _cost_panel(row[2], results, metric, compute_seconds, "processor seconds")
        for method, costs in _last_stage(results, metric, iterations):
            each = results.step_cost(method).shared(results.base)
            _series(row[3], {m: k * each for m, k in costs.items()}, method)
        label = f"cluster seconds, {results.base} a worker"
        _target_axis(row[3], results.targets(metric)[-1:], results, metric, label)
    legend_below(figure, axes[0][0])
    return figure


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A figure of the report: its file name, caption and maker."""

    name: str
    caption: str
    make: Callable[[Results], Figure]


def charts(results: Results) -> list[Chart]:
    """Every figure that belongs to a study's report, in order."""
    found = [
        _chart("figure-01-schedules", trajectories_by_schedule),
        _chart("figure-02-best", best_by_batch),
        _chart("figure-03-iterations", iterations_to_target),
        _chart("figure-04-speedup", speedup),
        _chart("figure-05-heatmaps", grid.heatmaps),
    ]
    for method in results.methods:
        caption = f"{_first_line(grid.robustness)} {NAMES[method]}."
        maker = grid.robustness_of(method)
        found.append(
            Chart(name=f"figure-06-robustness-{method}", caption=caption, make=maker)
        )
    return [
        *found,
        _chart("figure-07-epochs", trajectories_by_epoch),
        _chart("figure-08-iterations", trajectories_by_iteration),
        _chart("figure-09-heatmaps", grid.all_heatmaps),
        _chart("figure-10-damping", grid.damping_styles),
        _chart("figure-11-cost", total_cost),
    ]


def save(figure: Figure, folder: Path, name: str) -> None:
    """A figure as NAME.png and NAME.svg."""
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(folder / f"{name}.png", dpi=100, metadata={"Software": None})
        figure.set_layout_engine("none")  # it is laid out: once is slow enough
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})


def _chart(name: str, make: Callable[[Results], Figure]) -> Chart:
    return Chart(name=name, caption=_first_line(make), make=make)


def _first_line(function: Callable[..., Any]) -> str:
    return (function.__doc__ or "").strip().splitlines()[0]


def _trajectories(results: Results, x: str, label: str) -> Figure:
    figure, axes = panels(len(results.methods), 2)
    for row, method in zip(axes, results.methods, strict=True):
        for axis, metric in zip(row, ("accuracy", "loss"), strict=True):
            _best_runs(axis, results.of(method), metric, x, "-", results, star=True)
            mark_targets(axis, results.targets(metric))
            metric_axis(axis, metric)
            axis.set_title(NAMES[method])
            axis.set_xlabel(label)
            if x == "steps":
                axis.set_xscale("log")
    legend_below(figure, axes[0][0])
    return figure


def _best_runs(
    axis: Any,
    trials: Sequence[Trial],
    metric: Metric,
    x: str,
    dashes: str,
    results: Results,
    *,
    star: bool = False,
) -> None:
    for batch, group in by_batch(trials).items():
        curve = best_trial(group, metric).curve
        if not curve.steps:
            continue
        color = batch_color(batch, results.batches)
        where, values = getattr(curve, x), curve.values(metric)
        label = f"{batch}" if dashes == "-" else f"{batch}, fixed"
        axis.plot(where, values, dashes, color=color, label=label, linewidth=1.3)
        if star:
            sign = 1 if metric == "loss" else -1
            known = [i for i, value in enumerate(values) if math.isfinite(value)]
            at = min(known, key=lambda i: sign * values[i], default=0)
            axis.plot(where[at], values[at], "*", color=color, markersize=9)


def _stages(
    results: Results, metric: Metric, cost: Cost
) -> list[tuple[int, str, dict[int, float]]]:
    return [
        (stage, method, costs_to(results.of(method), criterion, cost))
        for stage, criterion in enumerate(results.targets(metric))
        for method in results.methods
    ]


def _stage_legend(figure: Figure, results: Results) -> None:
    stages = max(len(results.targets(metric)) for metric in METRICS)
    stage_legend(figure, results.methods, stages)


def _last_stage(
    results: Results, metric: Metric, cost: Cost
) -> list[tuple[str, dict[int, float]]]:
    targets = results.targets(metric)[-1:]
    return [
        (m, costs_to(results.of(m), t, cost)) for t in targets for m in results.methods
    ]


def _cost_panel(
    axis: Any, results: Results, metric: Metric, cost: Cost, label: str
) -> None:
    for method, costs in _last_stage(results, metric, cost):
        _series(axis, costs, method)
    _target_axis(axis, results.targets(metric)[-1:], results, metric, label)


def _series(
    axis: Any, values: dict[int, float], method: str, color: str | None = None
) -> None:
    marker = MARKERS[method]
    chosen = color or f"C{list(MARKERS).index(method)}"
    label = NAMES[method]
    axis.plot(values.keys(), values.values(), marker=marker, color=chosen, label=label)


def _target_axis(
    axis: Any,
    targets: Sequence[Criterion],
    results: Results,
    metric: Metric,
    label: str,
) -> None:
    values = ", ".join(f"{each.value:.3g}" for each in targets)
    axis.set_title(f"target {metric}: {values}", fontsize="small")
    axis.set_yscale("log")
    axis.set_ylabel(label)
    batch_axis(axis, results.batches)
