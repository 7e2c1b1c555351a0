"""What all figures of a study share: panels, axes, colours, markers."""

from collections.abc import Sequence
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from natgrad_lab.study.curves import Metric
from natgrad_lab.study.reading import Criterion

MARKERS = {"sgd": "^", "kfac": "o", "spngd": "s", "polar": "D"}
NAMES = {"sgd": "SGD", "kfac": "K-FAC", "spngd": "SP-NGD", "polar": "Polar"}
STAGES = ("#1b6ca8", "#d1731a", "#2a8a4a", "#8a3a8f", "#6b6b6b")
WIDTH, HEIGHT = 4.4, 3.2


def panels(rows: int, columns: int) -> tuple[Figure, Any]:
    """A figure of ``rows x columns`` axes, always as a nested list."""
    figure = Figure(
        figsize=(WIDTH * columns, HEIGHT * rows + 0.5), layout="constrained"
    )
    return figure, figure.subplots(rows, columns, squeeze=False)


def batch_color(batch: int, batches: Sequence[int]) -> Any:
    """Dark for the smallest batch, bright for the largest."""
    share = sorted(batches).index(batch) / max(1, len(batches) - 1)
    return colormaps["viridis"](0.9 * share)


def stage_color(stage: int) -> str:
    """A colour a stage of training, from 0."""
    return STAGES[stage % len(STAGES)]


def batch_axis(axis: Any, batches: Sequence[int]) -> None:
    """The batch size on a logarithmic x axis, with the study's sizes as ticks."""
    axis.set_xscale("log", base=2)
    axis.set_xticks(list(batches), [f"{m}" for m in batches], fontsize="small")
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xlabel("batch size")
    axis.grid(alpha=0.25)


def metric_axis(axis: Any, metric: Metric, which: str = "") -> None:
    """The y axis of an accuracy or a loss."""
    names = {"accuracy": "test accuracy (%)", "loss": "training loss"}
    axis.set_ylabel(f"{which} {names[metric]}".strip())
    if metric == "loss":
        axis.set_yscale("log")
    axis.grid(alpha=0.25)


def mark_targets(axis: Any, targets: Sequence[Criterion]) -> None:
    """Dotted horizontal lines."""
    for each in targets:
        axis.axhline(each.value, color="0.5", linewidth=0.9, linestyle=":")


def stage_legend(figure: Figure, methods: Sequence[str], stages: int) -> None:
    """One legend under all panels: a marker a method, a colour a stage."""
    grey: dict[str, Any] = {"color": "0.4"}
    shown = [
        Line2D([], [], marker=MARKERS[name], linestyle="", label=NAMES[name], **grey)
        for name in methods
    ]
    shown += [
        Line2D([], [], color=stage_color(i), label=f"target {i + 1}")
        for i in range(stages)
    ]
    shown.append(Line2D([], [], linestyle=":", label="ideal", **grey))
    place = "outside lower center"
    figure.legend(handles=shown, loc=place, ncols=len(shown), fontsize="small")


def legend_below(figure: Figure, axis: Any) -> None:
    """One legend under all panels, without doubles."""
    handles, labels = axis.get_legend_handles_labels()
    known = dict(zip(labels, handles, strict=True))
    if known:
        figure.legend(
            known.values(),
            known.keys(),
            loc="outside lower center",
            ncols=min(8, len(known)),
            fontsize="small",
        )
