"""`natgrad recipes`: the list, with what their sources report and what we measured."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro
from rich.table import Table

from natgrad_lab.errors import UserError
from natgrad_lab.recipes import RECIPES, Recipe
from natgrad_lab.report.table import show


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
    show(recipe_table(found))
    return 0


def recipe_table(recipes: Sequence[Recipe]) -> Table:
    """A row a recipe."""
    table = Table()
    table.add_column("recipe", no_wrap=True)
    for title in ("model", "data", "method", "batch", "epochs"):
        table.add_column(title, overflow="fold")
    for title in ("published", "measured", "source"):
        table.add_column(title, overflow="fold")
    for each in recipes:
        config = each.config
        what = (config.model.name, config.data.name, config.optimizer.label)
        size = (str(config.batch), f"{config.epochs:g}")
        results = (each.published, each.measured or "")
        table.add_row(each.name, *what, *size, *results, each.source)
    return table
