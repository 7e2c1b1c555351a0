"""Checks of arguments, whose errors name the value and what is legal."""

import math
from collections.abc import Collection
from typing import Any


def require_choice(name: str, value: Any, legal: Collection[str]) -> None:
    """Raise a ValueError that names the value and the legal ones."""
    if value not in legal:
        raise ValueError(
            f"Invalid {name}={value!r}. Must be one of {', '.join(map(repr, legal))}."
        )


def require_number(
    name: str,
    value: Any,
    legal: str,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    above: float = -math.inf,
    below: float = math.inf,
) -> None:
    """Raise unless it is a finite number, >= low, <= high, > above and < below."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"Invalid {name}={value!r}. Must be {legal}.")
    if not (math.isfinite(value) and low <= value <= high and above < value < below):
        raise ValueError(f"Invalid {name}={value!r}. Must be {legal}.")


def require_count(name: str, value: Any, least: int = 1, *, also: str = "") -> None:
    """Raise unless ``value`` is an integer >= ``least``.

    ``also`` tells what else would be legal, which the caller has looked for.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        legal = f"an integer >= {least}{also}"
        raise ValueError(f"Invalid {name}={value!r}. Must be {legal}.")
