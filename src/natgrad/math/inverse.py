"""Damped inverses of statistics, the pi-split, and what to do when LAPACK fails.

The ladder: as asked, then with more damping (jitter), then in float64, then an
`InverseError`; the caller keeps its last good inverse. The first rung is tried for
all statistics at once and checked with one synchronisation.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

import torch
from torch import Tensor

from natgrad.math.tuning import tuning_of

JITTER = 10.0
# LAPACK on a CPU factors matrices of a multiple of so many rows at a half to a third of
# the speed of others: their columns fall into the same places of its caches.
ALIASED, EXTRA = 128, 8

Inverse = tuple[Tensor, ...]
Result = TypeVar("Result", Tensor, Inverse)


class InverseError(RuntimeError):
    """A statistic could be inverted neither with jitter nor in float64."""


def pi_split(mean_right: float, mean_left: float) -> float:
    """pi of SP-NGD, eq. 12: the root of the ratio of the factors' mean eigenvalues.

    1 when either is zero or not finite (a dead layer): the damping is then shared.
    """
    if not (0.0 < mean_right < math.inf and 0.0 < mean_left < math.inf):
        return 1.0
    return math.sqrt(mean_right) / math.sqrt(mean_left)


def split_damping(damping: float, pi: float) -> tuple[float, float]:
    """``(pi sqrt(lambda), sqrt(lambda) / pi)``: for the right and left factor."""
    root = math.sqrt(damping)
    return pi * root, root / pi


def damped_inverses(
    matrices: Sequence[Tensor], dampings: Sequence[float]
) -> list[Tensor | InverseError]:
    """``(X + damping I)^-1`` of stacks ``(s, n, n)`` or diagonals ``(s, n)``."""
    return _damped(_inverse, matrices, dampings)


def damped_roots(
    matrices: Sequence[Tensor], dampings: Sequence[float]
) -> list[Tensor | InverseError]:
    """Upper triangular W with ``W W^T = (X + damping I)^-1``, by Cholesky.

    Of stacks ``(s, n, n)``; of diagonals ``(s, n)`` the diagonal of W.
    """
    return _damped(_root, matrices, dampings)


def damped_powers(
    matrices: Sequence[Tensor], dampings: Sequence[float], power: float
) -> list[Tensor | InverseError]:
    """``(X + damping I)^-power``, symmetric, by eigendecomposition.

    Of stacks ``(s, n, n)`` or diagonals ``(s, n)``. Eigenvalues that are zero up to
    rounding count as that rounding, so that no damping is a bounded power too.
    """
    bases = eigendecompositions(matrices)
    return [
        x if isinstance(x, InverseError) else _power(x[0], x[1], damping, power)
        for x, damping in zip(bases, dampings, strict=True)
    ]


def _power(vectors: Tensor, values: Tensor, damping: float, power: float) -> Tensor:
    noise = values.shape[-1] * torch.finfo(values.dtype).eps
    floor = noise * values.amax(-1, keepdim=True)
    least = torch.finfo(values.dtype).tiny
    powers = torch.maximum(values + damping, floor).clamp_min(least).pow(-power)
    if vectors.numel() == 0:
        return powers
    return (vectors * powers.unsqueeze(1)) @ vectors.mT


def _damped(
    attempt: Callable[[Tensor, Tensor], Tensor],
    matrices: Sequence[Tensor],
    dampings: Sequence[float],
) -> list[Tensor | InverseError]:
    results = _first_rung(attempt, matrices, dampings)
    fine = [_finite(x) for x in results]
    verdicts = torch.stack(fine).tolist() if fine else []
    return [
        result if ok else _climb(attempt, matrix, damping)
        for result, ok, matrix, damping in zip(
            results, verdicts, matrices, dampings, strict=True
        )
    ]


def eigendecompositions(
    matrices: Sequence[Tensor], earlier: Sequence[Inverse | None] = ()
) -> list[Inverse | InverseError]:
    """``(Q (s, n, n), v (s, n))`` of each X = Q diag(v) Q^T, v >= 0.

    The eigenvectors of a diagonal ``(s, n)`` are unit vectors: Q is then empty. Where
    there is an ``earlier`` one it is brought up to date instead: see `track`.
    """
    olds = earlier or [None] * len(matrices)
    tracked = {i: track(matrices[i], x) for i, x in enumerate(olds) if x is not None}
    checks = [x.isfinite().all() for _, x in tracked.values()]
    good = torch.stack(checks).tolist() if checks else []
    found: dict[int, Inverse | InverseError] = {
        i: x for (i, x), fine in zip(tracked.items(), good, strict=True) if fine
    }
    others = [i for i in range(len(matrices)) if i not in found]
    found |= zip(others, _exact([matrices[i] for i in others]), strict=True)
    return [found[i] for i in range(len(matrices))]


def _exact(matrices: Sequence[Tensor]) -> list[Inverse | InverseError]:
    """Decomposed from the start; the first rung is checked for all at once."""
    first = [_first_eigh(x) for x in matrices]
    checks = [_all_finite(found) for found in first if found]
    fine: Iterator[bool] = iter(torch.stack(checks).tolist() if checks else ())
    results: list[Inverse | InverseError] = []
    for matrix, found in zip(matrices, first, strict=True):
        good = bool(found) and next(fine)
        result = found if good else _climb(_eigh, matrix, 0.0, tried=1)
        if not isinstance(result, InverseError):
            result = result[0], result[1].clamp_min(0.0)
        results.append(result)
    return results


def _all_finite(found: Inverse) -> Tensor:
    return torch.stack([torch.isfinite(x).all() for x in found]).all()


def _first_eigh(matrix: Tensor) -> Inverse:
    """Without jitter; empty if LAPACK gives up."""
    try:
        return _eigh(matrix, None)
    except torch.linalg.LinAlgError:
        return ()


def track(matrix: Tensor, earlier: Inverse) -> Inverse:
    """One step of orthogonal iteration from an earlier eigendecomposition.

    With the columns of the earlier Q by falling eigenvalue (by that of X along them),
    ``Q' R = X Q`` and v' is the diagonal of R without its sign: both converge while X
    is constant. From eigenvectors that are off by e, eigenvalues are off by e^2.
    Every column stays in the place that it had, as do second moments that are kept. Not
    finite if X or Q is not: R is then, up to its diagonal.
    """
    vectors = earlier[0]
    if matrix.dim() == 2:
        return vectors, matrix
    turned = matrix @ vectors
    order = (vectors * turned).sum(1).argsort(dim=-1, descending=True)
    # by Householder's reflections: torch's QR would make the whole of R besides
    reflections, scales = torch.geqrf(_columns(turned, order))
    values = reflections.diagonal(dim1=-2, dim2=-1).abs()
    q = torch.linalg.householder_product(reflections, scales)
    places = order.argsort(dim=-1)
    return _columns(q, places), values.gather(1, places)


def _columns(x: Tensor, order: Tensor) -> Tensor:
    """The columns of a stack ``(s, n, n)`` in their orders ``(s, n)``."""
    # LAPACK has one column after another in memory, where each is copied as a whole
    if len(x) == 1:
        return x.mT.index_select(1, order[0]).mT
    return x.mT.gather(1, order.unsqueeze(2).expand_as(x)).mT


def damped_from_eigen(vectors: Tensor, values: Tensor, damping: float) -> Tensor:
    """The damped inverse that an eigendecomposition stands for."""
    reciprocal = (values + damping).reciprocal()
    if vectors.numel() == 0:
        return reciprocal
    return (vectors * reciprocal.unsqueeze(1)) @ vectors.mT


def _first_rung(
    attempt: Callable[[Tensor, Tensor], Tensor],
    matrices: Sequence[Tensor],
    dampings: Sequence[float],
) -> list[Tensor]:
    results: list[Tensor] = [x.new_empty(0) for x in matrices]
    for members in _batches(matrices):
        several = len(members) > 1
        first = matrices[members[0]]
        joined = torch.cat([matrices[i] for i in members]) if several else first
        shifts = _shifts(
            [dampings[i] for i in members for _ in range(len(matrices[i]))], joined
        )
        inverses = attempt(joined, shifts)
        parts = inverses.split([len(matrices[i]) for i in members])
        for i, part in zip(members, parts, strict=True):
            results[i] = part
    return results


def _shifts(dampings: list[float], like: Tensor) -> Tensor:
    """One damping for each of a stack; infinite, so not inverted, beyond its dtype."""
    wide, device = torch.float64, like.device
    if len(set(dampings)) == 1:  # filled there: a copy to a GPU would wait for it
        shifts = torch.full((len(dampings),), dampings[0], dtype=wide, device=device)
    else:
        shifts = torch.tensor(dampings, dtype=wide, device=device)
    return shifts.to(like.dtype)


def _batches(matrices: Sequence[Tensor]) -> list[list[int]]:
    """Indices of the matrices that are inverted by one call."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for i, x in enumerate(matrices):
        alone = x.shape[-1] > tuning_of(x).batched_up_to
        key = (x.dim(), x.shape[-1], x.dtype, x.device, i if alone else -1)
        groups.setdefault(key, []).append(i)
    return list(groups.values())


