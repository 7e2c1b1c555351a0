"""The quadratic model along few directions, on all ranks' data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from natgrad.distributed.communicator import Communicator
from natgrad.math.outputs import Product, gaussian_fisher, hessian_of_loss
from natgrad.quadratic.options import Hessian
from natgrad.quadratic.replay import Replay, Run, Weights

Matrix = list[list[float]]


@dataclass(frozen=True, kw_only=True)
class Along:
    """Slopes and curvature of the objective in k directions.

    The objective is the mean loss of all ranks and ``decay . w^2 / 2``.

    Attributes:
        slopes: ``gradient . d_i``.
        products: ``d_i . (B + decay) d_j``, B the Gauss-Newton matrix.
        squares: ``d_i . d_j``.
    """

    slopes: list[float]
    products: Matrix
    squares: Matrix

    def damped(self, damping: float) -> Matrix:
        """The products with ``B + decay + damping``."""
        pairs = zip(self.products, self.squares, strict=True)
        return [[p + damping * s for p, s in zip(*rows, strict=True)] for rows in pairs]


def output_hessian(run: Run, kind: Hessian) -> Product:
    """Products with the Hessian of a run's share of the loss at its outputs."""
    if callable(kind):
        return lambda tangents: [run.share * x for x in kind(run.outputs, tangents)]
    product = hessian_of_loss(run.share * run.loss, run.outputs)
    if kind == "loss":
        return product
    return gaussian_fisher(product, run.outputs, log=kind == "gaussian_log")


def measure(
    replay: Replay,
    runs: Sequence[Run],
    hessians: Sequence[Product],
    comm: Communicator,
    *,
    weights: Weights,
    gradients: Mapping[str, Tensor],
    decay: Mapping[str, float],
    directions: Sequence[Weights],
) -> Along:
    """The model along directions, which are the same on all ranks.

    ``runs`` are this rank's, whose losses add up to its objective; ``weights`` those
    that they ran at, ``gradients`` of the same; ``decay`` is by name too.
    """
    k = len(directions)
    pairs = [(i, j) for i in range(k) for j in range(i, k)]
    slopes = [_dot(gradients, d) for d in directions]
    curved = [torch.zeros((), dtype=torch.float64, device=slopes[0].device)] * len(
        pairs
    )
    for run, hessian in zip(runs, hessians, strict=True):
        pushed = replay.tangents(run, weights, directions)
        turned = [hessian(t) for t in pushed]
        curved = [
            x + _inner(pushed[i], turned[j])
            for x, (i, j) in zip(curved, pairs, strict=True)
        ]
    decayed = [
        {n: x * decay[n] for n, x in d.items() if decay.get(n)} for d in directions
    ]
    slopes = [s + _dot(weights, d) for s, d in zip(slopes, decayed, strict=True)]
    curved = [
        x + _dot(decayed[i], directions[j])
        for x, (i, j) in zip(curved, pairs, strict=True)
    ]
    squares = [_dot(directions[i], directions[j]) for i, j in pairs]
    # the mean also of what is the same on all ranks but for the order of a sum
    mean = comm.agree(torch.stack([*slopes, *curved, *squares])) / comm.world
    told: list[float] = mean.tolist()
    n = k + len(pairs)
    return Along(
        slopes=told[:k],
        products=_matrix(k, pairs, told[k:n]),
        squares=_matrix(k, pairs, told[n:]),
    )


def _matrix(
    k: int, pairs: Sequence[tuple[int, int]], values: Sequence[float]
) -> Matrix:
    found = [[0.0] * k for _ in range(k)]
    for (i, j), x in zip(pairs, values, strict=True):
        found[i][j] = found[j][i] = x
    return found


def _dot(x: Mapping[str, Tensor], y: Mapping[str, Tensor]) -> Tensor:
    """The sum over names that both have."""
    names = [n for n in y if n in x]
    device = next((t.device for t in (*x.values(), *y.values())), None)
    return _inner([x[n] for n in names], [y[n] for n in names], device)


def _inner(x: Sequence[Tensor], y: Sequence[Tensor], device: Any = None) -> Tensor:
    total = torch.zeros((), dtype=torch.float64, device=x[0].device if x else device)
    for a, b in zip(x, y, strict=True):
        total = total + (a.detach().double() * b.detach().double()).sum().to(
            total.device
        )
    return total
