"""Inverses of blocks of equal shape as one tensor, for one product instead of many."""

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from natgrad.math.inverse import Inverse
from natgrad.state import StatisticState


class Stacks:
    """Joins what is kept of several statistics, anew only when one of them changes.

    The states are left with views of the joined tensors, so that nothing is kept twice.
    What was joined is never written to: a state that somebody is saving stays as it is.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, ...], tuple[list[Inverse], Inverse]] = {}
        self._used: set[tuple[str, ...]] = set()

    def of(self, states: Sequence[StatisticState]) -> Inverse | None:
        """The inverses, ``(k s, n, n)`` and so on; None if one is missing."""
        if len(states) == 1:
            return states[0].inverse
        inverses = [s.inverse for s in states if s.inverse is not None]
        if len(inverses) < len(states):
            return None
        key = tuple(s.spec.name for s in states)
        self._used.add(key)
        known = self._known.get(key)
        if known is not None and all(map(operator.is_, known[0], inverses)):
            return known[1]
        joined = tuple(torch.cat(parts) for parts in zip(*inverses, strict=True))
        count = len(states)
        views = [tuple(_part(x, i, count) for x in joined) for i in range(count)]
        for state, view in zip(states, views, strict=True):
            state.inverse = view
        self._known[key] = views, joined
        return joined

    def forget(self) -> None:
        """Drop what was not asked for since the last call."""
        self._known = {key: self._known[key] for key in self._used}
        self._used = set()


def _part(x: Tensor, i: int, count: int) -> Tensor:
    """The i-th of so many equal parts; of an empty tensor, an empty one."""
    size = len(x) // count
    return x[i * size : (i + 1) * size]
