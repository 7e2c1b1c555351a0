"""The polar factor of a matrix, by iterations that leave its singular vectors alone.

The polar factor of ``X = U diag(sigma) V^T`` is ``U V^T``: all singular values become
1. Each iteration applies an odd function to them. Newton and Schulz' is right only near
1; here each iteration has the function that is best (in the largest error) on the
interval which the iterations before it have left, so that few are needed. Singular
values under `LEAST` times the bound on the largest are raised, but not all the way.

Two *rational* functions are enough: with ``Z = (I + c X X^T)^-1`` a polynomial of Z
times X. For a square matrix that is two inverses and six products, of which four are
symmetric. In bfloat16, which has no inverses, it is five *quintics* ``a sigma +
b sigma^3 + c sigma^5``: fifteen products.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor

from natgrad.math.inverse import positive_inverse
from natgrad.math.products import symmetric_product

STEPS = 6
LEAST = 1e-3
# The rational functions ``sigma (w_0 + w_1 z + ..)`` of ``z = 1 / (1 + c sigma^2)``:
# c, and w. The first is the best of degree one in z on [LEAST, 1] (QDWH's, of
# Nakatsukasa, Bai and Gygi) and leaves [0.248, 1]; the second the best of degree three
# on [0.2473, 1.003], with errors of at most 1.27e-3, by linear programming.
FIRST = 16000.251304493006, (0.9843132398189149, 251.0077918108566)
SECOND = (
    8.970723524816902,
    (0.41059791355903813, 6.518549167328615, -7.18276915876782, 8.964465376643844),
)
# In bfloat16 what is smaller is rounding, which must not be raised to a direction: of a
# matrix of rank one most of the rest would be it.
HALF_STEPS, HALF_LEAST = 5, 1e-2
# Rounding may carry a singular value past the end of its interval.
MARGIN = 1.01
NEAR = 3e-3
# The Gram form (`gram_is_cheaper`): how many FLOP must be saved to be worth more
# operations, and below which singular value the Gram matrix is made again from Y
# half-way. Muon's, which is steep at zero, is after so many iterations.
GRAM_SAVES = 2**21
RESTART_BELOW = 5e-3
RESTART_AFTER = 3

Quintic = tuple[float, float, float]
Quintics = tuple[Quintic, ...]
# Of Jordan et al. 2024: steep at zero and inexact, singular values end in about [0.7,
# 1.2]. The norm counts as at least this.
MUON: Quintics = ((3.4445, -4.7750, 2.0315),) * 5
MUON_EPS = 1e-7


def polar(
    x: Tensor,
    steps: int | None = None,
    *,
    least: float | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The polar factors of a stack ``(s, m, n)``; zero for a matrix of zeros.

    ``dtype`` is that of the products: of float32 on a GPU bfloat16 unless told, else
    the type of ``x``. Every singular value above ``least`` (a thousandth, in bfloat16 a
    hundredth) of the bound on the largest, which is the fourth root of the sum of their
    fourth powers, ends within 2e-3 of 1 in float32, unless fewer ``steps`` are asked
    for. With ``steps`` or ``least`` the iterations are quintics in any type.
    """
    if x.shape[-2] > x.shape[-1]:
        return polar(x.mT, steps, least=least, dtype=dtype).mT
    if dtype is None:
        dtype = torch.bfloat16 if x.is_cuda and x.dtype == torch.float32 else x.dtype
    half = dtype == torch.bfloat16
    if steps is None and least is None and not half:
        return _rational(*_scaled(x, dtype)).to(x.dtype)
    usual = (HALF_STEPS, HALF_LEAST) if half else (STEPS, LEAST)
    least = usual[1] if least is None else least
    chosen = quintics(least, steps or usual[0])
    now, gram = _scaled(x, dtype)
    parts = 2 if least < RESTART_BELOW else 1
    return _through(chosen, now, gram, parts).to(x.dtype)


