"""Upper triangles of symmetric matrices as one flat vector.

A stack of symmetric matrices (s, n, n) travels as its s upper triangles, row by row:
s * n * (n + 1) / 2 elements instead of s * n * n.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

Packing = Literal["upper", "symmetric"]
"""What packed triangles are of: upper triangular or symmetric matrices."""

# Up to this size index tensors are kept (4.1 MB at most a size). Above it they would
# weigh more than the matrices (85 MB for n = 4608), so rows are copied as views.
SMALL = 640


def pack(x: Tensor, out: Tensor | None = None) -> Tensor:
    """Upper triangles of ``x`` (s, n, n), row by row, as one vector.

    Only the upper triangle is read. ``out`` (s * n * (n + 1) / 2,) is filled and
    returned if given.
    """
    if x.dim() != 3 or x.shape[1] != x.shape[2]:
        raise ValueError(f"Invalid x.shape={tuple(x.shape)}. Must be (s, n, n).")
    stack, size = x.shape[:2]
    flat = _destination(out, (stack * packed_size(size),), x)
    source, target = x.reshape(stack, -1), flat.view(stack, -1)
    if size <= SMALL:
        torch.index_select(source, 1, _upper_index(size, x.device), out=target)
    else:
        pieces = [length for i in range(size) for length in (i, size - i)]
        torch.cat(torch.split(source, pieces, dim=1)[1::2], dim=1, out=target)
    return flat


def unpack(flat: Tensor, stack: int, size: int, out: Tensor | None = None) -> Tensor:
    """The symmetric matrices (stack, size, size) that ``pack`` flattened.

    ``out`` (stack, size, size) is filled and returned if given.
    """
    expected = (stack * packed_size(size),)
    if flat.shape != expected:
        raise ValueError(
            f"Invalid flat.shape={tuple(flat.shape)}. Must be {expected} for "
            f"stack={stack}, size={size}."
        )
    if size <= SMALL:
        index, rows = _square_index(size, flat.device), flat.reshape(stack, -1)
        if out is None:
            return torch.index_select(rows, 1, index).view(stack, size, size)
        x = _destination(out, (stack, size, size), flat)
        torch.index_select(rows, 1, index, out=x.view(stack, -1))
        return x
    x = _destination(out, (stack, size, size), flat)
    return mirror_(x.masked_scatter_(_upper_mask(size, flat.device), flat))


def pack_upper(x: Tensor) -> Tensor:
    """Upper triangles ``(s, n, n)`` as rows ``(s, n (n + 1) / 2 + 1)``, to be kept.

    Each row ends with a zero, which `unpack_upper` reads for all below the diagonal.
    """
    return with_zero(pack(x).view(len(x), -1))


def with_zero(rows: Tensor) -> Tensor:
    """Packed triangles ``(s, n (n + 1) / 2)`` as `pack_upper` has them."""
    return torch.cat((rows, rows.new_zeros(len(rows), 1)), dim=1)


def unpack_upper(rows: Tensor, size: int) -> Tensor:
    """The upper triangular matrices ``(s, n, n)`` of packed rows.

    They are ``(s, n (n + 1) / 2)``, or longer by the zero that `pack_upper` adds.
    """
    count = packed_size(size)
    if size <= SMALL and rows.shape[1] > count:
        index = _triangle_index(size, rows.device)
        return torch.index_select(rows, 1, index).view(-1, size, size)
    x, flat = rows.new_zeros(len(rows), size, size), rows[:, :count]
    if size > SMALL:
        return x.masked_scatter_(_upper_mask(size, rows.device), flat)
    index = _upper_index(size, rows.device).long()
    for matrix, upper in zip(x.view(len(rows), -1), flat, strict=True):
        matrix.scatter_(0, index, upper)  # of one dim twice as fast as of two
    return x


def packed_size(size: int) -> int:
    """Elements in the upper triangle of a matrix of ``size`` rows."""
    return size * (size + 1) // 2


def mirror_(x: Tensor, block: int = 128) -> Tensor:
    """Copy the upper triangles of ``x`` (s, n, n) onto the lower ones, in place."""
    size = x.shape[-1]
    for start in range(0, size, block):
        end = min(start + block, size)
        corner = x[:, start:end, start:end]
        corner.copy_(corner.triu() + corner.triu(1).mT)
        x[:, end:, start:end] = x[:, start:end, end:].mT
    return x


def _destination(out: Tensor | None, shape: tuple[int, ...], like: Tensor) -> Tensor:
    if out is None:
        return like.new_empty(shape)
    if out.dtype != like.dtype:
        raise ValueError(f"Invalid out.dtype={out.dtype}. Must be {like.dtype}.")
    if out.shape != shape or not out.is_contiguous():
        raise ValueError(
            f"Invalid out.shape={tuple(out.shape)}, stride={out.stride()}. "
            f"Must be {shape}, contiguous."
        )
    return out


def _upper_mask(size: int, device: torch.device) -> Tensor:
    return torch.ones(size, size, dtype=torch.bool, device=device).triu_()


@lru_cache(maxsize=256)
def _upper_index(size: int, device: torch.device) -> Tensor:
    row, col = torch.triu_indices(size, size, device=device)
    return (row * size + col).int()


@lru_cache(maxsize=256)
def _square_index(size: int, device: torch.device) -> Tensor:
    row = torch.arange(size, device=device)[:, None]
    low, high = torch.minimum(row, row.T), torch.maximum(row, row.T)
    return (low * size - low * (low - 1) // 2 + high - low).flatten().int()


@lru_cache(maxsize=256)
def _triangle_index(size: int, device: torch.device) -> Tensor:
    below = torch.ones(size, size, dtype=torch.bool, device=device).tril_(-1)
    return _square_index(size, device).masked_fill(below.flatten(), packed_size(size))


def flatten(x: Tensor) -> Tensor:
    """A statistic ``(s, n, n)`` packed, a diagonal ``(s, n)`` as it is, in one dim."""
    return x.flatten() if x.dim() == 2 else pack(x)


def unflatten(flat: Tensor, stack: int, size: int, diagonal: bool) -> Tensor:
    """The inverse of `flatten`."""
    return flat.reshape(stack, size) if diagonal else unpack(flat, stack, size)


def trace(x: Tensor) -> Tensor:
    """The sum of the diagonals of ``(s, n, n)``, or of a diagonal ``(s, n)``."""
    return x.sum() if x.dim() == 2 else x.diagonal(dim1=-2, dim2=-1).sum()


def traces(x: Tensor, count: int) -> Sequence[Tensor]:
    """`trace` of each of so many equal parts of a stack."""
    diagonals = x if x.dim() == 2 else x.diagonal(dim1=-2, dim2=-1)
    return diagonals.reshape(count, -1).sum(1).unbind()
