"""Autocorrelations of images, from which the moments of convolutions are made.

Letters as in `convolution`.

Note [Spectra]
R is one weight-gradient call or, often cheaper, a product of spectra: with zeros
around the image as wide as the largest offset, R is the inverse Fourier transform of
sum over examples of conj(X_c) X_c'. For images this small the transform is a product
with a matrix of cosines and sines, which also brings the frequencies to the front,
where batched products want them. Transforming all dims but the first leaves k shifted
products a frequency; transforming all leaves one, but costs more to get there.
"""

import itertools
import math
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from natgrad.math.conv.geometry import ConvGeometry
from natgrad.math.products import blocks, sum_dtype
from natgrad.math.tuning import tuning_of


def correlate_images(x: Tensor, geometry: ConvGeometry, _: int = 0) -> Tensor:
    """R[g, *e, c, c'] = sum over p of x_c[p] x_c'[p + d e], zeros around the image."""
    dims, groups, size = geometry.dims, geometry.groups, x.shape[1] // geometry.groups
    shape = (x.shape[1], size, *map(len, geometry.offsets))
    total = x.new_zeros(shape, dtype=sum_dtype(x))
    first, *reach = geometry.reach
    for block in blocks(x):
        # A convolution pads both ends equally, but here the first dim needs only one.
        below = F.pad(block, (0, 0) * (dims - 1) + (0, first))
        total += torch.ops.aten.convolution_backward(
            block, below, total, None, [1] * dims, [0, *reach], geometry.dilation,
            False, [0] * dims, groups, [False, True, False],
        )[1]  # fmt: skip
    return total.view(groups, size, *shape[1:]).movedim((1, 2), (-2, -1))


def correlate_spectra(x: Tensor, geometry: ConvGeometry, spectral: int) -> Tensor:
    """The same from spectra over the last ``spectral`` dims: Note [Spectra]."""
    shifted = geometry.dims - spectral
    forward, inverse = _fourier(
        tuple(x.shape[2 + shifted :]),
        geometry.reach[shifted:],
        tuple(
            tuple(d * e for e in offsets)
            for d, offsets in zip(geometry.dilation, geometry.offsets, strict=True)
        )[shifted:],
        sum_dtype(x),
        x.device,
    )
    shifts = range(0, geometry.reach[0] + 1, geometry.dilation[0])
    products = _spectral_products(x, forward, shifts if shifted else range(1))
    cosines = products[..., 0, :, 0, :] + products[..., 1, :, 1, :]
    sines = products[..., 0, :, 1, :] - products[..., 1, :, 0, :]
    result = inverse[0] @ cosines.flatten(2) + inverse[1] @ sines.flatten(2)
    return result.view(1, *map(len, geometry.offsets), *cosines.shape[2:])


def _spectral_products(x: Tensor, forward: Tensor, shifts: range) -> Tensor:
    """Sum over examples and rows of spectra times shifted spectra.

    The result (shifts, frequencies, 2, C, 2, C) holds cosine and sine parts.
    """
    count, channels = forward.shape[0] // 2, x.shape[1]
    result = forward.new_zeros(len(shifts), count, 2 * channels, 2 * channels)
    for block in blocks(x, forward.shape[0] / forward.shape[1]):
        rows = _shiftable_rows(block, forward.shape[1], shifts[-1])
        spectra = (forward @ rows.T).view(count, 2 * channels, -1)
        for total, shift in zip(result, shifts, strict=True):
            end = spectra.shape[-1] - shift
            total.baddbmm_(spectra[..., :end], spectra[..., shift:].mT)
    return result.view(len(shifts), count, *(2, channels) * 2)


def _shiftable_rows(block: Tensor, pixels: int, shift: int) -> Tensor:
    """Rows of ``pixels`` to transform, by channel and example: (rows, pixels).

    Zero rows after each example keep a shift from reaching into the next.
    """
    images = block.transpose(0, 1)
    if not shift:
        return images.reshape(-1, pixels)
    padded = block.new_empty(*images.shape[:2], images.shape[2] + shift, pixels)
    padded[:, :, -shift:] = 0
    padded[:, :, :-shift].view(images.shape).copy_(images)
    return padded.view(-1, pixels)


@lru_cache(maxsize=64)
def _fourier(
    sizes: tuple[int, ...],
    reach: tuple[int, ...],
    offsets: tuple[tuple[int, ...], ...],
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Forward (2 * frequencies, pixels) and inverse (2, offsets, frequencies).

    Rows of the forward matrix are a cosine and a sine for each frequency; of two
    conjugate frequencies of the last dim one is kept, and weighs double.
    """
    lengths = [n + r for n, r in zip(sizes, reach, strict=True)]
    counts = [*lengths[:-1], lengths[-1] // 2 + 1]
    frequencies = list(itertools.product(*map(range, counts)))
    single = (0, lengths[-1] / 2)
    twice = [1 if f[-1] in single else 2 for f in frequencies]
    weights = torch.tensor(twice, dtype=torch.float64) / math.prod(lengths)
    pixels = itertools.product(*map(range, sizes))
    forward = _angles(frequencies, list(pixels), lengths)
    inverse = _angles(list(itertools.product(*offsets)), frequencies, lengths)
    forward = torch.stack([forward.cos(), forward.sin()], dim=1).flatten(0, 1)
    inverse = torch.stack([inverse.cos(), inverse.sin()]) * weights
    return forward.to(device, dtype), inverse.to(device, dtype)


def _angles(
    rows: list[tuple[int, ...]], cols: list[tuple[int, ...]], lengths: list[int]
) -> Tensor:
    """2 pi sum over dims of row * col / length, reduced in integers to stay exact."""
    left, right = torch.tensor(rows), torch.tensor(cols)
    period = torch.tensor(lengths)
    turns = (left[:, None] * right % period).double() / period
    return 2 * math.pi * turns.sum(-1)


def spread(correlation: Tensor, geometry: ConvGeometry) -> Tensor:
    """Moment (g, c, *kernel i, c', *kernel j) from R[g, *(j - i), c, c']."""
    dims = tuple(range(1, 1 + geometry.dims))
    other_half = correlation[:, 1:].mT.flip(dims)
    offsets = torch.cat([other_half, correlation], dim=1).flatten(1, geometry.dims)
    select = _offset_selector(geometry.kernel, offsets.dtype, offsets.device)
    groups, _, size, _ = offsets.shape
    result = offsets.new_empty(groups, size, geometry.taps, size, geometry.taps)
    # A product with zeros and ones gathers several times faster than an index does.
    most = tuning_of(offsets).block_bytes // 4
    step = max(1, most // (size * geometry.taps**2 * groups * 4))
    for start in range(0, size, step):
        rows = offsets[:, :, start : start + step]
        wide = (rows.flatten(2).mT @ select).view(
            groups, -1, size, *(geometry.taps,) * 2
        )
        result[:, start : start + step] = wide.transpose(2, 3)
    return result.view(groups, *(size, *geometry.kernel) * 2)


@lru_cache(maxsize=64)
def _offset_selector(
    kernel: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """One in row e, column (i, j) where e = j - i: (offsets, taps * taps)."""
    shape = [2 * k - 1 for k in kernel]
    cells = torch.arange(math.prod(shape)).view(shape)
    for dim, k in enumerate(kernel):
        cells = cells.unfold(dim, k, 1)
    index = cells.flip(tuple(range(len(kernel)))).flatten()
    select = torch.zeros(math.prod(shape), index.numel(), dtype=dtype)
    select[index, torch.arange(index.numel())] = 1
    return select.to(device)
