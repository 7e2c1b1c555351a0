"""How much more curvature there is along an update than its inverses knew.

Letters: an update U is ``(s, m, n)``; a factor X of its right side is ``(s, n, n)``, of
its left side ``(s, m, m)``, or diagonal ``(s, n)``. The left side is treated as the
right one of the transposed update.
"""

import torch
from torch import Tensor

from natgrad.math.packing import unpack_upper
from natgrad.math.parts import on_right, values_on_right
from natgrad.math.rules import between

# The rows of an update that are looked at: the longest ones have most of its curvature.
LOOKED_AT = 32


def longest(update: Tensor) -> Tensor:
    """Indices ``(s, k)`` of the longest rows of ``(s, m, n)``."""
    count = min(LOOKED_AT, update.shape[1])
    # a norm along a dim that is not the last in memory is ten times slower on a CPU
    return update.square().sum(2).topk(count, dim=1).indices


def rows_at(x: Tensor, index: Tensor | None) -> Tensor:
    """The rows ``(s, k, n)`` of ``(s, m, n)``; None: all of them."""
    if index is None:
        return x
    return x.gather(1, index.unsqueeze(2).expand(-1, -1, x.shape[2]))


def units(index: Tensor, like: Tensor) -> Tensor:
    """``(s, k, m)``: the unit vectors that choose these rows of ``(s, m, n)``."""
    zeros = like.new_zeros(*index.shape, like.shape[1])
    return zeros.scatter_(2, index.unsqueeze(2), 1.0)


def rows_times(index: Tensor | None, left: Tensor | None, x: Tensor) -> Tensor:
    """Rows of ``L V``, for V ``(s, m, n)``; a left of None: of V."""
    if left is None:
        return rows_at(x, index)
    if index is None:
        return between(x, None, left)
    if left.dim() == 3 and left.shape[:2] == x.shape[:2]:
        return torch.bmm(rows_at(left, index), x)
    return between(units(index, x), left, None) @ x


# Of each of a stack; the damping is ``(s, 1, 1)``, or one for all.


def along(rows: Tensor, factor: Tensor, damping: Tensor | float) -> Tensor:
    """``tr(U (X + damping I) U^T)``: the curvature of a factor along rows."""
    return ((between(rows, factor, None) + damping * rows) * rows).sum((1, 2))


def along_packed(rows: Tensor, flat: Tensor, damping: Tensor | float) -> Tensor:
    """As `along`, of upper triangles ``(s, n (n + 1) / 2)``, which are not mirrored."""
    upper = unpack_upper(flat, rows.shape[-1])
    upper.diagonal(dim1=1, dim2=2).unsqueeze(2).add_(damping).mul_(0.5)
    return torch.bmm(rows, upper).mul_(rows).sum((1, 2)).mul_(2)


def along_eigen(
    rows: Tensor, vectors: Tensor, values: Tensor, damping: Tensor | float
) -> Tensor:
    """As `along`, of a factor ``Q diag(v) Q^T``; empty Q: of diag(v)."""
    rotated = on_right(rows, vectors) if vectors.numel() else rows
    values = values_on_right(values, len(rows), rows.shape[2]) + damping
    return (rotated.square() * values).sum((1, 2))


def log_growth(now: Tensor, then: Tensor) -> Tensor:
    """``log(now / then)``, at least 0; 0 if it makes no sense."""
    grown = (now / then).log()
    return torch.where((then > 0) & grown.isfinite(), grown, 0.0).clamp_min(0.0)
