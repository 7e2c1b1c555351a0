"""Which statistics each step of a run refreshed, for `natgrad simulate --replay`.

A record holds the steps since the last one in which something was refreshed, as
``[step, estimated, inverted]``. Both are "all", or the names' indices in the sorted
list of statistics, which the run's first record with refreshes has as ``statistics``.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from natgrad import KFAC, SPNGD

ALL = "all"
Named = frozenset[str]


class RefreshLog:
    """Collects what steps refreshed until a record takes it."""

    def __init__(self, curved: KFAC | SPNGD | None) -> None:
        self._curved = curved
        self._names = sorted(curved.engine.statistics.states) if curved else []
        self._index = {name: i for i, name in enumerate(self._names)}
        self._steps: list[list[Any]] = []
        self._told = False

    def note(self, step: int) -> None:
        """Step ``step``, counted from 1, is done."""
        if self._curved is None:
            return
        last = self._curved.engine.statistics.last
        if last.estimated or last.inverted:
            parts = (self._pack(last.estimated), self._pack(last.inverted))
            self._steps.append([step, *parts])

    def _pack(self, names: Collection[str]) -> str | list[int]:
        if len(names) == len(self._names):
            return ALL
        return sorted(self._index[name] for name in names)

    def take(self) -> dict[str, Any]:
        """What a record tells, and start again."""
        if self._curved is None:
            return {}
        facts: dict[str, Any] = {"refreshes": self._steps}
        if not self._told:
            facts["statistics"] = self._names
        self._steps, self._told = [], True
        return facts


def recorded(records: Sequence[Mapping[str, Any]]) -> dict[int, tuple[Named, Named]]:
    """What each step refreshed, by step, from 1 to the last record's.

    Empty if the run was recorded without names.
    """
    told = [r for r in records if "refreshes" in r]
    names: list[str] = next((r["statistics"] for r in told if "statistics" in r), [])
    if not names:
        return {}

    def unpack(part: str | Sequence[int]) -> Named:
        return frozenset(names if part == ALL else (names[int(i)] for i in part))

    nothing: Named = frozenset()
    steps = dict.fromkeys(range(1, told[-1]["step"] + 1), (nothing, nothing))
    for record in told:
        for step, estimated, inverted in record["refreshes"]:
            steps[step] = unpack(estimated), unpack(inverted)
    return steps
