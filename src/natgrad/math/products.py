"""Sums of symmetric products, a bounded number of rows at a time."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from natgrad.math.packing import mirror_
from natgrad.math.precision import HALF
from natgrad.math.tuning import Tuning, tuning_of


def add_product(total: Tensor, rows: Tensor, tuning: Tuning | None = None) -> None:
    """Add rows rows^T to ``total`` (g, n, n); of large ones, the upper part only."""
    if rows.dtype != total.dtype:
        total.add_(outer(rows))
        return
    size, step = total.shape[-1], (tuning or tuning_of(total)).panel
    if total.shape[0] > 1 or not 0 < step < size:
        total.baddbmm_(rows, rows.mT)
        return
    for start in range(0, size, step):
        panel = slice(start, start + step)
        total[0, panel, start:].addmm_(rows[0, panel], rows[0, start:].T)


def as_operand(x: Tensor) -> Tensor:
    """What is multiplied: half precision as it is on CUDA, and else widened.

    See Note [Half-precision products] in `natgrad.math.precision`.
    """
    return x if x.is_cuda and x.dtype in HALF else x.to(sum_dtype(x))


def outer(rows: Tensor) -> Tensor:
    """rows rows^T of operands (g, n, b), summed in float32 or better."""
    if rows.dtype in HALF:
        return torch.bmm(rows, rows.mT, out_dtype=torch.float32)
    return rows @ rows.mT


def symmetric_product(
    left: Tensor,
    right: Tensor,
    plus: Tensor | None = None,
    *,
    beta: float = 0.0,
    alpha: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """``beta plus + alpha left right`` (s, n, n), which is known to be symmetric.

    Without ``plus``, ``left right``.

    Of large ones on a CPU only the upper part is made, and the lower one copied.
    """
    size, tuning = left.shape[-2], tuning_of(left)
    step = tuning.symmetric_panel
    if not step or size < tuning.symmetric_from:
        if plus is None:
            return torch.bmm(left, right, out=out)
        return torch.baddbmm(plus, left, right, beta=beta, alpha=alpha, out=out)
    out = left.new_empty(len(left), size, size) if out is None else out
    plus = out if plus is None else plus
    for start in range(0, size, step):
        rows = slice(start, start + step)
        upper = out[:, rows, start:]
        pair = left[:, rows], right[:, :, start:]
        torch.baddbmm(plus[:, rows, start:], *pair, beta=beta, alpha=alpha, out=upper)
        out[:, rows.stop :, rows] = upper[:, :, step:].mT
    return out


def triangular_product(x: Tensor, root: Tensor, *, transposed: bool) -> Tensor:
    """``x W`` or ``x W^T`` of ``(s, m, n)``; W ``(s, n, n)`` is upper triangular.

    Of large ones on a CPU the half of W that is zero is left out, but for panels.
    """
    size, tuning = root.shape[-1], tuning_of(x)
    step = tuning.symmetric_panel
    # a quarter of a square product of that many rows: nothing is copied to mirror it
    if not step or 4 * x.shape[-2] * size**2 < tuning.symmetric_from**3:
        return torch.bmm(x, root.mT if transposed else root)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    for start in range(0, size, step):
        stop = min(start + step, size)
        rows, columns = slice(0, stop), slice(start, stop)
        if transposed:
            rows = slice(start, size)
            panel = root[:, columns, rows].mT
        else:
            panel = root[:, rows, columns]
        torch.bmm(x[:, :, rows], panel, out=out[:, :, columns])
    return out


def completed(total: Tensor) -> Tensor:
    """What ``add_product`` made, with its lower part."""
    return mirror_(total) if total.shape[0] == 1 < total.shape[-1] else total


def channels_first(block: Tensor) -> Tensor:
    """(N, C, *spatial) as (C, N * pixels); a view if channels lie last in memory."""
    last = block.movedim(1, -1)
    if last.is_contiguous():
        return last.flatten(0, -2).T
    return block.transpose(0, 1).reshape(block.shape[1], -1)


def blocks(x: Tensor, growth: float = 1.0) -> Iterator[Tensor]:
    """Runs of examples, to be multiplied; ``growth`` times their size is bounded."""
    size = growth * sum_dtype(x).itemsize * math.prod(x.shape[1:])
    for block in torch.split(x, max(1, int(tuning_of(x).block_bytes / size))):
        yield as_operand(block)


def sum_dtype(x: Tensor) -> torch.dtype:
    """The type in which products of ``x`` are summed: float32, or float64 for that."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
