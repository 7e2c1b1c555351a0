"""How statistics scale a gradient, besides the inverse of their Kronecker product.

Letters: a block's gradient V is ``(s, m, n)``. A basis is the orthogonal matrix Q of
eigenvectors of a factor, ``(s, n, n)`` on the right or ``(s, m, m)`` on the left; an
empty tensor stands for the identity. ``W`` is any root of a damped inverse:
``W W^T = (X + damping I)^-1``. Of a factor that was cut, bases and roots are stacks of
its parts: see `parts.py`.
"""

import math

import torch
from torch import Tensor

from natgrad.math.parts import on_left, on_right
from natgrad.math.products import triangular_product

# A weight counts as if its rows had at least this norm in the root mean square, so that
# one that is zero moves.
LEAST_ROW = 0.1
# Of a row that is zero, so that neither its square nor a factor is zero.
LEAST_NORM = 1e-15
# A direction counts as small below this part of what noise alone would leave in it.
QUIET = 0.5


def into_basis(gradient: Tensor, right: Tensor, left: Tensor) -> Tensor:
    """``Q_left^T V Q_right``."""
    if right.numel():
        gradient = on_right(gradient, right)
    return on_left(left.mT, gradient) if left.numel() else gradient


def out_of_basis(rotated: Tensor, right: Tensor, left: Tensor) -> Tensor:
    """``Q_left V Q_right^T``: undoes `into_basis`."""
    if right.numel():
        rotated = on_right(rotated, right.mT)
    return on_left(left, rotated) if left.numel() else rotated


def mean_of_entries(x: Tensor) -> Tensor:
    """``(s, 1, 1)`` of a stack ``(s, m, n)``."""
    return x.mean((1, 2), keepdim=True)


def mean_of_squares(
    square: Tensor, x: Tensor, beta2: float, steps: int | Tensor
) -> Tensor:
    """Add the squares of x to a running average of so many; returns it without bias.

    ``square`` is written to; ``steps`` count x.
    """
    square.mul_(beta2).addcmul_(x, x, value=1 - beta2)
    return square / (1 - beta2**steps)


def adaptive_scale(
    rotated: Tensor, square: Tensor, damping: float, mean: Tensor | None = None
) -> Tensor:
    """``V / (sqrt(S) + damping rms)``, elementwise; rms is the root of the mean of S.

    S is the second moment of the gradient in the same basis, without bias. Entries
    that never had a gradient stay as they are, zero. The root counts as at least that
    of the smallest normal number: squares below it are rounded to nothing.
    """
    floor = damping * (mean_of_entries(square) if mean is None else mean).sqrt()
    least = torch.finfo(square.dtype).tiny ** 0.5
    root = square.sqrt().add_(floor).clamp_min_(least)
    return torch.div(rotated, root, out=root)


def row_norms(x: Tensor) -> Tensor:
    """``(s, m, 1)`` of a stack ``(s, m, n)``, with no zeros, whose squares are none."""
    return torch.linalg.vector_norm(x, dim=2, keepdim=True).clamp_min_(LEAST_NORM)


def evening(rows: Tensor, square: Tensor) -> Tensor:
    """Factors of rows: one over the root of S, at the norm that the matrix had.

    ``rows`` are the norms of the rows of a stack of matrices and S their second moment,
    both ``(s, m, 1)`` and above zero.
    """
    factors = square.rsqrt()
    even = torch.linalg.vector_norm(rows * factors, dim=1, keepdim=True)
    norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    return factors.mul_(norms.div_(even))


def corrected_scale(
    rotated: Tensor, curvature: Tensor, damping: float | Tensor
) -> Tensor:
    """``V / (S + damping)``, elementwise (EKFAC, George et al. 2018, eq. 10).

    With no damping, directions whose curvature is zero up to rounding are left out, as
    in a pseudo-inverse. A tensor ``(s, 1, 1)`` has a damping for each of the stack.
    """
    damped = curvature + damping
    floor: float | Tensor = 0.0
    if isinstance(damping, Tensor):
        floor = torch.where(damping > 0, 0.0, _rounding(curvature))
    elif not damping:
        floor = _rounding(curvature)
    return torch.where(damped > floor, rotated / damped, 0.0)


def _rounding(curvature: Tensor) -> Tensor:
    """The largest value that may be zero but for rounding, of each of a stack."""
    eps = max(curvature.shape[1:]) * torch.finfo(curvature.dtype).eps
    return eps * curvature.amax((1, 2), keepdim=True)


