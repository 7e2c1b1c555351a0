"""Recipes by name. A recipe file defines ``RECIPES``, a list of `Recipe`."""

from difflib import get_close_matches

from natgrad_lab.errors import UserError
from natgrad_lab.recipes import (
    cifar10_fashion,
    digits,
    ma2019,
    osawa2019,
    osawa2020,
    pauloski2020_cifar10,
    pauloski2020_imagenet,
    text,
    values,
    vit,
    whole,
)
from natgrad_lab.recipes.recipe import Recipe

FILES = (
    digits,
    cifar10_fashion,
    text,
    vit,
    values,
    whole,
    osawa2019,
    osawa2020,
    ma2019,
    pauloski2020_cifar10,
    pauloski2020_imagenet,
)
RECIPES: dict[str, Recipe] = {
    recipe.name: recipe for file in FILES for recipe in file.RECIPES
}


def find(name: str) -> Recipe:
    """The recipe of that name, or an error with the nearest names."""
    if name in RECIPES:
        return RECIPES[name]
    near = get_close_matches(name, RECIPES, n=3)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    raise UserError(f"Unknown recipe {name!r}.{hint} `natgrad recipes` lists them.")


__all__ = ["FILES", "RECIPES", "Recipe", "find"]
