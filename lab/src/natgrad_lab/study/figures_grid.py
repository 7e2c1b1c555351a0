"""Figures over the hyperparameter grid: heatmaps and distributions."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from natgrad_lab.study.curves import Curve, Metric, Trial
from natgrad_lab.study.draw import NAMES, batch_color, metric_axis, panels
from natgrad_lab.study.reading import by_batch, final, quantile, score, value_at
from natgrad_lab.study.results import Results
from natgrad_lab.study.spec import second_of

STOPS = (0.25, 0.5, 0.75, 1.0)
"""Shares of the common budget at which stopping is simulated."""
Value = Callable[[Curve, Metric], float]
Group = tuple[str, list[tuple[Any, list[float]]]]


def heatmaps(results: Results) -> Figure:
    """Figure 5: final accuracy over the grid at a small, a middle and a large batch."""
    sizes = results.batches
    chosen = sorted({sizes[0], sizes[len(sizes) // 2], sizes[-1]})
    return _heatmaps(results, chosen, final, "test accuracy at the end (%)")


def all_heatmaps(results: Results) -> Figure:
    """Figure 9: best accuracy over the grid, for every batch size."""
    return _heatmaps(results, results.batches, score, "best test accuracy (%)")


def _heatmaps(
    results: Results, batches: Sequence[int], value: Value, label: str
) -> Figure:
    figure, axes = panels(len(results.methods), len(batches))
    ended = [each.curve for each in results.main() if not each.curve.diverged]
    accuracies = [value(curve, "accuracy") for curve in ended]
    limits = (min(accuracies, default=0.0), max(accuracies, default=100.0))
    image = None
    for row, method in zip(axes, results.methods, strict=True):
        for axis, batch in zip(row, batches, strict=True):
            image = _heatmap(axis, results.of(method, batch), limits, value) or image
            axis.set_title(f"{NAMES[method]}, batch {batch}", fontsize="small")
            axis.set_ylabel(second_of(method))
            axis.set_xlabel("learning rate")
    if image is not None:
        figure.colorbar(image, ax=axes, label=label, shrink=0.8)
    return figure


def _heatmap(
    axis: Any, trials: Sequence[Trial], limits: tuple[float, float], value: Value
) -> Any:
    """Learning rate against the other hyperparameter; x where it diverged."""
    rates = sorted({each.point.lr for each in trials})
    others = sorted({each.point.other for each in trials})
    if not trials:
        return None
    values = np.full((len(others), len(rates)), math.nan)
    for each in trials:
        row, column = others.index(each.point.other), rates.index(each.point.lr)
        if each.curve.diverged:
            axis.text(column, row, "x", ha="center", va="center", color="0.4")
        else:
            values[row, column] = value(each.curve, "accuracy")
    edges = [np.arange(len(side) + 1) - 0.5 for side in (rates, others)]
    low, high = limits
    image = axis.pcolormesh(*edges, values, vmin=low, vmax=high, cmap="magma")
    for ticks, side in ((axis.set_xticks, rates), (axis.set_yticks, others)):
        ticks(range(len(side)), [f"{x:.3g}" for x in side], fontsize="x-small")
    axis.tick_params(axis="x", rotation=45)
    return image


def robustness(results: Results, method: str) -> Figure:
    """Figure 6: all configurations at the end, or stopped at equal budgets."""
    figure, axes = panels(2, 3)
    epochs, steps = results.common_epochs(), results.common_steps()
    for row, metric in zip(axes, ("accuracy", "loss"), strict=True):
        groups = by_batch(results.of(method))
        ends = [(m, [final(x.curve, metric) for x in g]) for m, g in groups.items()]
        _boxes(row[0], [("end of training", ends)], results, metric)
        by_epoch = [
            (f"{share * epochs:.3g}", _stopped(groups, metric, epoch=share * epochs))
            for share in STOPS
        ]
        _boxes(row[1], by_epoch, results, metric, "stopping epoch")
        at = [max(1, round(share * steps)) for share in STOPS]
        by_step = [(str(s), _stopped(groups, metric, step=s)) for s in sorted(set(at))]
        _boxes(row[2], by_step, results, metric, "stopping iteration")
    figure.suptitle(NAMES[method])
    _batch_legend(figure, results)
    return figure


def robustness_of(method: str) -> Callable[[Results], Figure]:
    """`robustness` of one method."""
    return lambda results: robustness(results, method)


def damping_styles(results: Results) -> Figure:
    """Figure 10: all configurations at the end of training, by damping style."""
    figure, axes = panels(1, 2)
    curved = [name for name in results.methods if name != "sgd"]
    for axis, metric in zip(axes[0], ("accuracy", "loss"), strict=True):
        groups: list[Group] = []
        for method in curved:
            for style in results.spec.methods[method].styles(method):
                trials = by_batch(results.of(method, style=style))
                ends = [
                    (m, [final(x.curve, metric) for x in g]) for m, g in trials.items()
                ]
                groups.append((f"{NAMES[method]}\n{style}", ends))
        _boxes(axis, groups, results, metric)
    _batch_legend(figure, results)
    return figure


def _stopped(
    groups: dict[int, list[Trial]], metric: Metric, **budget: Any
) -> list[tuple[Any, list[float]]]:
    return [
        (m, [value_at(each.curve, metric, **budget) for each in group])
        for m, group in groups.items()
    ]


def _boxes(
    axis: Any,
    groups: Sequence[Group],
    results: Results,
    metric: Metric,
    label: str = "",
) -> None:
    """Box plots side by side: a group a budget, within it a box a batch size."""
    known = [x for _, group in groups for _, values in group for x in values]
    top = max((x for x in known if math.isfinite(x)), default=1.0)
    width = 0.8 / max(1, len(results.batches))
    for place, (_, group) in enumerate(groups):
        for batch, values in group:
            index = results.batches.index(batch)
            at = place + (index + 0.5) * width - 0.4
            clipped = [x if math.isfinite(x) else top for x in values]
            _box(axis, at, width, clipped, batch_color(batch, results.batches))
    axis.set_xticks(range(len(groups)), [name for name, _ in groups], fontsize="small")
    axis.set_xlabel(label)
    metric_axis(axis, metric)


def _batch_legend(figure: Figure, results: Results) -> None:
    """Colours of the batch sizes, once for all panels."""
    handles = [
        Line2D([], [], color=batch_color(m, results.batches)) for m in results.batches
    ]
    labels = [f"batch {m}" for m in results.batches]
    place = "outside lower center"
    figure.legend(handles, labels, loc=place, ncols=len(labels), fontsize="small")


def _box(axis: Any, at: float, width: float, values: list[float], color: Any) -> None:
    low, first, middle, third, high = (
        quantile(values, share) for share in (0.0, 0.25, 0.5, 0.75, 1.0)
    )
    facts = {"med": middle, "q1": first, "q3": third, "whislo": low, "whishi": high}
    look = {"color": color}
    axis.bxp(
        [facts],
        positions=[at],
        widths=0.8 * width,
        showfliers=False,
        manage_ticks=False,
        boxprops=look,
        whiskerprops=look,
        capprops=look,
        medianprops={"color": "black"},
    )
