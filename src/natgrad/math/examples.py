"""Each example's own gradient of a layer, and its second moment in a basis.

This is what EKFAC (George et al. 2018) scales by: the exact diagonal of the Fisher in
the eigenbases of A and G. Bases are as in `rules.py`; a result is a sum over examples
``(s, m * n)``, the diagonal of a stack of matrices of size m * n.

Letters: e examples, t positions, s groups, m outputs, n inputs (the bias last).
"""

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from natgrad.math.conv.geometry import ConvGeometry, pad
from natgrad.math.conv.moments import windows
from natgrad.math.parts import on_right
from natgrad.math.products import sum_dtype
from natgrad.math.rules import into_basis
from natgrad.math.tuning import tuning_of


def squares_in_basis(
    gradients: Iterable[Tensor], right: Tensor, left: Tensor
) -> Tensor:
    """Sum of squares of ``Q_left^T V Q_right`` over examples' V ``(e, s, m, n)``."""
    parts = [into_basis(v, right, left).square_().sum(0) for v in gradients]
    return torch.stack(parts).sum(0).flatten(1)


def rank_one_squares(
    rows: Iterable[tuple[Tensor, Tensor]], right: Tensor, left: Tensor
) -> Tensor:
    """The same where each position is an example, V = g x^T: two small products.

    ``rows`` are x ``(e, s, t, n)`` and g ``(e, s, t, m)``, in parts.
    """
    parts: list[Tensor] = []
    for x, g in rows:
        x = on_right(x, right) if right.numel() else x
        g = on_right(g, left) if left.numel() else g
        parts.append((g.square().mT @ x.square()).sum(0))
    return torch.stack(parts).sum(0).flatten(1)


def linear_gradients(x: Tensor, g: Tensor) -> Iterator[Tensor]:
    """Of inputs ``(e, t, n)`` and output gradients ``(e, t, m)``: ``(e, 1, m, n)``."""
    size = x.shape[-1] * g.shape[-1]
    for xs, gs in zip(_split(x, size), _split(g, size), strict=True):
        yield (gs.mT @ xs).unsqueeze(1)


def conv_gradients(x: Tensor, g: Tensor, geometry: ConvGeometry) -> Iterator[Tensor]:
    """Of images ``(e, C, ...)`` and output gradients: ``(e, s, m, n)``."""
    for patches, outputs in conv_rows(x, g, geometry):
        yield outputs.mT @ patches


def conv_rows(
    x: Tensor, g: Tensor, geometry: ConvGeometry
) -> Iterator[tuple[Tensor, Tensor]]:
    """Patches ``(e, s, t, n)`` and output gradients ``(e, s, t, m)``, in parts."""
    groups = geometry.groups
    inputs = x.shape[1] // groups * geometry.taps
    size = max(x.shape[1] * geometry.taps * math.prod(g.shape[2:]), g[0].numel())
    mode = geometry.padding_mode.replace("zeros", "constant")
    for xs, gs in zip(_split(x, size), _split(g, size), strict=True):
        padded = pad(xs, geometry.padding, mode)
        patches = windows(padded, geometry).reshape(len(xs), groups, inputs, -1)
        outputs = gs.reshape(len(gs), groups, g.shape[1] // groups, -1)
        if geometry.bias:
            patches = torch.cat((patches, torch.ones_like(patches[:, :, :1])), 2)
        yield patches.mT, outputs.mT


def table_squares(indices: Tensor, g: Tensor, vocabulary: int, left: Tensor) -> Tensor:
    """Of an embedding: indices ``(e, t)``, gradients ``(e, t, m)``; A is diagonal.

    An index that an example reads twice gets the square of the sum.
    """
    g = on_right(g.unsqueeze(1), left).squeeze(1) if left.numel() else g
    example = torch.arange(len(indices), device=g.device).unsqueeze(1)
    keys, inverse = torch.unique(example * vocabulary + indices, return_inverse=True)
    sums = g.new_zeros(len(keys), g.shape[-1])
    sums.index_add_(0, inverse.flatten(), g.flatten(0, 1))
    table = g.new_zeros(vocabulary, g.shape[-1])
    table.index_add_(0, keys % vocabulary, sums.square())
    return table.mT.reshape(1, -1)


def _split(x: Tensor, size: int) -> Iterator[Tensor]:
    """Runs of examples, widened, of which ``size`` numbers each stay in a cache."""
    dtype = sum_dtype(x)
    count = max(1, tuning_of(x).block_bytes // (size * dtype.itemsize))
    for part in torch.split(x, count):
        yield part.to(dtype)