def _inverse(matrix: Tensor, damping: Tensor) -> Tensor:
    """One rung: NaN where a matrix is not positive definite, and no synchronisation.

    The NaN is at least on the diagonal, which is all that `_finite` reads.
    ``damping`` has one entry for each member of the stack.
    """
    if matrix.dim() == 2:
        return (matrix + damping.unsqueeze(1)).reciprocal()
    size = matrix.shape[-1]
    damped = matrix.clone()
    damped.diagonal(dim1=-2, dim2=-1).add_(damping.unsqueeze(1))
    if size == 1:
        return torch.where(damped > 0, damped.reciprocal(), torch.nan)
    if size == 2:
        return _two_by_two(damped)
    factor, info = _cholesky(damped)
    bad = (info != 0).unsqueeze(1)
    # cholesky_inverse raises, for the whole batch, on a factor with a zero pivot
    factor.diagonal(dim1=-2, dim2=-1).masked_fill_(bad, 1.0)
    inverse = _from_cholesky(factor, size)
    inverse.diagonal(dim1=-2, dim2=-1).masked_fill_(bad, torch.nan)
    return inverse


def positive_inverse(x: Tensor) -> Tensor:
    """Of a stack ``(s, n, n)`` with eigenvalues of at least 1, up to rounding."""
    return _from_cholesky(_cholesky(x)[0], x.shape[-1])


