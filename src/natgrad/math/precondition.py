"""Apply inverses to gradients ``(s, m, n)``; clip and rescale what comes out."""

import math

import torch
from torch import Tensor

from natgrad.math.inverse import Inverse
from natgrad.math.parts import kronecker_values
from natgrad.math.rules import corrected_scale, into_basis, out_of_basis

RESCALE_EPS = 1e-9
# Cosines below so many units of rounding have no sign that could be trusted.
RIGHT_ANGLE = 4.0


def apply_eigen(
    gradient: Tensor, right: Inverse, left: Inverse, damping: float
) -> Tensor:
    """``(G kron A + damping I)^-1`` times V, in the eigenbases.

    Pauloski et al., eq. 13-15. With no damping, directions whose curvature is zero up
    to rounding are left out instead of divided by it, as in a pseudo-inverse.
    """
    (q_right, v_right), (q_left, v_left) = right, left
    curvature = kronecker_values(v_right, v_left, gradient)
    rotated = into_basis(gradient, q_right, q_left)
    scaled = corrected_scale(rotated, curvature, damping)
    return out_of_basis(scaled, q_right, q_left)


def descending(gradient: Tensor, update: Tensor, blocks: int = 1) -> Tensor:
    """The update, or the gradient itself where rounding has turned it uphill.

    Of a stack of so many ``blocks``, each for itself. Preconditioning is positive
    definite, but not always in floating point: a curvature of 1e24 over a damping of
    1e-12 is beyond any dtype. So it is if the update is not finite, or at a right angle
    up to rounding: it is noise then, of either sign. Decided without synchronisation,
    and the same wherever the tensors are.
    """
    if len(update) != blocks:
        g, u = gradient.reshape(blocks, 1, -1), update.reshape(blocks, 1, -1)
        return descending(g, u, blocks).reshape(update.shape)
    each = (1, 2)
    product = (gradient * update).sum(each, keepdim=True)
    norms = [
        torch.linalg.vector_norm(x, dim=each, keepdim=True) for x in (gradient, update)
    ]
    noise = RIGHT_ANGLE * torch.finfo(update.dtype).eps
    more = torch.addcmul(product, *norms, value=-noise)
    # False for a product that is not finite: the norms are not either then.
    return torch.where(more > 0, update, gradient)


def kl_scale(inner_product: Tensor, kl_clip: float, lr: float) -> Tensor:
    """nu of Pauloski et al., eq. 18, on the device: ``min(1, sqrt(kappa / (lr^2 p)))``.

    ``inner_product`` is the sum over blocks of |<preconditioned, plain gradient>|.
    """
    bound = math.sqrt(kl_clip) / max(lr, torch.finfo(torch.float64).tiny)
    return (bound / inner_product.sqrt()).clamp(max=1.0)


def rescale_factor(norm: Tensor, outputs: int) -> Tensor:
    """What brings a weight of this norm to sqrt(2 d_out): SP-NGD, eq. 24."""
    return math.sqrt(2.0 * outputs) / (norm + RESCALE_EPS)
