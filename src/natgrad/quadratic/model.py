"""The quadratic model along few directions, on all ranks' data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
    names, k = [*directions[0]], len(directions)
    flat = torch.stack([_flat([d[n] for n in names]) for d in directions])
    slope = _flat([_known(gradients, n, directions[0]) for n in names])
    curved = torch.zeros(k, k, dtype=flat.dtype, device=flat.device)
    for run, hessian in zip(runs, hessians, strict=True):
        pushed = replay.tangents(run, weights, directions)
        turned = torch.stack([_flat(hessian(t)) for t in pushed])
        curved += (torch.stack([_flat(t) for t in pushed]) @ turned.T).to(flat.device)
    if any(decay.get(n) for n in names):
        decayed = [
            [x[n] * decay.get(n, 0.0) for n in names] for x in (*directions, weights)
        ]
        *each, of_weights = [_flat(x) for x in decayed]
        slope = slope + of_weights
        curved += torch.stack(each) @ flat.T
    found = torch.cat([flat @ slope, curved.flatten(), (flat @ flat.T).flatten()])
    # the mean also of what is the same on all ranks but for the order of a sum
    told: list[float] = (comm.agree(found) / comm.world).tolist()
    rows = [told[i : i + k] for i in range(k, len(told), k)]
    return Along(slopes=told[:k], products=rows[:k], squares=rows[k:])


def slope_along(
    step: Weights,
    weights: Weights,
    gradients: Mapping[str, Tensor],
    decay: Mapping[str, float],
    comm: Communicator,
) -> float:
    """Of the objective along a step, which is the same on all ranks."""
    names = [*step]
    slope = _flat([_known(gradients, n, step) for n in names])
    slope = slope + _flat([weights[n] * decay.get(n, 0.0) for n in names])
    found = comm.agree((slope @ _flat([step[n] for n in names])).reshape(1))
    return float(found) / comm.world


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    """One vector, in float64."""
    device = tensors[0].device
    return torch.cat([x.detach().to(device).flatten() for x in tensors]).double()


def _known(gradients: Mapping[str, Tensor], name: str, like: Weights) -> Tensor:
    return gradients[name] if name in gradients else torch.zeros_like(like[name])
