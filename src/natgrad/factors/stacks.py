"""Inverses of blocks of equal shape as one tensor, for one product instead of many."""

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from natgrad.factors.state import StatisticState
from natgrad.math.inverse import Inverse


class Stacks:
    """Joins what is kept of several blocks, again only when one of them changes.

    Who keeps it is left with views of the joined tensors, so that nothing is kept
    twice. Inverses that were joined are never written to: a state that somebody is
    saving stays as it is.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, ...], tuple[list[Inverse], Inverse]] = {}
        self._used: set[tuple[str, ...]] = set()

    def of(self, states: Sequence[StatisticState]) -> Inverse | None:
        """The inverses, ``(k s, n, n)`` and so on; None if one is missing."""
        inverses = [s.inverse for s in states if s.inverse is not None]
        if len(inverses) < len(states):
            return None
        joined, views = self.joined([s.spec.name for s in states], inverses)
        for state, view in zip(states, views, strict=True):
            state.inverse = view
        return joined

    def joined(
        self, names: Sequence[str], parts: Sequence[Inverse]
    ) -> tuple[Inverse, Sequence[Inverse]]:
        """Tuples of equal shapes as one tuple, and what each has become: views."""
        if len(parts) == 1:
            return parts[0], parts
        key = tuple(names)
        self._used.add(key)
        known = self._known.get(key)
        if known is not None and all(map(_same, known[0], parts)):
            return known[1], known[0]
        joined = tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))
        count = len(parts)
        views = [tuple(_part(x, i, count) for x in joined) for i in range(count)]
        self._known[key] = views, joined
        return joined, views

    def forget(self) -> None:
        """Drop what was not asked for since the last call."""
        self._known = {key: self._known[key] for key in self._used}
        self._used = set()


def _same(left: Inverse, right: Inverse) -> bool:
    return all(map(operator.is_, left, right))


def _part(x: Tensor, i: int, count: int) -> Tensor:
    """The i-th of so many equal parts; of an empty tensor, an empty one."""
    size = len(x) // count
    return x[i * size : (i + 1) * size]
