"""Second moments of layer inputs and output gradients, as sums.

Every function returns a *sum* over examples and positions, in float32 or better; the
caller divides the small result by a count. Convolutions are in `convolution.py`.

Letters: b rows (examples x positions), n inputs, m outputs, c channels, e examples.
"""

import random
from types import EllipsisType

import torch
from torch import Tensor

from natgrad.math.parts import stacked
from natgrad.math.precision import HALF
from natgrad.math.products import (
    add_product,
    as_operand,
    completed,
    outer,
    sum_dtype,
    symmetric_product,
)

Rows = slice | EllipsisType
# Vectors of one example are similar: so many examples at least, whatever they give.
FEWEST_EXAMPLES = 64
# An estimate of n x n has the rank of its vectors; running averages join several.
VECTORS_A_ROW = 2


def widen(x: Tensor) -> Tensor:
    """``x`` in float32 if it is in a narrower floating type, else as it is."""
    wide = sum_dtype(x)
    return x if x.dtype == wide else x.to(wide)


def gram(rows: Tensor, size: int | None = None) -> Tensor:
    """Sum of outer products of the rows of ``(b, n)``: ``(1, n, n)``.

    With a ``size`` below n its diagonal blocks of that size alone, as `stacked`.
    """
    rows = as_operand(rows)
    if size is not None and size < rows.shape[1]:
        return stacked([gram(part) for part in rows.split(size, 1)], size)
    total = rows.new_zeros(1, rows.shape[1], rows.shape[1], dtype=sum_dtype(rows))
    add_product(total, rows.T.unsqueeze(0))
    return completed(total)


def own_moment(
    gradient: Tensor, side: str, *, parts: int = 1, size: int = 0, diagonal: bool
) -> Tensor:
    """``G^T G`` (``side="right"``) or ``G G^T`` (``"left"``) of a stack ``(s, m, n)``.

    The factors of the weight's own gradient, as Shampoo has them; or their diagonal; or
    their diagonal blocks, ``parts`` of ``size`` rows.
    """
    gradient = widen(gradient) if diagonal else as_operand(gradient)
    rows = gradient.mT if side == "right" else gradient
    if diagonal:
        return rows.square().sum(-1)
    if parts > 1:
        missing = parts * size - rows.shape[1]
        padded = torch.nn.functional.pad(rows, (0, 0, 0, missing))
        rows = padded.unflatten(1, (parts, size)).flatten(0, 1)
    return outer(rows) if rows.dtype in HALF else symmetric_product(rows, rows.mT)


def append_ones(moment: Tensor, sums: Tensor, count: int) -> Tensor:
    """Border a sum of a a^T ``(s, n, n)`` as if each a ended with a 1.

    ``sums`` ``(s, n)`` is the sum of the a, ``count`` how many they are.
    """
    stack, size, _ = moment.shape
    bordered = moment.new_empty(stack, size + 1, size + 1)
    bordered[:, :size, :size] = moment
    bordered[:, :size, size] = sums
    bordered[:, size, :size] = sums
    bordered[:, size, size] = count
    return bordered


def input_moment(rows: Tensor, *, bias: bool, size: int | None = None) -> Tensor:
    """Sum of a a^T over rows ``(b, n)``; with ``bias`` a has a last entry of 1.

    With a ``size`` below that of a, its diagonal blocks alone, as `gram`.
    """
    rows, inputs = as_operand(rows), rows.shape[1]
    if not bias:
        return gram(rows, size)
    if size is not None and size < inputs + 1:
        *whole, last = range(0, inputs + 1, size)
        parts = [gram(rows[:, first : first + size]) for first in whole]
        return stacked([*parts, input_moment(rows[:, last:], bias=True)], size)
    sums = rows.sum(0, keepdim=True, dtype=sum_dtype(rows))
    return append_ones(gram(rows), sums, rows.shape[0])


def index_counts(indices: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """How often each of ``size`` indices occurs: the diagonal A of one-hot inputs."""
    counts = torch.bincount(indices.flatten(), minlength=size)
    return counts.to(dtype).unsqueeze(0)


def unit_moment(grads: Tensor) -> Tensor:
    """Per-example gradients ``(e, c, p)`` -> sum of outer products ``(c, p, p)``.

    p is 2 for (gamma, beta) and 1 for gamma alone (SP-NGD, eq. 15-16).
    """
    return torch.einsum("ecp,ecq->cpq", grads, grads)


def diagonal_moment(grads: Tensor) -> Tensor:
    """Per-example gradients ``(e, c, p)`` -> sum of squares ``(1, c * p)``."""
    return grads.square().sum(0).reshape(1, -1)


def full_moment(grads: Tensor) -> Tensor:
    """Per-example gradients ``(e, c, p)`` -> ``(1, c * p, c * p)``."""
    return gram(grads.flatten(1))


def enough_examples(size: int, vectors: int) -> int:
    """How many examples, of so many vectors each, a factor ``(size, size)`` needs.

    At least 64, and so many that there are two vectors for each of its rows.
    """
    return max(FEWEST_EXAMPLES, -(-VECTORS_A_ROW * size // vectors))


def enough_stride(size: int, examples: int, vectors: int) -> int:
    """The largest k for which every k-th of the examples is enough for a factor.

    ``vectors`` is what each example gives to it: A's rows, or G's.
    """
    return max(1, examples // enough_examples(size, vectors))


def every_kth(examples: int, stride: int, seed: str) -> tuple[Rows, float]:
    """Every k-th example from a random start, and how many each of them stands for."""
    stride = min(stride, examples)
    if stride <= 1:
        return ..., 1.0
    start = random.Random(seed).randrange(stride)
    rows = slice(start, None, stride)
    return rows, examples / len(range(start, examples, stride))
