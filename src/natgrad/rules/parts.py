"""What an update is made of: average + rule + length + decay, for a parameter group."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from natgrad.rules.lengths import Length
from natgrad.rules.motion import Average, Decay
from natgrad.rules.rule import Rule

if TYPE_CHECKING:
    from natgrad.factors.refresh import Refresh

Damping = float | Callable[[int], float]


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The update of a parameter group; `natgrad.Options` says what each part is.

    Attributes:
        rule: of its matrices.
        fallback: of its other parameters.
        length, average, decay, damping, refresh: of all of them.
        matrices: how many each linear weight is.
    """

    rule: Rule
    fallback: Rule
    length: Length
    average: Average
    decay: Decay
    damping: Damping
    refresh: "Refresh"
    matrices: int | None = None


NAMES = tuple(f.name for f in fields(Parts))
"""The keys that a parameter group may have besides torch's."""


def plain(part: Any) -> Any:
    """A part as plain data: a class's name with its options, or a value."""
    if isinstance(part, Rule):
        return part.spec()
    if hasattr(part, "__dataclass_fields__"):
        options = {f.name: plain(getattr(part, f.name)) for f in fields(part)}
        return {"name": type(part).__name__, **options}
    return part if isinstance(part, int | float | str | None) else repr(type(part))
