"""How settings check themselves, and what a study needs to know of them."""

from collections.abc import Callable
from typing import Any

LATER = {"later": True}
"""Metadata of a setting that came later. `run.plain` leaves it out while it has its
default, so that a study's hashes of older configurations stay what they were."""


def require(ok: bool, name: str, value: Any, legal: str) -> None:
    """Raise a ValueError that names the value and what is legal."""
    if not ok:
        raise ValueError(f"Invalid {name}={value!r}. Must be {legal}.")


def checks(config: Any, where: str = "") -> Callable[[str, bool, str], None]:
    """`require` for the fields of a config: field, whether it is legal, what is."""

    def check(field: str, ok: bool, legal: str) -> None:
        require(ok, f"{where}{field}", getattr(config, field), legal)

    return check
