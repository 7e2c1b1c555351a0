"""Factors of which only diagonal blocks are kept: stacks of their parts.

A whole factor is ``(s, n, n)``. Cut into k parts of b rows it is ``(s k, b, b)``, the
parts of one matrix after another, and the last part of each has ``k b - n`` rows of
padding, which are zero. See Note [Parts of a large factor] in `natgrad.plan.spec`.
Everything here takes whole factors too: they have one part. A factor on the right may
have fewer matrices than there are directions: each is that of several, in order.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def cut(rows: int, largest: int | None, unit: int = 1) -> tuple[int, int]:
    """How many parts a factor of so many rows is cut into, and the rows of each.

    They are as few and as equal as parts of at most ``largest`` rows can be. Rows stay
    together by the ``unit``, also if that is more than ``largest``.
    """
    if largest is None or rows <= largest:
        return 1, rows
    units = -(-rows // unit)
    parts = -(-units // max(1, largest // unit))
    each = -(-units // parts)
    return -(-units // each), each * unit


def stacked(parts: Sequence[Tensor], size: int) -> Tensor:
    """Square matrices ``(1, b, b)`` with b at most ``size`` as one padded stack."""
    whole = parts[0].new_zeros(len(parts), size, size)
    for target, part in zip(whole, parts, strict=True):
        rows = part.shape[-1]
        target[:rows, :rows] = part[0]
    return whole


def diagonal_parts(whole: Tensor, parts: int, size: int) -> Tensor:
    """The parts of whole factors ``(s, n, n)``."""
    if parts == 1:
        return whole
    starts = range(0, whole.shape[-1], size)
    cuts = [slice(first, first + size) for first in starts]
    return stacked([x[None, at, at] for x in whole for at in cuts], size)


def on_right(x: Tensor, factor: Tensor) -> Tensor:
    """``V R`` for V ``(..., s, m, n)`` and a whole R, or the parts of one."""
    stack, rows, columns = x.shape[-3:]
    size = factor.shape[-1]
    parts = -(-columns // size)
    shared = stack * parts // len(factor)
    if shared > 1:  # their rows are rows of one direction
        tall = x.reshape(*x.shape[:-3], stack // shared, shared * rows, columns)
        return on_right(tall, factor).reshape(x.shape)
    if parts == 1:
        return _product(x, factor)
    cut = _lengthened(x, parts * size).unflatten(-1, (parts, size))
    product = cut.transpose(-3, -2) @ factor.unflatten(0, (-1, parts))
    return product.transpose(-3, -2).flatten(-2)[..., :columns]


def on_left(factor: Tensor, x: Tensor) -> Tensor:
    """``L V`` for V ``(..., s, m, n)`` and a whole L, or the parts of one."""
    parts, size = len(factor) // x.shape[-3], factor.shape[-1]
    if parts <= 1:
        return _product(factor, x)
    rows = x.shape[-2]
    cut = _lengthened(x.mT, parts * size).mT.unflatten(-2, (parts, size))
    return (factor.unflatten(0, (-1, parts)) @ cut).flatten(-3, -2)[..., :rows, :]


def kronecker_values(right: Tensor, left: Tensor, like: Tensor) -> Tensor:
    """``(s, m, n)``, as ``like``: products of the eigenvalues of both sides."""
    stack, rows, columns = like.shape
    left = left.reshape(stack, -1, 1)[:, :rows]
    return left * values_on_right(right, stack, columns)


def values_on_right(values: Tensor, stack: int, columns: int) -> Tensor:
    """``(s, 1, n)``: eigenvalues of factors on the right, or of their parts."""
    parts = -(-columns // values.shape[-1])
    whole = values.reshape(len(values) // parts, 1, -1)[..., :columns]
    shared = stack // len(whole)
    return whole if shared == 1 else whole.repeat_interleave(shared, 0)


def without_padding(x: Tensor, parts: int, padding: int) -> list[Tensor]:
    """Padded parts as all but the last of each matrix, and those cut to their rows.

    ``(s k, b, b)``, or ``(s k, b)`` of values; without padding only itself.
    """
    if not padding:
        return [x]
    each = x.unflatten(0, (-1, parts))
    size = x.shape[-1] - padding
    kept = (slice(None), -1) + (slice(size),) * (x.dim() - 1)
    return [each[:, :-1].flatten(0, 1), each[kept]]


def with_padding(pieces: Sequence[Tensor], parts: int) -> Tensor:
    """What `without_padding` took apart, with zeros for the padding."""
    if len(pieces) == 1:
        return pieces[0]
    whole, last = pieces
    padding = whole.shape[-1] - last.shape[-1]
    last = F.pad(last, (0, padding) * (last.dim() - 1))
    whole = whole.unflatten(0, (-1, parts - 1))
    return torch.cat((whole, last.unsqueeze(1)), 1).flatten(0, 1)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """``left @ right``; of two stacks by one operation instead of six."""
    stacks = left.dim() == right.dim() == 3 and len(left) == len(right)
    return torch.bmm(left, right) if stacks else left @ right


def _lengthened(x: Tensor, length: int) -> Tensor:
    """With zeros at the end of the last dim; itself if it is as long already."""
    missing = length - x.shape[-1]
    return F.pad(x, (0, missing)) if missing else x
