"""Second moments of a convolution's inputs and output gradients.

Letters: N examples, C channels, g groups, k kernel offsets, d dilation, q an output
position, T output positions an example, n = C / g * prod(k).

The input moment is A[(c, i), (c', j)] = sum over examples and q of
x_c[s q + d i] x_c'[s q + d j] on the padded input, s being the stride: a sum, not a
mean, so that the caller scales the small result and never the patches.

Note [Autocorrelation]
For stride 1, let q run over every position whose patch touches the image, also those
beyond the padding. Then A depends on (i, j) only through j - i: it is the
autocorrelation R of the image at k (2k - 1) offsets (the rest by symmetry) instead of
the k^4 products of im2col. What is too much are the patches beyond the padding. They
form strips along the border where only a few kernel offsets touch the image: a 3x3
convolution with padding 1 has four, one pixel wide, of 3C inputs each. A strip is the
moment of a small convolution itself.

Note [Phases]
For stride s, place s q + d i lies in phase (d i) mod s of the image, at q + (d i) // s.
With the phases as channels the convolution has stride 1 and a kernel s times smaller,
and its moment holds every entry wanted, and others.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from natgrad.math.conv.correlation import correlate_images, correlate_spectra, spread
from natgrad.math.conv.cost import cheapest, cheapest_correlation
from natgrad.math.conv.geometry import (
    ConvGeometry,
    border_strips,
    is_pointwise,
    pad,
    pad_explicitly,
    positions,
)
from natgrad.math.parts import stacked
from natgrad.math.products import (
    add_product,
    as_operand,
    blocks,
    channels_first,
    completed,
    sum_dtype,
)
from natgrad.math.statistics import append_ones
from natgrad.math.tuning import CPU, Tuning, tuning_of

METHODS = ("auto", "pointwise", "im2col", "autocorrelation")


def conv_input_moment(
    x: Tensor,
    geometry: ConvGeometry,
    method: str = "auto",
    tuning: Tuning | None = None,
) -> Tensor:
    """Sum over examples and positions of patch patch^T: (groups, n, n).

    ``x`` is the input (N, C, *spatial) with 1 to 3 spatial dims. Columns are ordered
    as ``weight.flatten(2)``: channel, then kernel offsets; with a bias the last row
    and column hold the sum of the patches, and N * T in the corner. Sums are float32
    (float64 for a float64 input). ``method`` is "auto", "pointwise" (1x1 kernels
    without padding), "im2col", or "autocorrelation"; all are exact. ``tuning`` is that
    of the device unless given.
    """
    _check_input(x, geometry, method)
    if geometry.padding_mode != "zeros":
        x, geometry = pad_explicitly(x, geometry)
    tuning = tuning or tuning_of(x)
    if method == "auto":
        method = choose_method(x.shape, geometry, tuning)
    moment = _MOMENTS[method](x, geometry, tuning).flatten(3).flatten(1, 2)
    if not geometry.bias:
        return moment
    return append_ones(moment, _patch_sums(x, geometry), positions(x.shape, geometry))


def conv_output_moment(g: Tensor, groups: int = 1) -> Tensor:
    """Sum over examples and positions of g g^T: (groups, M / groups, M / groups).

    ``g`` is (N, M, *spatial). Sums are float32 (float64 for a float64 input).
    """
    size = g.shape[1] // groups
    total = g.new_zeros(groups, size, size, dtype=sum_dtype(g))
    for block in blocks(g):
        add_product(total, channels_first(block).view(groups, size, -1))
    return completed(total)


def conv_input_parts(x: Tensor, geometry: ConvGeometry, size: int) -> Tensor:
    """The diagonal blocks of `conv_input_moment` with so many rows: whole channels.

    All of it if ``size`` is not less. The bias counts as one more channel.
    """
    inputs, step = x.shape[1] // geometry.groups, size // geometry.taps
    if size >= inputs * geometry.taps + geometry.bias:
        return conv_input_moment(x, geometry)
    *whole, last = range(0, inputs + geometry.bias, step)
    parts: list[Tensor] = []
    for group in x.split(inputs, 1):
        part = replace(geometry, groups=1, bias=False)
        cuts = [group[:, first : first + step] for first in whole]
        parts += [conv_input_moment(each, part) for each in cuts]
        if last < inputs:
            part = replace(part, bias=geometry.bias)
            parts.append(conv_input_moment(group[:, last:], part))
        else:  # the bias alone
            count = positions(x.shape, geometry)
            parts.append(x.new_full((1, 1, 1), count, dtype=sum_dtype(x)))
    return stacked(parts, size)


def conv_output_parts(g: Tensor, groups: int, size: int) -> Tensor:
    """The diagonal blocks of `conv_output_moment` with so many rows, or all of it."""
    outputs = g.shape[1] // groups
    if size >= outputs:
        return conv_output_moment(g, groups)
    cuts = (each for group in g.split(outputs, 1) for each in group.split(size, 1))
    return stacked([conv_output_moment(each) for each in cuts], size)


def choose_method(
    x_shape: Sequence[int], geometry: ConvGeometry, tuning: Tuning = CPU
) -> str:
    """The fastest method, from shapes alone, so that every rank chooses the same."""
    return cheapest(tuple(x_shape), geometry, tuning).method


def _pointwise(x: Tensor, geometry: ConvGeometry, _: Tuning) -> Tensor:
    if not is_pointwise(geometry):
        raise ValueError(f"Invalid method='pointwise' for {geometry}.")
    steps = (slice(None, None, s) for s in geometry.stride)
    moment = conv_output_moment(x[(..., *steps)], geometry.groups)
    return moment[:, :, None, :, None]


def _im2col(x: Tensor, geometry: ConvGeometry, tuning: Tuning) -> Tensor:
    """Moment (g, C / g, taps, C / g, taps) from patches made block by block."""
    channels = x.shape[1] // geometry.groups
    size = channels * geometry.taps
    total = x.new_zeros(geometry.groups, size, size, dtype=sum_dtype(x))
    for patches in _patch_blocks(x, geometry, tuning):
        add_product(total, patches.reshape(geometry.groups, size, -1), tuning)
    total = completed(total)
    return total.view(geometry.groups, *(channels, geometry.taps) * 2)


def _patch_blocks(
    x: Tensor, geometry: ConvGeometry, tuning: Tuning
) -> Iterator[Tensor]:
    """Views (C, *kernel, N, *outputs) of all patches, a bounded number at a time."""
    outputs = geometry.outputs(x.shape[2:])
    line = x.shape[1] * geometry.taps * math.prod(outputs[1:])
    lines = max(1, tuning.block_bytes // (line * sum_dtype(x).itemsize))
    for block in torch.split(x, max(1, lines // outputs[0])):
        views = windows(pad(as_operand(block), geometry.padding), geometry)
        for part in torch.split(views, lines, dim=2 + geometry.dims):
            yield part.movedim(0, 1 + geometry.dims)


def windows(padded: Tensor, geometry: ConvGeometry) -> Tensor:
    """View (N, C, *kernel, *outputs) of the patches of an image already padded."""
    views = padded
    for dim, (reach, stride) in enumerate(
        zip(geometry.reach, geometry.stride, strict=True)
    ):
        views = views.unfold(2 + dim, reach + 1, stride)
    taken = (slice(None, None, d) for d in geometry.dilation)
    dims = range(2, 2 + geometry.dims)
    last = range(2 + geometry.dims, 2 + 2 * geometry.dims)
    return views[(..., *taken)].permute(0, 1, *last, *dims)


def _autocorrelation(x: Tensor, geometry: ConvGeometry, tuning: Tuning) -> Tensor:
    """See Note [Autocorrelation], and for strides Note [Phases]."""
    if not geometry.unstrided:
        return _phased(x, geometry, tuning)
    spectral = cheapest_correlation(tuple(x.shape), geometry, tuning).spectral
    correlate = correlate_spectra if spectral else correlate_images
    moment = spread(correlate(x, geometry, spectral), geometry)
    inner = (slice(None),)
    for strip in border_strips(tuple(x.shape), geometry):
        view = moment[inner * 2 + strip.taps + inner + strip.taps]
        part = x.narrow(2 + strip.dim, strip.start, strip.length)
        method = _MOMENTS[choose_method(part.shape, strip.geometry, tuning)]
        view.sub_(method(part, strip.geometry, tuning).view(view.shape))
    return moment.view(*moment.shape[:2], geometry.taps, -1, geometry.taps)


def _phased(x: Tensor, geometry: ConvGeometry, tuning: Tuning) -> Tensor:
    """Moment of a strided convolution: see Note [Phases]."""
    reads = _reads(geometry)
    phases = [sorted({phase for _, phase in dim}) for dim in reads]
    kernel = tuple(1 + max(place for place, _ in dim) for dim in reads)
    images = _phase_images(x, geometry, kernel, phases)
    compact = geometry.compact(kernel)
    moment = _autocorrelation(images.flatten(1, 2), compact, tuning)
    shape = (*(len(dim) for dim in phases), *kernel)
    cells = torch.arange(math.prod(shape)).view(shape)
    places = [
        (
            *(p.index(r) for p, (_, r) in zip(phases, tap, strict=True)),
            *(place for place, _ in tap),
        )
        for tap in itertools.product(*reads)
    ]
    index = torch.stack([cells[place] for place in places]).to(x.device)
    channels = (x.shape[1] // geometry.groups, cells.numel())
    moment = moment.view(geometry.groups, *channels * 2)
    return moment.index_select(2, index).index_select(4, index)


def _reads(geometry: ConvGeometry) -> list[list[tuple[int, int]]]:
    """For each dim and kernel offset, the (place, phase) it reads."""
    sizes = zip(geometry.kernel, geometry.dilation, geometry.stride, strict=True)
    return [[divmod(d * i, s) for i in range(k)] for k, d, s in sizes]


def _phase_images(
    x: Tensor,
    geometry: ConvGeometry,
    kernel: Sequence[int],
    phases: Sequence[Sequence[int]],
) -> Tensor:
    """The phases of the padded input that are read: (N, C, phases, *spatial)."""
    outputs = geometry.outputs(x.shape[2:])
    spatial = zip(
        x.shape[2:], outputs, geometry.padding, geometry.stride, kernel, strict=True
    )
    # A negative right padding crops pixels that no patch reads.
    padding = [(p[0], s * (t + k - 1) - p[0] - n) for n, t, p, s, k in spatial]
    padded = pad(x, padding)
    taken = [
        tuple(slice(r, None, s) for r, s in zip(phase, geometry.stride, strict=True))
        for phase in itertools.product(*phases)
    ]
    return torch.stack([padded[(..., *steps)] for steps in taken], dim=2)


def _patch_sums(x: Tensor, geometry: ConvGeometry) -> Tensor:
    """Sum of all patches (g, n), of the sum over examples."""
    total = x.sum(0, keepdim=True, dtype=sum_dtype(x))
    views = windows(pad(total, geometry.padding), geometry)
    return views.flatten(2 + geometry.dims).sum(-1).view(geometry.groups, -1)


def _check_input(x: Tensor, geometry: ConvGeometry, method: str) -> None:
    if method not in METHODS:
        raise ValueError(f"Invalid method={method!r}. Must be one of {METHODS}.")
    if x.dim() != 2 + geometry.dims or x.shape[1] % geometry.groups:
        raise ValueError(
            f"Invalid x.shape={tuple(x.shape)}. Must be (N, C, *spatial) with "
            f"{geometry.dims} spatial dims, and C divisible by {geometry.groups}."
        )
    if min(geometry.outputs(x.shape[2:])) < 1:
        raise ValueError(
            f"Invalid x.shape={tuple(x.shape)}. Smaller than the kernel of {geometry}."
        )


_MOMENTS = {
    "pointwise": _pointwise,
    "im2col": _im2col,
    "autocorrelation": _autocorrelation,
}