def _cholesky(x: Tensor) -> tuple[Tensor, Tensor]:
    """The lower factor of a stack ``(s, n, n)``, and torch's ``info`` of it.

    With rows and columns of the identity added to a size that LAPACK is slow at.
    """
    size = x.shape[-1]
    if size % ALIASED == 0 and x.device.type == "cpu":
        wide = x.new_zeros(len(x), size + EXTRA, size + EXTRA)
        wide[:, :size, :size] = x
        wide.diagonal(dim1=-2, dim2=-1)[:, size:] = 1.0
        x = wide
    # LAPACK has columns one after another: of a symmetric matrix, those are its rows
    factor, info = torch.linalg.cholesky_ex(x.mT)
    return factor, info


def _from_cholesky(factor: Tensor, size: int) -> Tensor:
    """The inverse, of so many rows."""
    inverse = torch.cholesky_inverse(factor).mT
    whole = size == inverse.shape[-1]
    return inverse if whole else inverse[:, :size, :size].contiguous()


def _root(matrix: Tensor, damping: Tensor) -> Tensor:
    """One rung of `damped_roots`, as `_inverse` is of the inverses."""
    if matrix.dim() == 2:
        return (matrix + damping.unsqueeze(1)).rsqrt()
    damped = matrix.clone()
    damped.diagonal(dim1=-2, dim2=-1).add_(damping.unsqueeze(1))
    size = matrix.shape[-1]
    factor, info = _cholesky(damped)
    bad = (info != 0).unsqueeze(1)
    factor.diagonal(dim1=-2, dim2=-1).masked_fill_(bad, 1.0)
    root = triangular_inverse(factor[:, :size, :size]).mT.contiguous()
    root.diagonal(dim1=-2, dim2=-1).masked_fill_(bad, torch.nan)
    return root


