"""`natgrad recipes`: the list, with what their sources report and what we measured."""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated

import tyro

from natgrad_lab.console import width
from natgrad_lab.errors import UserError
from natgrad_lab.recipes import RECIPES, Recipe

HEADS = ("recipe", "method", "batch", "epochs")
INDENT = "    "


@dataclass(frozen=True, kw_only=True)
class Recipes:
    """List the training recipes, their published results and those measured here."""

    contains: Annotated[str, tyro.conf.Positional] = ""
    """Only those whose name contains this."""


def main(arguments: Sequence[str]) -> int:
    """Parse and print."""
    asked = tyro.cli(Recipes, prog="natgrad recipes", args=list(arguments))
    found = [each for name, each in RECIPES.items() if asked.contains in name]
    if not found:
        raise UserError(f"No recipe's name contains {asked.contains!r}.")
    print("\n".join(listed(found, width())))
    return 0


def listed(recipes: Sequence[Recipe], columns: int) -> Iterator[str]:
    """Lines: a heading for recipes of one model, data and source, then one of each.

    A result that does not fit into its recipe's line follows on lines of its own.
    """
    for number, (heading, group) in enumerate(groupby(recipes, _heading)):
        members = list(group)
        rows = [HEADS, *map(_cells, members)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(HEADS))]
        yield from [""] * bool(number)
        yield from textwrap.wrap(heading, columns)
        yield _line(HEADS, widths)
        for each, cells in zip(members, rows[1:], strict=True):
            line, said = _line(cells, widths), result(each)
            if len(line) + 2 + len(said) <= columns:
                yield f"{line}  {said}".rstrip()
                continue
            yield line
            yield from textwrap.wrap(
                said, columns, initial_indent=INDENT, subsequent_indent=INDENT
            )


def result(recipe: Recipe) -> str:
    """What its source reports and what was measured here; may be nothing."""
    said = [f"published: {recipe.published}"] if recipe.published else []
    return "; ".join(said + [f"measured: {recipe.measured}"] * bool(recipe.measured))


def _heading(recipe: Recipe) -> str:
    config = recipe.config
    return f"{config.model.name} on {config.data.name} ({recipe.source})"


def _cells(recipe: Recipe) -> tuple[str, ...]:
    config = recipe.config
    size = (str(config.batch), f"{config.epochs:g}")
    return (recipe.name, config.optimizer.label, *size)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Names to the left, numbers to the right."""
    left = [c.ljust(w) for c, w in zip(cells[:2], widths[:2], strict=True)]
    right = [c.rjust(w) for c, w in zip(cells[2:], widths[2:], strict=True)]
    return "  ".join([*left, *right])
