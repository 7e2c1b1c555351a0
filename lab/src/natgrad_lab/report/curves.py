"""Curves as PNG files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from natgrad_lab.report.summary import Summary


def draw(
    summaries: Sequence[Summary], path: Path, names: Sequence[str] | None = None
) -> Path:
    """Test accuracy over steps and seconds, training loss and learning rate."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7.5), layout="constrained")
    axes = figure.subplots(2, 2)
    for index, each in enumerate(summaries):
        name = names[index] if names else each.name
        color = f"C{index % 10}"
        _line(axes[0][0], each, "test", "step", "accuracy", name, color)
        _line(axes[0][1], each, "test", "seconds", "accuracy", name, color)
        _line(axes[1][0], each, "train", "step", "loss", name, color)
        _line(axes[1][1], each, "train", "step", "lr", name, color)
    for target in sorted({t for each in summaries for t in each.reached}):
        for axis in axes[0]:
            axis.axhline(target, color="0.6", linewidth=0.8, linestyle=":")
    _labels(axes)
    figure.suptitle(title(summaries), fontsize="medium")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return path


def title(summaries: Sequence[Summary]) -> str:
    """What the runs were trained and tested on."""
    return ", ".join(dict.fromkeys(each.data for each in summaries))


def _line(
    axis: Any, run: Summary, kind: str, x: str, y: str, name: str, color: str
) -> None:
    points = [each for each in run.records if each["kind"] == kind]
    axis.plot(
        [each[x] for each in points],
        [each[y] for each in points],
        label=name,
        color=color,
        linewidth=1.4,
    )


def _labels(axes: Any) -> None:
    names = (("step", "test accuracy (%)"), ("training seconds", "test accuracy (%)"))
    names += (("step", "training loss"), ("step", "learning rate"))
    for axis, (x, y) in zip(axes.flat, names, strict=True):
        axis.set_xlabel(x)
        axis.set_ylabel(y)
        axis.grid(alpha=0.25)
    axes[1][0].set_yscale("log")
    axes[0][0].legend(fontsize="small")