def triangular_inverse(x: Tensor) -> Tensor:
    """Of a stack ``(s, n, n)`` of lower triangular matrices.

    Of large ones on a CPU by halves: ``[[P, 0], [Q, R]]`` has the inverse ``[[P^-1, 0],
    [-R^-1 Q P^-1, R^-1]]``, so that most of the work is in products.
    """
    size, half = x.shape[-1], tuning_of(x).batched_up_to
    if size <= 2 * half:
        identity = torch.eye(size, dtype=x.dtype, device=x.device)
        return torch.linalg.solve_triangular(x, identity.expand_as(x), upper=False)
    cut = -(-size // (2 * half)) * half
    inverse = x.new_zeros(x.shape)
    first, last = inverse[:, :cut, :cut], inverse[:, cut:, cut:]
    first.copy_(triangular_inverse(x[:, :cut, :cut]))
    last.copy_(triangular_inverse(x[:, cut:, cut:]))
    corner = torch.bmm(x[:, cut:, :cut], first).neg_()
    torch.bmm(last, corner, out=inverse[:, cut:, :cut])
    return inverse


def _two_by_two(x: Tensor) -> Tensor:
    """The closed form of SP-NGD, eq. 17, for a stack ``(s, 2, 2)``."""
    # of entries up to 1: the determinant of others may be beyond the dtype
    scale = x.abs().amax((1, 2), keepdim=True)
    x = x / scale
    a, b, c, d = x[:, 0, 0], x[:, 0, 1], x[:, 1, 0], x[:, 1, 1]
    adjugate = torch.stack((d, -b, -c, a), dim=-1).reshape(-1, 2, 2)
    determinant = (a * d - b * c).reshape(-1, 1, 1)
    return torch.where(determinant > 0, adjugate / determinant / scale, torch.nan)


def _eigh(matrix: Tensor, damping: Tensor | None) -> Inverse:
    if matrix.dim() == 2:
        return matrix.new_empty(0), matrix
    shifted = matrix
    if damping is not None:
        shifted = matrix.clone()
        shifted.diagonal(dim1=-2, dim2=-1).add_(damping.unsqueeze(1))
    values, vectors = torch.linalg.eigh(shifted)
    # The jitter only perturbs the solver: it is taken out of the eigenvalues again.
    values = values if damping is None else values - damping.unsqueeze(1)
    # In one memory layout, also after a gather: products then round equally.
    return vectors.contiguous(), values


def _climb(
    attempt: Callable[[Tensor, Tensor], Result],
    matrix: Tensor,
    damping: float,
    tried: int = 0,
) -> Result | InverseError:
    """Try ``attempt`` on each rung of the ladder that was not ``tried`` yet."""
    for rung, shift in islice(_rungs(matrix, damping), tried, None):
        try:
            result = attempt(rung, _shifts([shift] * len(rung), rung))
        except torch.linalg.LinAlgError:
            continue
        parts = result if isinstance(result, tuple) else (result,)
        if all(bool(torch.isfinite(x).all()) for x in parts):
            return _narrow(result, matrix.dtype)
    return InverseError(
        f"A statistic of shape {tuple(matrix.shape)} could not be inverted with "
        f"damping {damping:g}, with jitter, or in float64."
    )


def _finite(inverse: Tensor) -> Tensor:
    """Whether an inverse, or a root of one, is finite: of a matrix, its diagonal.

    Of a positive definite X, |x_ij| <= sqrt(x_ii x_jj), and of a triangular root the
    diagonal shows whether the factorisation failed: reading n entries is enough.
    """
    if inverse.dim() == 3:
        inverse = inverse.diagonal(dim1=-2, dim2=-1)
    return torch.isfinite(inverse).all()


def _rungs(matrix: Tensor, damping: float) -> Iterator[tuple[Tensor, float]]:
    yield matrix, damping
    jitter = JITTER * max(damping, _noise(matrix))
    yield matrix, jitter
    yield matrix.double(), jitter


def _noise(matrix: Tensor) -> float:
    """Rounding error of the largest entry: the least jitter that can help."""
    scale = float(matrix.nan_to_num().abs().max())
    return max(scale, 1e-30) * torch.finfo(matrix.dtype).eps


def _narrow(result: Result, dtype: torch.dtype) -> Result:
    if isinstance(result, tuple):
        return tuple(x.to(dtype) for x in result)
    return result.to(dtype)
