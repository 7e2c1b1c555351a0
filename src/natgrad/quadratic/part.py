"""The first examples of a batch, in place of all of them.

Note [Part of a batch]
What a closure does with a model's outputs, its loss above all, is for all examples. So
only the model inside it is given fewer: hooks cut the tensors that it is called with to
the first k of n examples, and fill its outputs up to n rows that no weight moves. Their
tangents are zero. Those of the first k, times ``sqrt(n / k)``, make ``J^T H J`` the
matrix of the first k examples at the size of the whole batch's, with the H of the first
run. Where the model is called more than once, each call is cut for itself.
"""

import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map


class Part:
    """The first examples of each call of a model. See Note [Part of a batch].

    Args:
        model: the plain module.
        fraction: of the examples, in (0, 1], rounded up.
    """

    def __init__(self, model: nn.Module, fraction: float) -> None:
        self._model, self._fraction = model, fraction
        self._kept: dict[int, int] = {}
        self._called: list[tuple[int, int]] = []

    @property
    def is_all(self) -> bool:
        """Whether nothing is cut."""
        return self._fraction == 1.0

    @contextmanager
    def cut(self) -> Generator[None]:
        """Calls of the model see the first examples only."""
        if self.is_all:
            yield
            return
        self._kept, self._called = {}, []
        before = self._model.register_forward_pre_hook(self._first, with_kwargs=True)
        after = self._model.register_forward_hook(self._filled)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def _first(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = [x for x in tree_leaves((args, kwargs)) if _has_rows(x)]
        if not given:
            raise self._invalid(
                f"{type(model).__name__} is called without a tensor of examples",
                "call it with one",
            )
        n = len(given[0])
        k = math.ceil(self._fraction * n)
        self._kept[n] = k
        self._called.append((n, k))

        def cut(x: Any) -> Any:
            return x[:k] if _has_rows(x) and len(x) == n else x

        return tree_map(cut, args), tree_map(cut, kwargs)

    def _filled(self, _: nn.Module, __: tuple[Any, ...], outputs: Any) -> Any:
        n, k = self._called.pop()

        def fill(x: Any) -> Any:
            if not (_has_rows(x) and len(x) == k < n):
                return x
            return torch.cat([x, x[:1].detach().expand(n - k, *x.shape[1:])])

        return tree_map(fill, outputs)

    def scaled(self, tangents: Sequence[Tensor]) -> list[Tensor]:
        """Tangents of each output, after such a run, at the size of the batch's."""
        return [*tangents] if self.is_all else [t * self._root(t) for t in tangents]

    def _root(self, x: Tensor) -> float:
        sizes = dict(self._kept)
        if not sizes:
            raise self._invalid(
                f"the closure never calls the {type(self._model).__name__} itself",
                "have it call the model, not its layers",
            )
        # flattened rows, of all positions, are as many times as many
        n = next(iter(sizes)) if len(sizes) == 1 else len(x) if x.dim() else 0
        if n not in sizes or not x.dim() or len(x) % n:
            raise self._invalid(
                f"an output of shape {tuple(x.shape)}, where calls of the model had "
                f"{sorted(sizes)} examples",
                "return outputs with the examples first",
            )
        return math.sqrt(n / sizes[n])

    def require_repeatable(self, *, draws: bool) -> None:
        """Raise if a run draws random numbers: a part would draw others."""
        if draws and not self.is_all:
            raise self._invalid(
                "the closure draws random numbers (dropout), which the first examples "
                "alone would draw again",
                "without them",
            )

    def _invalid(self, why: str, cure: str) -> ValueError:
        return ValueError(
            f"Invalid batch_part={self._fraction}: {why}. Must be 1.0, or {cure}."
        )


def _has_rows(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() > 0