def _rational(now: tuple[Tensor, Tensor], gram: Tensor) -> Tensor:
    """Y, given beside ``Y^T`` and ``Y Y^T``, through the two rational functions.

    The Gram matrix, which is written to, hides what is smaller than the root of its
    eps, so the second iteration makes its own, of what the first has raised.
    """
    y, (c, (p, q)) = now[0], FIRST
    eye = _eye(y.shape[-2], y.dtype, y.device).expand_as(gram)
    z = positive_inverse(torch.add(eye, gram, alpha=c, out=gram))
    y = torch.baddbmm(y, z, y, beta=p, alpha=q)
    c, (w0, w1, w2, w3) = SECOND
    damped = symmetric_product(y, y.mT, eye, beta=1.0, alpha=c, out=gram)
    z = positive_inverse(damped)
    inner = symmetric_product(z, z, z, beta=w2, alpha=w3, out=gram)
    inner = symmetric_product(inner, z, z, beta=w1)
    return torch.baddbmm(y, inner, y, beta=w0)


@lru_cache(maxsize=64)
def _eye(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.eye(size, dtype=dtype, device=device)


def _through(
    chosen: Quintics, now: tuple[Tensor, Tensor], gram: Tensor, parts: int
) -> Tensor:
    """Y, given beside ``Y^T`` and ``Y Y^T``, through the quintics.

    All three are written to.
    """
    y = now[0]
    rows, columns = y.shape[-2:]
    cheaper = gram_is_cheaper(rows, columns, len(chosen), parts)
    if y.dtype != torch.bfloat16 and cheaper:
        return _by_gram(y, gram, chosen, parts)
    # The first iteration makes the memory that the others use again.
    inner: Tensor | None = None
    other: tuple[Tensor, Tensor] | None = None
    for a, b, c in chosen:
        if other is not None:
            symmetric_product(*now, out=gram)
        inner = symmetric_product(gram, gram, gram, beta=b, alpha=c, out=inner)
        out = None if other is None else other[0]
        y = torch.baddbmm(now[0], inner, now[0], beta=a, out=out)
        now, other = other or (y, y.mT), now
    return now[0]


def _scaled(x: Tensor, dtype: torch.dtype) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Y with singular values of at most 1, beside ``Y^T``, and ``Y Y^T``."""
    # Fourth powers of what is very small or large would be zero or infinite.
    peak = x.abs().amax((-2, -1), keepdim=True)  # as in `foreach.peaks`
    y = (x / peak.clamp_min(torch.finfo(x.dtype).tiny)).to(dtype)
    now = y, y.mT
    gram = symmetric_product(*now)
    # The root of the Gram matrix' norm bounds the largest singular value, and is
    # nearer to it than the norm of x. An entry is 1, so that it is at least 1, or x is
    # zero.
    bound = torch.linalg.vector_norm(gram, dim=(-2, -1), keepdim=True, dtype=x.dtype)
    bound = bound.clamp_min_(0.25).to(dtype)
    y.mul_(bound.rsqrt())
    return now, gram.div_(bound)


def gram_is_cheaper(rows: int, columns: int, steps: int, parts: int = 2) -> bool:
    """Whether quintics are iterated on ``Y Y^T`` alone for matrices of this shape.

    In FLOP, ``4 m^2 n + 2 m^3`` an iteration against ``8 m^3``, and products with Y in
    each part; the first iteration of a part needs one product less, the last two. Not
    for small matrices, whose cost is the number of operations.
    """
    m, n = rows, columns
    direct = steps * (4 * m * m * n + 2 * m**3)
    gram = 4 * m * m * n * parts + (8 * steps - 6 * parts) * m**3
    return direct - gram > GRAM_SAVES


def _by_gram(y: Tensor, gram: Tensor, chosen: Quintics, parts: int) -> Tensor:
    """The iteration on the Gram matrix, ``m x m``.

    All polynomials of ``Y Y^T`` commute, so ``p_k(..) .. p_1(Y Y^T) Y`` needs Y once.
    Rounding in the Gram matrix hides singular values below the root of its eps, so it
    is made again from Y between the parts, in which the smallest have grown.
    """
    cut = -(-len(chosen) // parts)
    for first in range(0, len(chosen), cut):
        part = chosen[first : first + cut]
        if first:
            gram = symmetric_product(y, y.mT, out=gram)
        y = torch.bmm(_product_of(part, gram), y)
    return y


def _product_of(chosen: Quintics, gram: Tensor) -> Tensor:
    """``q_k .. q_1`` with ``q_i = a + b X + c X^2`` of the X that iteration i sees.

    ``gram`` is the first X.
    """
    product: Tensor | None = None
    for i, (a, b, c) in enumerate(chosen):
        inner = symmetric_product(gram, gram, gram, beta=b, alpha=c)
        if i + 1 < len(chosen):
            half = symmetric_product(inner, gram, gram, beta=a)
            gram = symmetric_product(half, inner, half, beta=a)
        if product is None:
            inner.diagonal(dim1=-2, dim2=-1).add_(a)
            product = inner
        else:
            product = symmetric_product(inner, product, product, beta=a)
    assert product is not None
    return product


def newton_schulz(
    x: Tensor, coefficients: Quintics = MUON, *, dtype: torch.dtype | None = None
) -> Tensor:
    """A stack ``(s, m, n)`` over its Frobenius norm, through the given quintics.

    As Muon has it; ``dtype`` as for `polar`.
    """
    if x.shape[-2] > x.shape[-1]:
        return newton_schulz(x.mT, coefficients, dtype=dtype).mT
    if dtype is None:
        dtype = torch.bfloat16 if x.is_cuda and x.dtype == torch.float32 else x.dtype
    norm = torch.linalg.matrix_norm(x, keepdim=True).clamp_min(MUON_EPS)
    y = (x / norm).to(dtype)
    parts = -(-len(coefficients) // RESTART_AFTER)
    now = y, y.mT
    return _through(coefficients, now, symmetric_product(*now), parts).to(x.dtype)


@lru_cache(maxsize=16)
def quintics(least: float, steps: int) -> tuple[Quintic, ...]:
    """The polynomials for singular values that begin in ``[least, 1]``."""
    low, high = least, 1.0
    found: list[Quintic] = []
    for _ in range(steps):
        a, b, c, error = best_quintic(low, high * MARGIN)
        found.append((a, b, c))
        low, high = 1.0 - error, 1.0 + error
    return tuple(found)


def best_quintic(low: float, high: float) -> tuple[float, float, float, float]:
    """``(a, b, c, error)``: the odd quintic nearest to 1 on ``[low, high]``.

    By Remez' exchange: the error reaches its largest size at four points, with
    alternating sign: both ends, and two between them where the slope is zero.
    """
    if 1.0 - low < NEAR:  # Newton and Schulz: the error left is cubed
        return 15 / 8, -10 / 8, 3 / 8, 5 * (1.0 - low) ** 3
    q, r = 0.75 * low + 0.25 * high, 0.25 * low + 0.75 * high
    coefficients = (15 / 8, -10 / 8, 3 / 8, 1.0)
    for _ in range(100):
        points = (low, q, r, high)
        rows = [[x, x**3, x**5, (-1.0) ** i] for i, x in enumerate(points)]
        matrix = torch.tensor(rows, dtype=torch.float64)
        a, b, c, error = torch.linalg.solve(matrix, matrix.new_ones(4)).tolist()
        coefficients = a, b, c, error
        root = math.sqrt(9 * b * b - 20 * a * c)
        last, q = q, math.sqrt((-3 * b - root) / (10 * c))
        r = math.sqrt((-3 * b + root) / (10 * c))
        if abs(q - last) < 1e-12:
            break
    return coefficients
