"""What a spectrum looks like, without computing all of it.

A statistic is a stack ``(s, n, n)``, or ``(s, n)`` when diagonal; the eigenvalues of
all its members count together. A spectrum is kept as `POINTS` quantiles of equal
weight. Up to size `EXACT` they come from the eigenvalues; above, from the Gauss
quadrature that Lanczos' method gives for a random start: the largest to many digits,
the smallest from above, what is between them as an estimate.
"""

import torch
from torch import Tensor

from natgrad.math.packing import packed_size, trace

EXACT = 128
POINTS = 33
STEPS = 32
SEED = 20200601


def eigenvalues(x: Tensor) -> tuple[Tensor, Tensor]:
    """``(values, weights)``, sorted, weights summing to 1: all, or Lanczos' nodes."""
    if x.dim() == 2 or x.shape[-1] <= EXACT:
        values = x if x.dim() == 2 else torch.linalg.eigvalsh(x)
        values = values.flatten().sort().values
        return values, torch.full_like(values, 1 / values.numel())
    values, weights = lanczos(x, STEPS)
    order = values.flatten().argsort()
    return values.flatten()[order], weights.flatten()[order] / len(x)


def lanczos(x: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Nodes and weights ``(s, steps)`` of the spectral density of each member.

    Every step is orthogonalised against all before it, twice. The start is drawn from
    a generator of its own, so training draws what it would have drawn.
    """
    stack, size = x.shape[:2]
    steps = min(steps, size)
    source = torch.Generator().manual_seed(SEED)
    start = torch.randn(stack, size, generator=source, dtype=torch.float64)
    q = _unit(start.to(x.device, x.dtype))
    basis = x.new_zeros(stack, steps, size)
    tridiagonal = x.new_zeros(stack, steps, steps)
    for i in range(steps):
        basis[:, i] = q
        w = torch.bmm(x, q.unsqueeze(2)).squeeze(2)
        tridiagonal[:, i, i] = (w * q).sum(1)
        for _ in range(2):
            inside = torch.bmm(basis, w.unsqueeze(2))
            w = w - torch.bmm(basis.mT, inside).squeeze(2)
        if i + 1 < steps:
            beta = torch.linalg.vector_norm(w, dim=1)
            tridiagonal[:, i, i + 1] = tridiagonal[:, i + 1, i] = beta
            q = _unit(w)
    values, vectors = torch.linalg.eigh(tridiagonal)
    return values, vectors[:, 0].square()


def _unit(x: Tensor) -> Tensor:
    """Rows of norm 1; what is zero up to rounding stays zero."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.where(norm > torch.finfo(x.dtype).tiny, x / norm, 0.0)


def quantiles(values: Tensor, weights: Tensor, points: int = POINTS) -> Tensor:
    """The values at the middles of ``points`` equal shares, lowest first.

    Between two values, each at the middle of its own weight, it interpolates their
    logarithms: spectra span many decades.
    """
    middle = weights.cumsum(0) - weights / 2
    at = (torch.arange(points, device=values.device, dtype=values.dtype) + 0.5) / points
    right = torch.searchsorted(middle, at).clamp(0, len(values) - 1)
    left = (right - 1).clamp_min(0)
    gap = (middle[right] - middle[left]).clamp_min(torch.finfo(values.dtype).tiny)
    share = ((at - middle[left]) / gap).clamp(0.0, 1.0)
    low, high = values[left], values[right]
    curved = torch.exp(torch.lerp(low.log(), high.log(), share))
    return torch.where(low > 0, curved, torch.lerp(low, high, share))


def summarise(*pieces: Tensor) -> Tensor:
    """``(4 + POINTS,)``: largest, smallest, mean, mean square, quantiles.

    Of one statistic, whose stack may be in pieces of different sizes. Mean and mean
    square are exact in any case: from the trace and the Frobenius norm.
    """
    counts = [len(x) * x.shape[-1] for x in pieces]
    found = [eigenvalues(x) for x in pieces]
    points = torch.cat([values for values, _ in found])
    weights = [w * (n / sum(counts)) for (_, w), n in zip(found, counts, strict=True)]
    points, order = points.sort()
    # zero but for rounding is zero: its sign and size would be noise
    size = max(x.shape[-1] for x in pieces)
    floor = size * torch.finfo(points.dtype).eps * points[-1]
    points = torch.where(points > floor, points, 0.0)
    mean = torch.stack([trace(x) for x in pieces]).sum() / sum(counts)
    square = torch.stack([x.square().sum() for x in pieces]).sum() / sum(counts)
    ends = torch.stack((points[-1], points[0], mean, square))
    return torch.cat((ends, quantiles(points, torch.cat(weights)[order])))


def effective_rank(mean: float, mean_square: float, size: int) -> float:
    """``(sum v)^2 / sum v^2``: from 1 (one direction) to ``size`` (all equal).

    Of a Kronecker product it is the product of the factors' ranks.
    """
    return size * mean * mean / mean_square if mean_square > 0 else 0.0


def product_quantile(right: Tensor, left: Tensor, share: float = 0.5) -> float:
    """A quantile of all products of two factors' eigenvalues, each as quantiles."""
    return float(torch.outer(right, left).flatten().quantile(share))


def share_above(right: Tensor, left: Tensor, level: float) -> float:
    """Which share of the products of two factors' eigenvalues is above a level."""
    return float((torch.outer(right, left) > level).double().mean())


def packed_norm(flat: Tensor, stack: int, size: int) -> Tensor:
    """The Frobenius norm of symmetric matrices from their packed upper triangles."""
    rows = flat.reshape(stack, packed_size(size))
    starts = torch.arange(size, device=flat.device)
    diagonal = rows[:, starts * size - starts * (starts - 1) // 2]
    # off the diagonal every entry stands for two
    return (2 * rows.square().sum() - diagonal.square().sum()).clamp_min(0.0).sqrt()


def change_rate(change: Tensor, old: Tensor) -> Tensor:
    """``|X(t) - X(t-1)| / |X(t-1)|`` (Osawa et al. 2019, eq. 19) from the two norms."""
    return torch.where(old > 0, change / old, (change > 0).to(old.dtype))


def angle(product: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Degrees between two vectors from their product and norms; 0 if one is zero."""
    norms = left * right
    cosine = torch.where(norms > 0, product / norms, 1.0).clamp(-1.0, 1.0)
    return torch.rad2deg(torch.arccos(cosine))
