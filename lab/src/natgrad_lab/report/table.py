"""Run summaries side by side, for the terminal."""

from collections.abc import Sequence

from rich.table import Table

from natgrad_lab.report.summary import Reached, Summary


def run_table(
    summaries: Sequence[Summary], names: Sequence[str] | None = None
) -> Table:
    """A row a run: best accuracy, cost, steps and seconds to each target."""
    targets = sorted({target for each in summaries for target in each.reached})
    table = Table()
    for title in ("run", "method", "data"):
        table.add_column(title, overflow="fold")
    for title in ("batch", "steps", "ms/step", "best %", "last %"):
        table.add_column(title, justify="right")
    for target in targets:
        table.add_column(f"steps to {target:g} %", justify="right")
        table.add_column(f"s to {target:g} %", justify="right")
    for title in ("refreshed", "waiting", "ending"):
        table.add_column(title, justify="right")
    for index, each in enumerate(summaries):
        name = names[index] if names else each.name
        table.add_row(name, *_cells(each, targets))
    return table


def _cells(summary: Summary, targets: Sequence[float]) -> list[str]:
    cells = [
        summary.label,
        summary.data,
        str(summary.batch),
        str(summary.steps),
        f"{summary.milliseconds:.1f}",
        _percent(summary.best),
        _percent(summary.last),
    ]
    for target in targets:
        cells += _reached(summary.reached.get(target))
    refreshed = summary.reduction
    cells.append("" if refreshed is None else f"{100 * refreshed:.1f} %")
    return [*cells, f"{100 * summary.waiting:.1f} %", summary.ending]


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _reached(reached: Reached | None) -> list[str]:
    if reached is None:
        return ["-", "-"]
    return [str(reached.step), f"{reached.seconds:.1f}"]
