"""What the commands print: tables that stay readable however narrow the window is.

Imports neither torch nor natgrad, so that commands that only list things start fast.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from rich import box
from rich.console import Console as RichConsole
from rich.measure import Measurement
from rich.table import Table

UNFOLDED = 200
"""Columns where the output is no terminal: wide, for programs that read lines."""
WIDEST = 24
"""Columns of a cell in a table that was turned; longer texts are folded."""


EDGE, GAP = 2, 3
"""Columns at both ends of a table that was turned, and before a cell."""


class Console(RichConsole):
    """Rich's, but a reader that is gone (`natgrad ... | head`) is the caller's matter.

    Rich itself would end the process with status 1.
    """

    def on_broken_pipe(self) -> NoReturn:
        raise BrokenPipeError


def width() -> int:
    """Columns to fill: the terminal's or $COLUMNS, and plenty without either."""
    known = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return RichConsole().width if known else UNFOLDED


def show(table: Table) -> None:
    """Print a table; one that is too wide is turned, so that no number is cut."""
    columns = width()
    console = Console(width=columns)
    for each in fitted(table, columns):
        console.print(each)


def fitted(table: Table, columns: int) -> list[Table]:
    """The table itself if it fits, else tables of which each does.

    These have a column for each row of the first, as many as there is room for.
    """
    if _needs(table) <= columns:
        return [table]
    heads = [str(column.header) for column in table.columns]
    rows = zip(*(map(str, column.cells) for column in table.columns), strict=True)
    first = max(map(len, heads))
    parts = list(_parts([list(row) for row in rows], columns - first - EDGE))
    turned = [_turned(heads, part) for part in parts]
    turned[0].title = table.title
    return turned


def _needs(table: Table) -> int:
    """Columns in which nothing of a table is folded, but for its title."""
    console = RichConsole(width=10_000)
    return Measurement.get(console, console.options, table).maximum


def _parts(
    rows: Sequence[Sequence[str]], room: int
) -> Iterator[Sequence[Sequence[str]]]:
    """Rows that fit beside each other, at least one at a time."""
    part: list[Sequence[str]] = []
    used = 0
    for row in rows:
        size = min(WIDEST, max(map(len, row))) + GAP
        if part and used + size > room:
            yield part
            part, used = [], 0
        part.append(row)
        used += size
    yield part


def _turned(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(heads[0], no_wrap=True)
    # A table of one column has the whole line for its texts.
    limits: dict[str, Any] = {} if len(rows) == 1 else {"max_width": WIDEST}
    for row in rows:
        justify: Any = "left" if len(rows) == 1 else "right"
        table.add_column(row[0], justify=justify, overflow="fold", **limits)
    for index, head in enumerate(heads[1:], 1):
        table.add_row(head, *(row[index] for row in rows))
    return table
