"""The Hessian of a loss at the outputs of a network, by products; and draws from it.

The generalised Gauss-Newton matrix is ``J^T H J``: J is the Jacobian of the outputs, H
the Hessian of the loss in them. For squared error, cross-entropy and binary
cross-entropy H is that of the loss as it was written down, reduction, weights and
masks included. For a Gaussian with a learned variance that one is not positive, and the
Fisher takes its place.

A gradient at the outputs whose second moment is H is what a label drawn from the model
gives (the sampled Fisher). It needs a root of H: H is diagonal, or in each row
``w (diag(p) - p p^T)`` of a softmax p. Two products with random vectors show which.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Product = Callable[[Sequence[Tensor]], list[Tensor]]
"""From tangents, one for each output, to what H makes of them."""
SAME = 1e-3
"""Relative: what rounding in float32 may leave of a difference that is zero."""


def hessian_of_loss(loss: Tensor, outputs: Sequence[Tensor]) -> Product:
    """Products with the second derivative of a loss, whose graph is to be kept."""
    slopes = _derivatives([loss], outputs, None)
    curved = [g for g in slopes if g is not None and g.requires_grad]

    def product(tangents: Sequence[Tensor]) -> list[Tensor]:
        if not curved:
            return [torch.zeros_like(x) for x in outputs]
        # H is symmetric: the tangents may be multiplied from the left
        along = [
            t
            for g, t in zip(slopes, tangents, strict=True)
            if g is not None and g.requires_grad
        ]
        found = _derivatives(curved, outputs, along)
        pairs = zip(found, outputs, strict=True)
        return [torch.zeros_like(x) if h is None else h for h, x in pairs]

    return product


def _derivatives(
    of: Sequence[Tensor], at: Sequence[Tensor], along: Sequence[Tensor] | None
) -> list[Tensor | None]:
    """The gradients, None where there is none; with a graph if nothing is ``along``."""
    first = along is None
    found = torch.autograd.grad(
        of, at, along, retain_graph=True, create_graph=first, allow_unused=True
    )
    return [*found]


def gaussian_fisher(
    hessian: Product, outputs: Sequence[Tensor], *, log: bool
) -> Product:
    """The Fisher of a mean and a variance, or its logarithm if ``log``.

    ``hessian`` is that of the loss, ``w (log v + (y - m)^2 / v) / 2`` summed. In the
    mean it is ``w / v``, from which w is read; in the variance the Fisher is
    ``w / (2 v^2)``, in its logarithm ``w / 2``.
    """
    if len(outputs) != 2:
        raise ValueError(
            f"Invalid outputs: {len(outputs)} of them. Must be a mean and "
            f"{'the logarithm of ' if log else ''}a variance."
        )
    mean, second = outputs[0].detach(), outputs[1].detach()
    variance = second.exp() if log else second
    inverse = hessian([torch.ones_like(mean), torch.zeros_like(second)])[0].detach()
    weight = inverse * variance
    weight = weight / 2 if log else weight / (2 * variance.square())
    # of a variance that is no longer a number in this precision
    weight = weight.nan_to_num(0.0, 0.0, 0.0).sum_to_size(second.shape)
    return lambda tangents: [inverse * tangents[0], weight * tangents[1]]


def sampled_gradients(outputs: Sequence[Tensor], product: Product) -> list[Tensor]:
    """Random gradients at the outputs with mean zero and second moment H.

    Of several outputs each is drawn for itself: what couples them is left out.
    """
    return [_drawn(i, outputs, product) for i in range(len(outputs))]


def _drawn(i: int, outputs: Sequence[Tensor], product: Product) -> Tensor:
    x = outputs[i].detach()

    def along(direction: Tensor) -> Tensor:
        tangents = [torch.zeros_like(y) for y in outputs]
        tangents[i] = direction
        return product(tangents)[i].detach()

    probes = [_probe(x), _probe(x)]
    seen = [along(u) for u in probes]
    first, second = (hu / u for u, hu in zip(probes, seen, strict=True))
    scale = first.abs().amax()
    if not bool(scale.isfinite()):  # nor is the loss: the step will be skipped
        return torch.zeros_like(x)
    if bool((first - second).abs().amax() <= SAME * scale):
        return first.clamp_min(0).sqrt() * torch.randn_like(x)
    for dim in dict.fromkeys((1, x.dim() - 1)):
        if x.dim() > 1 and (g := _drawn_class(x, dim, probes[0], seen[0])) is not None:
            return g
    raise ValueError(
        f"The Hessian of the loss at an output of shape {tuple(x.shape)} is neither "
        "diagonal (squared error, binary cross-entropy) nor that of a cross-entropy, "
        "so that no label can be drawn for it. Must be one of them, or "
        "fisher='empirical'."
    )


def _drawn_class(x: Tensor, dim: int, u: Tensor, hu: Tensor) -> Tensor | None:
    """``sqrt(w) (p - e_y)`` with y drawn from the softmax p; None if H is another."""
    last, u, hu = (t.movedim(dim, -1) for t in (x, u, hu))
    p = torch.softmax(last.to(torch.promote_types(x.dtype, torch.float32)), dim=-1)
    fit = p * u - p * (p * u).sum(-1, keepdim=True)
    square = fit.square().sum(-1, keepdim=True)
    weight = (hu * fit).sum(-1, keepdim=True) / square.clamp_min(_tiny(square))
    weight = weight.clamp_min(0)
    # of a saturated softmax little but rounding is left
    if not bool((hu - weight * fit).norm() <= 0.1 * hu.norm() + 1e-6 * u.norm()):
        return None
    drawn = torch.multinomial(p.reshape(-1, p.shape[-1]), 1).reshape(*p.shape[:-1], 1)
    g = weight.sqrt() * (p - torch.zeros_like(p).scatter_(-1, drawn, 1.0))
    return g.to(x.dtype).movedim(-1, dim)


def _tiny(x: Tensor) -> float:
    return torch.finfo(x.dtype).tiny


def _probe(x: Tensor) -> Tensor:
    """Random, of size 1 to 2; no two are equal, as a softmax does not see constants."""
    return (torch.randint_like(x, 2) * 2 - 1) * (1 + torch.rand_like(x))
