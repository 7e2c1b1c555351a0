"""What a transform of a batch is, and how transforms are chained.

A transform takes a whole batch (N, ...) and uniform random numbers (N, randoms) in
[0, 1), one row an example. Rows are drawn for the global batch and sliced with it, so
an example is changed in the same way whatever the number of ranks.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Transform(Protocol):
    """A batch in, a batch out."""

    @property
    def randoms(self) -> int:
        """Uniform random numbers it needs for each example."""
        ...

    def __call__(self, inputs: Tensor, uniforms: Tensor | None = None) -> Tensor:
        """Transform (N, ...) by (N, randoms); without them, fresh ones are drawn."""
        ...


class Chain:
    """Transforms one after the other, as one transform."""

    def __init__(self, transforms: Sequence[Transform]) -> None:
        self.transforms = tuple(transforms)

    @property
    def randoms(self) -> int:
        return sum(t.randoms for t in self.transforms)

    def __call__(self, inputs: Tensor, uniforms: Tensor | None = None) -> Tensor:
        columns = uniforms_for(inputs, self.randoms, uniforms)
        parts = columns.split([t.randoms for t in self.transforms], dim=1)
        for transform, part in zip(self.transforms, parts, strict=True):
            inputs = transform(inputs, part)
        return inputs


def uniforms_for(inputs: Tensor, randoms: int, uniforms: Tensor | None) -> Tensor:
    """The given uniform numbers, checked, or fresh ones from torch's generator."""
    if uniforms is None:
        return torch.rand(len(inputs), randoms, device=inputs.device)
    shape = tuple(uniforms.shape)
    if shape != (len(inputs), randoms):
        raise ValueError(
            f"Invalid uniforms of {shape=}. Must be {(len(inputs), randoms)}."
        )
    return uniforms


def whole_number(uniforms: Tensor, count: Tensor | int) -> Tensor:
    """Map [0, 1) to 0 .. count - 1, evenly."""
    # torch.rand's largest, 1 - 2**-24, never rounds up to count in this product
    return (uniforms * count).long()
