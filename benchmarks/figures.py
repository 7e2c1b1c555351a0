"""The figures of the benchmarks."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import LogLocator, NullFormatter

GREY, BLUES = "#9aa0a6", ("#1f6fb4", "#17a2a2", "#7b4fb0", "#d1495b")
MORE = (*BLUES, "#e09f3e", "#5c677d", "#588157")

Line = tuple[Sequence[float], Sequence[float]]


def step_time_figure(results: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Bars of the ratio to SGD, a panel for each case; ours in colour."""
    if not results:
        return
    columns = min(3, len(results))
    lines = -(-len(results) // columns)
    most = max(len(r["rows"]) for r in results)
    size = (5.2 * columns, (0.24 * most + 1.0) * lines)
    figure, axes = plt.subplots(lines, columns, figsize=size, squeeze=False)
    for axis in axes.flat[len(results) :]:
        axis.axis("off")
    for axis, result in zip(axes.flat, results, strict=False):
        _bars(axis, result)
    _save(figure, path)


def _bars(axis: Any, result: Mapping[str, Any]) -> None:
    rows = result["rows"][1:][::-1]
    names = [f"{r['contender'].removesuffix(' adaptive')}, {r['policy']}" for r in rows]
    ratios = [r["ratio"] for r in rows]
    error = [
        [max(0.0, r["ratio"] - r["low"]) for r in rows],
        [max(0.0, r["high"] - r["ratio"]) for r in rows],
    ]
    colours = [BLUES[0] if n.startswith("natgrad") else GREY for n in names]
    axis.barh(names, ratios, xerr=error, color=colours, height=0.7)
    axis.axvline(1.0, color="black", linewidth=0.8)
    for i, ratio in enumerate(ratios):
        axis.annotate(f" {ratio:.2f}", (ratio, i), va="center", fontsize=7)
    log = max(ratios) > 8
    axis.set_xscale("log" if log else "linear")
    axis.tick_params(labelsize=7)
    plural = "s" if result["threads"] > 1 else ""
    axis.set_title(
        f"{result['label']}, batch {result['batch']}, "
        f"{result['threads']} thread{plural}",
        fontsize=9,
    )
    axis.set_xlabel("cost of a step / SGD" + ", logarithmic" * log, fontsize=8)


def lines_figure(
    panels: Mapping[str, Mapping[str, Line]], xlabel: str, path: Path
) -> None:
    """Ratio to SGD against a size, a panel for each model."""
    figure, axes = plt.subplots(
        1, len(panels), figsize=(4.6 * len(panels), 3.4), squeeze=False
    )
    for axis, (title, lines) in zip(axes.flat, panels.items(), strict=True):
        for i, (name, (x, y)) in enumerate(lines.items()):
            style = "--" if "10/100" in name else "-"
            colour = BLUES[(i // 2) % len(BLUES)]
            axis.plot(x, y, style, marker="o", markersize=3, color=colour, label=name)
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.set_xscale("log", base=2)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel(xlabel, fontsize=8)
        axis.set_ylabel("cost of a step / SGD", fontsize=8)
        axis.tick_params(labelsize=7)
        axis.legend(fontsize=6)
    _save(figure, path)


def ranges_figure(
    panels: Mapping[str, tuple[str, Mapping[str, Sequence[float]]]], path: Path
) -> None:
    """Mean and range of each rule's seeds, a panel for each setting; ours in colour.

    A panel is what its axis shows, and the values by rule.
    """
    columns = min(4, len(panels))
    lines = -(-len(panels) // columns)
    most = max(len(values) for _, values in panels.values())
    figure, axes = plt.subplots(
        lines,
        columns,
        figsize=(3.9 * columns, (0.3 * most + 1.1) * lines),
        squeeze=False,
    )
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    for axis, (title, (label, rules)) in zip(axes.flat, panels.items(), strict=False):
        for row, (name, values) in enumerate(reversed(rules.items())):
            mean = sum(values) / len(values)
            colour = BLUES[0] if name.startswith("polar") else GREY
            axis.plot([min(values), max(values)], [row, row], color=colour, linewidth=2)
            axis.plot(mean, row, "o", color=colour, markersize=6)
            text = f"{mean:.3f}" if "loss" in label else f"{mean:.1f}"
            axis.annotate(
                text, (mean, row), (0, 6), textcoords="offset points", fontsize=7
            )
        axis.set_yticks(range(len(rules)), [*reversed(rules)])
        axis.set_ylim(-0.5, len(rules) - 0.3)
        axis.margins(x=0.15)
        axis.set_title(title, fontsize=8)
        axis.set_xlabel(label, fontsize=8)
        axis.tick_params(labelsize=7)
        axis.grid(axis="x", alpha=0.3)
    _save(figure, path)


def rates_figure(
    panels: Mapping[str, tuple[str, Mapping[str, Line]]], path: Path
) -> None:
    """Where rules end against their learning rate, a panel for each setting.

    A panel is what its axis shows, and the rates and values by rule; ours is thick.
    """
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    size = (4.4 * columns, 3.0 * lines)
    figure, axes = plt.subplots(lines, columns, figsize=size, squeeze=False)
    names = [*dict.fromkeys(n for _, rules in panels.values() for n in rules)]
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    for axis, (title, (label, rules)) in zip(axes.flat, panels.items(), strict=False):
        for name, (x, y) in rules.items():
            width = 2.2 if name.startswith("polar") else 1.2
            colour = MORE[names.index(name) % len(MORE)]
            axis.plot(x, y, "-o", ms=3, lw=width, color=colour, label=name)
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.set_title(title, fontsize=8)
        axis.set_xlabel("learning rate", fontsize=8)
        axis.set_ylabel(label, fontsize=8)
        axis.tick_params(labelsize=7)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=6)
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def predict_figure(
    rows: Sequence[Mapping[str, Any]], path: Path, within: float
) -> None:
    """Predicted over measured milliseconds, with the bounds; a colour a world."""
    figure, axis = plt.subplots(figsize=(5.4, 5.0))
    worlds = sorted({r["world"] for r in rows})
    marks = dict(zip(sorted({r["strategy"] for r in rows}), "osD^v", strict=False))
    for r in rows:
        color = BLUES[worlds.index(r["world"]) % len(BLUES)]
        pair = (1e3 * r["measured"], 1e3 * r["predicted"])
        axis.plot(*pair, marks[r["strategy"]], color=color, ms=5, alpha=0.8)
    ends = [1e3 * f(r["measured"] for r in rows) for f in (min, max)]
    ends = [0.8 * ends[0], 1.25 * ends[1]]
    axis.plot(ends, ends, "-", color=GREY, lw=1)
    low, high = ([factor * x for x in ends] for factor in (1 - within, 1 + within))
    axis.fill_between(ends, low, high, color=GREY, alpha=0.2, lw=0)
    axis.set(xscale="log", yscale="log")
    axis.set_xlabel("measured, milliseconds a step")
    axis.set_ylabel("predicted")
    for index, world in enumerate(worlds):
        color = BLUES[index % len(BLUES)]
        axis.plot([], [], "s", color=color, label=f"{world} processes")
    for name, mark in marks.items():
        axis.plot([], [], mark, color="black", label=name)
    axis.legend(fontsize="small")
    _save(figure, path)