def moved_moment(
    square: Tensor,
    right: tuple[Tensor, Tensor] | None,
    left: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """A second moment ``(s, m, n)`` when a basis is replaced: (old Q, new Q) a side.

    It is the diagonal of a matrix; this is the diagonal of the same matrix in the new
    basis: with ``R = Q_old^T Q_new`` on both sides, ``(R_left^2)^T S R_right^2``, the
    squares elementwise. None: that side stays as it is.
    """
    if right is not None:
        square = on_right(square, (right[0].mT @ right[1]).square())
    if left is not None:
        square = on_left((left[1].mT @ left[0]).square(), square)
    return square


def between(x: Tensor, right: Tensor | None, left: Tensor | None) -> Tensor:
    """``L V R`` for V ``(s, m, n)``; L, R are stacks, diagonals ``(s, n)``, or None."""
    if right is not None:
        x = x * right.unsqueeze(1) if right.dim() == 2 else on_right(x, right)
    if left is not None:
        x = x * left.unsqueeze(2) if left.dim() == 2 else on_left(left, x)
    return x


def whiten(gradient: Tensor, right: Tensor | None, left: Tensor | None) -> Tensor:
    """``W_left^T V W_right``; upper triangular ``(s, n, n)``, diagonal, or None."""
    x = _by_root(gradient, right)
    return x if left is None else _by_root(x.mT, left).mT


def whiten_back(polar: Tensor, right: Tensor | None, left: Tensor | None) -> Tensor:
    """``W_left P W_right^T``.

    Whatever roots W are taken, for P the polar factor of `whiten` this is the same:
    another root differs by an orthogonal matrix, which the polar factor passes on.
    """
    x = _by_root(polar, right, transposed=True)
    return x if left is None else _by_root(x.mT, left, transposed=True).mT


def trust_ratio(weight_norm: Tensor, update_norm: Tensor, rows: Tensor | int) -> Tensor:
    """``|w| / |u|``: gives an update the norm of its weight (LARS, You et al. 2017).

    ``rows`` is the number of outputs; of several layers at once, all are vectors. A
    weight whose rows have less than `LEAST_ROW` in the root mean square of their norms
    counts as if they had that; an update of zero stays zero.
    """
    norm = weight_norm.clamp_min(LEAST_ROW * rows**0.5)
    return torch.where(update_norm > 0, norm / update_norm, 0.0)


def fading(direction: Tensor, usual: Tensor, noise: float | Tensor) -> Tensor:
    """``min(1, |v| / (noise usual / 2))``: how much of its length a step keeps.

    ``direction`` is the norm of the averaged gradient v, ``usual`` the root mean square
    norm of single gradients, and ``noise`` what of it would be left if they were noise
    and nothing else (`averaged_noise`). So steps have their whole length as long as
    gradients have their usual size, however noisy they are, and shorten with gradients
    that vanish. Norms of several layers at once are vectors.
    """
    small = QUIET * noise * usual
    return torch.where(small > 0, direction / small, 1.0).clamp(max=1.0)


def averaged_noise(momentum: float, nesterov: bool) -> float:
    """The norm of an average of independent gradients, as a part of one gradient's.

    The root of the sum of the squared weights, which add up to 1: the newest gradient
    has ``1 - m``, each older one m times that of the next; with Nesterov's look-ahead
    once more m times those, and ``1 - m`` for the newest.
    """
    m = momentum
    if not nesterov:
        return math.sqrt((1 - m) / (1 + m))
    return (1 - m) * math.sqrt((1 + m) ** 2 + m**4 / (1 - m * m))


def moving_part(weight: Tensor, update: Tensor) -> tuple[Tensor, Tensor]:
    """What an update moves of a table ``(s, m, n)``: its norm, and its share in [0, 1].

    Of a table each step reads some columns. A column counts by its squared step, the
    one that moves furthest as whole, so that a trust ratio with this norm moves no
    column by more than the root mean square of the norms of the columns that move.
    Where all move equally it is the norm of the weight, and the share is 1.
    """
    peak = update.abs().amax()
    steps = (update / torch.where(peak > 0, peak, 1.0)).square().sum(-2)
    furthest = steps.amax()
    counts = steps / torch.where(furthest > 0, furthest, 1.0)
    norm = (weight.square().sum(-2) * counts).sum().sqrt()
    return norm, counts.mean()


def _by_root(x: Tensor, root: Tensor | None, *, transposed: bool = False) -> Tensor:
    """``V W`` or ``V W^T``."""
    if root is not None and root.dim() == 3:
        if len(root) == len(x):
            return triangular_product(x, root, transposed=transposed)
        root = root.mT if transposed else root  # the parts of one
    return between(x, root, None)
