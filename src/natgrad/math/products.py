"""Sums of symmetric products, a bounded number of rows at a time."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from natgrad.math.packing import mirror_

# Patches, spectra and copies are made for a few examples at a time. 4 MiB stay in a
# last-level cache and are enough for a product to run at full speed.
BLOCK_BYTES = 4 * 2**20
# Elsewhere no cache is aimed at: only the memory that is taken at once is bounded.
DEVICE_BYTES = 256 * 2**20

# Rows of a symmetric product made in one go, from the diagonal to the right.
PANEL = 192
# The same of products that need no sum, from so many rows on: in a smaller one what is
# saved is lost to the number of operations.
SYMMETRIC_PANEL = 128
SYMMETRIC_FROM = 384


def add_product(total: Tensor, rows: Tensor) -> None:
    """Add rows rows^T to ``total`` (g, n, n); of large ones, the upper part only.

    Off the CPU all of it, in one product: panels were tuned on CPUs.
    """
    size = total.shape[-1]
    if total.shape[0] > 1 or size <= PANEL or not on_cpu(total):
        total.baddbmm_(rows, rows.mT)
        return
    for start in range(0, size, PANEL):
        panel = slice(start, start + PANEL)
        total[0, panel, start:].addmm_(rows[0, panel], rows[0, start:].T)


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
    size = left.shape[-2]
    if size < SYMMETRIC_FROM or not on_cpu(left):
        if plus is None:
            return torch.bmm(left, right, out=out)
        return torch.baddbmm(plus, left, right, beta=beta, alpha=alpha, out=out)
    out = left.new_empty(len(left), size, size) if out is None else out
    plus = out if plus is None else plus
    for start in range(0, size, SYMMETRIC_PANEL):
        rows = slice(start, start + SYMMETRIC_PANEL)
        upper = out[:, rows, start:]
        pair = left[:, rows], right[:, :, start:]
        torch.baddbmm(plus[:, rows, start:], *pair, beta=beta, alpha=alpha, out=upper)
        out[:, rows.stop :, rows] = upper[:, :, SYMMETRIC_PANEL:].mT
    return out


def triangular_product(x: Tensor, root: Tensor, *, transposed: bool) -> Tensor:
    """``x W`` or ``x W^T`` of ``(s, m, n)``; W ``(s, n, n)`` is upper triangular.

    Of large ones on a CPU the half of W that is zero is left out, but for panels.
    """
    size = root.shape[-1]
    if size < SYMMETRIC_FROM or not on_cpu(x):
        return torch.bmm(x, root.mT if transposed else root)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    for start in range(0, size, SYMMETRIC_PANEL):
        stop = min(start + SYMMETRIC_PANEL, size)
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


def on_cpu(x: Tensor) -> bool:
    """Whether constants that were tuned on CPUs may decide."""
    return x.device.type == "cpu"


def block_bytes(x: Tensor) -> int:
    """Bytes of patches, spectra or copies made at once on the device of ``x``."""
    return BLOCK_BYTES if on_cpu(x) else DEVICE_BYTES


def channels_first(block: Tensor) -> Tensor:
    """(N, C, *spatial) as (C, N * pixels); a view if channels lie last in memory."""
    last = block.movedim(1, -1)
    if last.is_contiguous():
        return last.flatten(0, -2).T
    return block.transpose(0, 1).reshape(block.shape[1], -1)


def blocks(x: Tensor, growth: float = 1.0) -> Iterator[Tensor]:
    """Runs of examples, widened; ``growth`` times their size is what gets bounded."""
    size = growth * sum_dtype(x).itemsize * math.prod(x.shape[1:])
    for block in torch.split(x, max(1, int(block_bytes(x) / size))):
        yield block.to(sum_dtype(x))


def sum_dtype(x: Tensor) -> torch.dtype:
    """The type in which products of ``x`` are summed: float32, or float64 for that."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
