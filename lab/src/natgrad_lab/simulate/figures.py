"""Pictures of a simulation: one step as a Gantt chart, and scaling curves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from natgrad_lab.simulate.events import Timeline, streams
from natgrad_lab.simulate.run import PHASES, Result

_MOST_ROWS = 12
_COLORS = [
    *(f"C{i}" for i in range(10)),
    "0.2",
    "gold",
    "0.6",
    "teal",
    "tan",
    "navy",
    "plum",
]


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def gantt(timeline: Timeline, path: Path, title: str = "") -> Path:
    """One step: a bar a task, a row a stream; roles with the most work are shown."""
    rows = _rows(timeline)
    figure = _figure(11, 1.5 + 0.35 * len(rows))
    axis = figure.subplots()
    seen: set[str] = set()
    for task in timeline.tasks:
        if task.stream not in rows or task.seconds <= 0:
            continue
        label = None if task.phase in seen else task.phase
        seen.add(task.phase)
        axis.barh(
            rows.index(task.stream),
            1e3 * task.seconds,
            left=1e3 * task.start,
            color=_COLORS[PHASES.index(task.phase)],
            edgecolor="white",
            linewidth=0.2,
            label=label,
        )
    names = {task.stream: task.name for task in timeline.tasks}
    labels = [names[row] if row.startswith("role") else row for row in rows]
    axis.set_yticks(range(len(rows)), labels)
    axis.invert_yaxis()
    axis.set_xlabel("milliseconds")
    axis.set_title(title)
    axis.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return _save(figure, path)


def _rows(timeline: Timeline) -> list[str]:
    busy: dict[str, float] = {}
    for task in timeline.tasks:
        busy[task.stream] = busy.get(task.stream, 0.0) + task.seconds
    names = streams(timeline.tasks)
    fixed = [name for name in names if not name.startswith("role")]
    roles = sorted((n for n in names if n.startswith("role")), key=lambda n: -busy[n])
    return [*fixed, *roles[:_MOST_ROWS]]


def scaling_figure(
    results: Sequence[Result],
    path: Path,
    *,
    labels: Sequence[str] = (),
    hours: dict[str, float] | None = None,
) -> Path:
    """Seconds a step over ranks, and to a solution.

    They are Figure 5 of Osawa et al. 2020 and Figure 7 of Pauloski et al. 2020.
    ``hours`` is examples to see by strategy over examples per rank and step, divided by
    3600; without it there is one panel.
    """
    figure = _figure(11 if hours else 6.5, 4.2)
    panels = figure.subplots(1, 2 if hours else 1, squeeze=False)[0]
    names = list(dict.fromkeys(r.strategy for r in results))
    for index, name in enumerate(names):
        mine = [r for r in results if r.strategy == name]
        worlds = [r.world for r in mine]
        label = labels[index] if labels else name
        panels[0].plot(worlds, [r.seconds for r in mine], "o-", ms=3, label=label)
        if hours:
            spent = [hours[name] * r.seconds / r.world for r in mine]
            panels[1].plot(worlds, spent, "o-", ms=3, label=label)
    for panel, title in zip(
        panels, ("seconds a step", "hours to solution"), strict=False
    ):
        panel.set_xscale("log", base=2 if max(r.world for r in results) <= 4096 else 10)
        panel.set_xlabel("ranks")
        panel.set_ylabel(title)
        panel.grid(alpha=0.25)
    panels[-1].set_yscale("log" if hours else "linear")
    panels[0].set_ylim(bottom=0)
    panels[0].legend(fontsize="small")
    return _save(figure, path)


def _save(figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return path
