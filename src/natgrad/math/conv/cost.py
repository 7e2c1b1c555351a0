"""Which way to a convolution's input moment is cheapest, from shapes alone."""

import math
from functools import lru_cache
from typing import NamedTuple

from natgrad.math.conv.geometry import (
    ConvGeometry,
    border_strips,
    is_pointwise,
    positions,
)
from natgrad.math.tuning import Tuning

# No transform matrix larger than this is considered (1 MiB in float32).
LARGEST_TRANSFORM = 2**18


class Cost(NamedTuple):
    """Estimated nanoseconds, and the method or the dims to transform they buy."""

    time: float
    method: str = "autocorrelation"
    spectral: int = 0


# Nanoseconds of the calls of an autocorrelation, however small it is.
CALLS = 5e5


@lru_cache(maxsize=1024)
def cheapest(shape: tuple[int, ...], geometry: ConvGeometry, tuning: Tuning) -> Cost:
    """The cheapest way to the input moment of an input of this shape."""
    if is_pointwise(geometry):
        return Cost(0.0, "pointwise")
    size = shape[1] // geometry.groups * geometry.taps
    patches = geometry.groups * size * positions(shape, geometry)
    symmetry = 0.65 if geometry.groups == 1 and 0 < tuning.panel < size else 1.0
    products = symmetry * size / tuning.product
    im2col = Cost(patches * (products + 1 / tuning.copy), "im2col")
    if not tuning.convolution:
        return im2col
    if not geometry.unstrided:
        # Phases multiply the channels while im2col shrinks with the strides: they pay
        # only for the wide kernels on few channels that open a network.
        few = shape[1] <= 4 and min(geometry.kernel) >= 5
        return Cost(0.0) if few else im2col
    spread = CALLS + 10 * geometry.groups * size * size / tuning.copy
    time = spread + cheapest_correlation(shape, geometry, tuning).time
    for strip in border_strips(shape, geometry):
        part = list(shape)
        part[2 + strip.dim] = strip.length
        time += cheapest(tuple(part), strip.geometry, tuning).time
    return min(im2col, Cost(time))


@lru_cache(maxsize=1024)
def cheapest_correlation(
    shape: tuple[int, ...], geometry: ConvGeometry, tuning: Tuning
) -> Cost:
    """The cheapest way to the autocorrelation of an input of this shape."""
    group = shape[1] // geometry.groups
    slow = 2.5 if max(geometry.dilation) > 1 else 1.0
    width = 8 * math.ceil(group / 8)
    pixels = math.prod(shape) // shape[1] * geometry.groups
    offsets = math.prod(map(len, geometry.offsets))
    rate = tuning.convolution or tuning.product
    costs = [Cost(pixels * width * width * offsets * slow / rate)]
    if geometry.groups == 1:
        ways = {geometry.dims, geometry.dims - 1} - {0}
        costs += [_spectral_cost(shape, geometry, each, tuning) for each in ways]
    return min(costs)


def _spectral_cost(
    shape: tuple[int, ...], geometry: ConvGeometry, spectral: int, tuning: Tuning
) -> Cost:
    first = geometry.dims - spectral
    lengths = [n + r for n, r in zip(shape[2:], geometry.reach, strict=True)]
    count = math.prod(lengths[first:-1]) * (lengths[-1] // 2 + 1)
    pixels = math.prod(shape[2 + first :])
    if 2 * count * pixels > LARGEST_TRANSFORM:
        return Cost(math.inf)
    shifts = geometry.kernel[0] if first else 1
    rows = shape[0] * math.prod(lengths[:first])
    results = 4 * shape[1] ** 2 * count * shifts
    offsets = math.prod(map(len, geometry.offsets)) / shifts
    products = 2 * count * pixels * shape[1] * rows + results * (rows + offsets / 2)
    # Products too large for the cache cost far more than the arithmetic in them.
    weight = 2 if 4 * results <= 4 * tuning.block_bytes else 12
    copies = (2 * count + pixels) * shape[1] * rows + weight * results
    time = products / tuning.product + copies / tuning.copy
    return Cost(time, spectral=spectral)
