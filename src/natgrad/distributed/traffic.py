"""Counts what a rank moves, by exchange, in a step and in total."""

from __future__ import annotations

Counts = dict[str, dict[str, int]]


class Traffic:
    """Calls, bytes sent and received, and bytes of padding beside them, by exchange."""

    def __init__(self) -> None:
        self._step: Counts = {}
        self._total: Counts = {}
        self._last: Counts | None = None

    def add(
        self,
        exchange: str,
        *,
        calls: int = 0,
        sent: int = 0,
        received: int = 0,
        padding: int = 0,
    ) -> None:
        """Count what an exchange has moved."""
        more = {"calls": calls, "sent": sent, "received": received, "padding": padding}
        for counts in (self._step, self._total):
            old = counts.setdefault(exchange, dict.fromkeys(more, 0))
            for name, number in more.items():
                old[name] += number

    def end_step(self) -> None:
        """Close the counts of a step; `report` then shows that step's."""
        self._last, self._step = self._step, {}

    def report(self) -> dict[str, Counts]:
        """``step``, the last that ended or else all so far, and ``total``."""
        step = self._step if self._last is None else self._last
        pairs = (("step", step), ("total", self._total))
        return {key: {k: dict(v) for k, v in counts.items()} for key, counts in pairs}
