"""Tensors rounded before they are multiplied; sums of products stay in float32.

Note [Half-precision products]
A second moment is a sum of products of rounded numbers. Such a product of two numbers
in half precision is exact in float32, and so it is summed: by Tensor Cores on CUDA
(`natgrad.math.products.outer`), and elsewhere by float32 products of what was rounded.
So the result does not depend on the device, but for the order of the sum.

float16 ends at 65504 and loses what is below 6e-8. Inputs end at its limits.
Gradients, which are small where a loss is a mean, are multiplied by a power of two that
makes the largest of them about 1, and their second moments by its inverse square.
"""

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)
_FARTHEST = 60
"""The largest power of two that gradients are scaled by: its square is a float32."""


def narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """In this dtype: in float16 finite numbers end at its limits, not in infinities."""
    if dtype == torch.float16 and x.dtype != dtype:
        limit = torch.finfo(dtype).max
        x = torch.where(x.isinf(), x, x.clamp(-limit, limit))
    return x.to(dtype)


def rounded(x: Tensor, precision: torch.dtype | None) -> Tensor:
    """Inputs in this precision; as they are if it is None or they are indices."""
    if precision is None or not x.is_floating_point():
        return x
    return narrowed(x, precision)


def rescaled(g: Tensor, precision: torch.dtype | None) -> tuple[Tensor, Tensor | float]:
    """Gradients in this precision, and what their second moments are to be times."""
    if precision != torch.float16 or not g.numel():
        return rounded(g, precision), 1.0
    largest = g.abs().amax().float()
    # of an infinity and of NaN it is 0, so that they stay what they are
    exponent = torch.frexp(largest).exponent.clamp(-_FARTHEST, _FARTHEST)
    wide = g if g.dtype == torch.float64 else g.float()
    times = torch.ldexp(largest.new_ones(()), 2 * exponent)
    return torch.ldexp(wide, -exponent).half(), times
