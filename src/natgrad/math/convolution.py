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

Note [Spectra]
R is one weight-gradient call or, often cheaper, a product of spectra: with zeros
around the image as wide as the largest offset, R is the inverse Fourier transform of
sum over examples of conj(X_c) X_c'. For images this small the transform is a product
with a matrix of cosines and sines, which also brings the frequencies to the front,
where batched products want them. Transforming all dims but the first leaves k shifted
products a frequency; transforming all leaves one, but costs more to get there.

Note [Phases]
For stride s, place s q + d i lies in phase (d i) mod s of the image, at q + (d i) // s.
With the phases as channels the convolution has stride 1 and a kernel s times smaller,
and its moment holds every entry wanted, and others.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from natgrad.math.packing import mirror_

PADDING_MODES = ("zeros", "reflect", "replicate", "circular")
METHODS = ("auto", "pointwise", "im2col", "autocorrelation")

# Patches, spectra and copies are made for a few examples at a time. 4 MiB stay in a
# last-level cache and are enough for a product to run at full speed.
BLOCK_BYTES = 4 * 2**20

# Rows of a symmetric product made in one go, from the diagonal to the right.
PANEL = 192

# No transform matrix larger than this is considered (1 MiB in float32).
LARGEST_TRANSFORM = 2**18


@dataclass(frozen=True, kw_only=True)
class ConvGeometry:
    """Shape of a convolution, one entry per spatial dim.

    ``padding`` holds (left, right) pairs. ``bias`` adds a last input that is always 1.
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int = 1
    padding_mode: str = "zeros"
    bias: bool = False

    def __post_init__(self) -> None:
        dims = self.dims
        for name in ("kernel", "stride", "dilation"):
            value = getattr(self, name)
            if len(value) != dims or not all(v >= 1 for v in value):
                raise ValueError(f"Invalid {name}={value}. Must be {dims} ints >= 1.")
        if len(self.padding) != dims or not all(min(p) >= 0 for p in self.padding):
            raise ValueError(
                f"Invalid padding={self.padding}. Must be {dims} pairs >= 0."
            )
        if self.groups < 1:
            raise ValueError(f"Invalid groups={self.groups}. Must be >= 1.")
        if self.padding_mode not in PADDING_MODES:
            raise ValueError(
                f"Invalid padding_mode={self.padding_mode!r}. "
                f"Must be one of {PADDING_MODES}."
            )

    @property
    def dims(self) -> int:
        return len(self.kernel)

    @property
    def taps(self) -> int:
        """Kernel offsets in all dims together."""
        return math.prod(self.kernel)

    @property
    def reach(self) -> tuple[int, ...]:
        """Distance from the first to the last pixel of a patch, per dim."""
        pairs = zip(self.kernel, self.dilation, strict=True)
        return tuple(d * (k - 1) for k, d in pairs)

    @property
    def offsets(self) -> tuple[range, ...]:
        """Offsets j - i of the autocorrelation, half of them, per dim."""
        first, *others = self.kernel
        return range(first), *(range(1 - k, k) for k in others)

    @property
    def unstrided(self) -> bool:
        return max(self.stride) == 1

    def outputs(self, spatial: Sequence[int]) -> tuple[int, ...]:
        """Output positions per dim for an input of this spatial shape."""
        sizes = zip(spatial, self.padding, self.reach, self.stride, strict=True)
        return tuple((n + sum(p) - r - 1) // s + 1 for n, p, r, s in sizes)

    def compact(self, kernel: tuple[int, ...]) -> "ConvGeometry":
        """The same channels read with this kernel, every pixel, no padding."""
        ones, free = (1,) * self.dims, ((0, 0),) * self.dims
        return replace(self, kernel=kernel, stride=ones, dilation=ones, padding=free)


def positions(x_shape: Sequence[int], geometry: ConvGeometry) -> int:
    """Examples times output positions: N * T for an input (N, C, *spatial)."""
    return x_shape[0] * math.prod(geometry.outputs(x_shape[2:]))


def conv_input_moment(
    x: Tensor, geometry: ConvGeometry, method: str = "auto"
) -> Tensor:
    """Sum over examples and positions of patch patch^T: (groups, n, n).

    ``x`` is the input (N, C, *spatial) with 1 to 3 spatial dims. Columns are ordered
    as ``weight.flatten(2)``: channel, then kernel offsets; with a bias the last row
    and column hold the sum of the patches, and N * T in the corner. Sums are float32
    (float64 for a float64 input). ``method`` is "auto", "pointwise" (1x1 kernels
    without padding), "im2col", or "autocorrelation"; all are exact.
    """
    _check_input(x, geometry, method)
    if geometry.padding_mode != "zeros":
        x, geometry = _pad_explicitly(x, geometry)
    if method == "auto":
        method = choose_method(x.shape, geometry)
    moment = _MOMENTS[method](x, geometry).flatten(3).flatten(1, 2)
    return _with_bias(moment, x, geometry) if geometry.bias else moment


def conv_output_moment(g: Tensor, groups: int = 1) -> Tensor:
    """Sum over examples and positions of g g^T: (groups, M / groups, M / groups).

    ``g`` is (N, M, *spatial). Sums are float32 (float64 for a float64 input).
    """
    size = g.shape[1] // groups
    total = g.new_zeros(groups, size, size, dtype=_sum_dtype(g))
    for block in _blocks(g):
        _add_product(total, _channels_first(block).view(groups, size, -1))
    return _completed(total)


def choose_method(x_shape: Sequence[int], geometry: ConvGeometry) -> str:
    """The fastest method, from shapes alone, so that every rank chooses the same."""
    return _cheapest(tuple(x_shape), geometry).method


def _pointwise(x: Tensor, geometry: ConvGeometry) -> Tensor:
    if not _is_pointwise(geometry):
        raise ValueError(f"Invalid method='pointwise' for {geometry}.")
    steps = (slice(None, None, s) for s in geometry.stride)
    moment = conv_output_moment(x[(..., *steps)], geometry.groups)
    return moment[:, :, None, :, None]


def _im2col(x: Tensor, geometry: ConvGeometry) -> Tensor:
    """Moment (g, C / g, taps, C / g, taps) from patches made block by block."""
    channels = x.shape[1] // geometry.groups
    size = channels * geometry.taps
    total = x.new_zeros(geometry.groups, size, size, dtype=_sum_dtype(x))
    for patches in _patch_blocks(x, geometry):
        _add_product(total, patches.reshape(geometry.groups, size, -1))
    total = _completed(total)
    return total.view(geometry.groups, *(channels, geometry.taps) * 2)


def _patch_blocks(x: Tensor, geometry: ConvGeometry) -> Iterator[Tensor]:
    """Views (C, *kernel, N, *outputs) of all patches, a bounded number at a time."""
    outputs = geometry.outputs(x.shape[2:])
    line = x.shape[1] * geometry.taps * math.prod(outputs[1:])
    lines = max(1, BLOCK_BYTES // (line * _sum_dtype(x).itemsize))
    for block in torch.split(x, max(1, lines // outputs[0])):
        windows = _windows(_pad(block.to(_sum_dtype(x)), geometry.padding), geometry)
        for part in torch.split(windows, lines, dim=2 + geometry.dims):
            yield part.movedim(0, 1 + geometry.dims)


def _windows(padded: Tensor, geometry: ConvGeometry) -> Tensor:
    """View (N, C, *kernel, *outputs) of the patches of an image already padded."""
    windows = padded
    for dim, (reach, stride) in enumerate(
        zip(geometry.reach, geometry.stride, strict=True)
    ):
        windows = windows.unfold(2 + dim, reach + 1, stride)
    taken = (slice(None, None, d) for d in geometry.dilation)
    dims = range(2, 2 + geometry.dims)
    last = range(2 + geometry.dims, 2 + 2 * geometry.dims)
    return windows[(..., *taken)].permute(0, 1, *last, *dims)


def _autocorrelation(x: Tensor, geometry: ConvGeometry) -> Tensor:
    """See Note [Autocorrelation], and for strides Note [Phases]."""
    if not geometry.unstrided:
        return _phased(x, geometry)
    spectral = _cheapest_correlation(tuple(x.shape), geometry).spectral
    correlate = _correlate_spectra if spectral else _correlate_images
    moment = _spread(correlate(x, geometry, spectral), geometry)
    inner = (slice(None),)
    for strip in _strips(tuple(x.shape), geometry):
        view = moment[inner * 2 + strip.taps + inner + strip.taps]
        part = x.narrow(2 + strip.dim, strip.start, strip.length)
        method = _MOMENTS[choose_method(part.shape, strip.geometry)]
        view.sub_(method(part, strip.geometry).view(view.shape))
    return moment.view(*moment.shape[:2], geometry.taps, -1, geometry.taps)


def _correlate_images(x: Tensor, geometry: ConvGeometry, _: int = 0) -> Tensor:
    """R[g, *e, c, c'] = sum over p of x_c[p] x_c'[p + d e], zeros around the image."""
    dims, groups, size = geometry.dims, geometry.groups, x.shape[1] // geometry.groups
    shape = (x.shape[1], size, *map(len, geometry.offsets))
    total = x.new_zeros(shape, dtype=_sum_dtype(x))
    first, *reach = geometry.reach
    for block in _blocks(x):
        # A convolution pads both ends alike, but here the first dim needs only one.
        below = F.pad(block, (0, 0) * (dims - 1) + (0, first))
        total += torch.ops.aten.convolution_backward(
            block, below, total, None, [1] * dims, [0, *reach], geometry.dilation,
            False, [0] * dims, groups, [False, True, False],
        )[1]  # fmt: skip
    return total.view(groups, size, *shape[1:]).movedim((1, 2), (-2, -1))


def _correlate_spectra(x: Tensor, geometry: ConvGeometry, spectral: int) -> Tensor:
    """The same from spectra over the last ``spectral`` dims: Note [Spectra]."""
    shifted = geometry.dims - spectral
    forward, inverse = _fourier(
        tuple(x.shape[2 + shifted :]),
        geometry.reach[shifted:],
        tuple(
            tuple(d * e for e in offsets)
            for d, offsets in zip(geometry.dilation, geometry.offsets, strict=True)
        )[shifted:],
        _sum_dtype(x),
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
    for block in _blocks(x, forward.shape[0] / forward.shape[1]):
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


def _spread(correlation: Tensor, geometry: ConvGeometry) -> Tensor:
    """Moment (g, c, *kernel i, c', *kernel j) from R[g, *(j - i), c, c']."""
    dims = tuple(range(1, 1 + geometry.dims))
    other_half = correlation[:, 1:].mT.flip(dims)
    offsets = torch.cat([other_half, correlation], dim=1).flatten(1, geometry.dims)
    select = _offset_selector(geometry.kernel, offsets.dtype, offsets.device)
    groups, _, size, _ = offsets.shape
    result = offsets.new_empty(groups, size, geometry.taps, size, geometry.taps)
    # A product with zeros and ones gathers several times faster than an index does.
    step = max(1, BLOCK_BYTES // 4 // (size * geometry.taps**2 * groups * 4))
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


class _Strip(NamedTuple):
    """Positions beyond the padding: where of ``dim`` they read, and which offsets."""

    dim: int
    start: int
    length: int
    taps: tuple[slice, ...]
    geometry: ConvGeometry


@lru_cache(maxsize=1024)
def _strips(shape: tuple[int, ...], geometry: ConvGeometry) -> tuple[_Strip, ...]:
    """All positions beyond the padding that touch the image, each once.

    Dims before the strip's own run over the positions that exist, those after it over
    all that touch the image.
    """
    pads = zip(geometry.padding, geometry.reach, strict=True)
    existing = [(min(left, r), min(right, r)) for (left, right), r in pads]
    strips = []
    for dim, step in enumerate(geometry.dilation):
        touching = [(r, r) for r in geometry.reach[dim + 1 :]]
        padding = (*existing[:dim], (0, 0), *touching)
        for start, end, low, high in _runs(shape[2 + dim], geometry, dim):
            kernel, taps = list(geometry.kernel), [slice(None)] * geometry.dims
            kernel[dim], taps[dim] = high - low + 1, slice(low, high + 1)
            part = replace(geometry, kernel=tuple(kernel), padding=padding, bias=False)
            length = end - start + step * (high - low)
            strips.append(_Strip(dim, start + step * low, length, tuple(taps), part))
    return tuple(strips)


def _runs(
    length: int, geometry: ConvGeometry, dim: int
) -> Iterator[tuple[int, int, int, int]]:
    """Runs [start, end) of positions beyond the padding that read offsets low..high."""
    (left, right), reach = geometry.padding[dim], geometry.reach[dim]
    step, kernel = geometry.dilation[dim], geometry.kernel[dim]

    def touched(q: int) -> tuple[int, int]:
        return max(0, -(q // step)), min(kernel - 1, (length - 1 - q) // step)

    for beyond in range(-reach, -left), range(length + right - reach, length):
        for (low, high), run in itertools.groupby(beyond, touched):
            places = list(run)
            if low <= high:
                yield places[0], places[-1] + 1, low, high


def _phased(x: Tensor, geometry: ConvGeometry) -> Tensor:
    """Moment of a strided convolution: see Note [Phases]."""
    reads = _reads(geometry)
    phases = [sorted({phase for _, phase in dim}) for dim in reads]
    kernel = tuple(1 + max(place for place, _ in dim) for dim in reads)
    images = _phase_images(x, geometry, kernel, phases)
    moment = _autocorrelation(images.flatten(1, 2), geometry.compact(kernel))
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
    padded = _pad(x, padding)
    taken = [
        tuple(slice(r, None, s) for r, s in zip(phase, geometry.stride, strict=True))
        for phase in itertools.product(*phases)
    ]
    return torch.stack([padded[(..., *steps)] for steps in taken], dim=2)


class _Cost(NamedTuple):
    """Estimated nanoseconds, and the method or the dims to transform they buy."""

    time: float
    method: str = "autocorrelation"
    spectral: int = 0


# Rates measured in one thread of an AVX2 CPU, in multiplications and in elements a
# nanosecond. Only their ratios matter for the choice.
PRODUCT, CONVOLUTION, COPY = 30.0, 22.0, 2.0
CALLS = 5e5


@lru_cache(maxsize=1024)
def _cheapest(shape: tuple[int, ...], geometry: ConvGeometry) -> _Cost:
    """The cheapest way to the input moment of an input of this shape."""
    if _is_pointwise(geometry):
        return _Cost(0.0, "pointwise")
    size = shape[1] // geometry.groups * geometry.taps
    patches = geometry.groups * size * positions(shape, geometry)
    symmetry = 0.65 if geometry.groups == 1 and size > PANEL else 1.0
    im2col = _Cost(patches * (symmetry * size / PRODUCT + 1 / COPY), "im2col")
    if not geometry.unstrided:
        # Phases multiply the channels while im2col shrinks with the strides: they pay
        # only for the wide kernels on few channels that open a network.
        few = shape[1] <= 4 and min(geometry.kernel) >= 5
        return _Cost(0.0) if few else im2col
    spread = CALLS + 10 * geometry.groups * size * size / COPY
    time = spread + _cheapest_correlation(shape, geometry).time
    for strip in _strips(shape, geometry):
        part = list(shape)
        part[2 + strip.dim] = strip.length
        time += _cheapest(tuple(part), strip.geometry).time
    return min(im2col, _Cost(time))


@lru_cache(maxsize=1024)
def _cheapest_correlation(shape: tuple[int, ...], geometry: ConvGeometry) -> _Cost:
    """The cheapest way to the autocorrelation of an input of this shape."""
    group = shape[1] // geometry.groups
    slow = 2.5 if max(geometry.dilation) > 1 else 1.0
    width = 8 * math.ceil(group / 8)
    pixels = math.prod(shape) // shape[1] * geometry.groups
    offsets = math.prod(map(len, geometry.offsets))
    costs = [_Cost(pixels * width * width * offsets * slow / CONVOLUTION)]
    if geometry.groups == 1:
        ways = {geometry.dims, geometry.dims - 1} - {0}
        costs += [_spectral_cost(shape, geometry, spectral) for spectral in ways]
    return min(costs)


def _spectral_cost(
    shape: tuple[int, ...], geometry: ConvGeometry, spectral: int
) -> _Cost:
    first = geometry.dims - spectral
    lengths = [n + r for n, r in zip(shape[2:], geometry.reach, strict=True)]
    count = math.prod(lengths[first:-1]) * (lengths[-1] // 2 + 1)
    pixels = math.prod(shape[2 + first :])
    if 2 * count * pixels > LARGEST_TRANSFORM:
        return _Cost(math.inf)
    shifts = geometry.kernel[0] if first else 1
    rows = shape[0] * math.prod(lengths[:first])
    results = 4 * shape[1] ** 2 * count * shifts
    offsets = math.prod(map(len, geometry.offsets)) / shifts
    products = 2 * count * pixels * shape[1] * rows + results * (rows + offsets / 2)
    # Products too large for the cache cost far more than the arithmetic in them.
    weight = 2 if 4 * results <= 4 * BLOCK_BYTES else 12
    copies = (2 * count + pixels) * shape[1] * rows + weight * results
    return _Cost(products / PRODUCT + copies / COPY, spectral=spectral)


def _with_bias(moment: Tensor, x: Tensor, geometry: ConvGeometry) -> Tensor:
    size = moment.shape[-1]
    result = moment.new_empty(moment.shape[0], size + 1, size + 1)
    result[:, :size, :size] = moment
    result[:, size, :size] = result[:, :size, size] = _patch_sums(x, geometry)
    result[:, size, size] = positions(x.shape, geometry)
    return result


def _patch_sums(x: Tensor, geometry: ConvGeometry) -> Tensor:
    """Sum of all patches (g, n), of the sum over examples."""
    total = x.sum(0, keepdim=True, dtype=_sum_dtype(x))
    windows = _windows(_pad(total, geometry.padding), geometry)
    return windows.flatten(2 + geometry.dims).sum(-1).view(geometry.groups, -1)


def _add_product(total: Tensor, rows: Tensor) -> None:
    """Add rows rows^T to ``total`` (g, n, n); of large ones, the upper part only."""
    size = total.shape[-1]
    if total.shape[0] > 1 or size <= PANEL:
        total.baddbmm_(rows, rows.mT)
        return
    for start in range(0, size, PANEL):
        panel = slice(start, start + PANEL)
        total[0, panel, start:].addmm_(rows[0, panel], rows[0, start:].T)


def _completed(total: Tensor) -> Tensor:
    """What ``_add_product`` made, with its lower part."""
    return mirror_(total) if total.shape[0] == 1 < total.shape[-1] else total


def _channels_first(block: Tensor) -> Tensor:
    """(N, C, *spatial) as (C, N * pixels); a view if channels lie last in memory."""
    last = block.movedim(1, -1)
    if last.is_contiguous():
        return last.flatten(0, -2).T
    return block.transpose(0, 1).reshape(block.shape[1], -1)


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


def _is_pointwise(geometry: ConvGeometry) -> bool:
    return geometry.taps == 1 and not any(map(any, geometry.padding))


def _pad_explicitly(x: Tensor, geometry: ConvGeometry) -> tuple[Tensor, ConvGeometry]:
    padded = _pad(x, geometry.padding, geometry.padding_mode)
    free = ((0, 0),) * geometry.dims
    return padded, replace(geometry, padding=free, padding_mode="zeros")


def _pad(
    x: Tensor, padding: Sequence[tuple[int, int]], mode: str = "constant"
) -> Tensor:
    flat = list(itertools.chain.from_iterable(reversed(padding)))
    return F.pad(x, flat, mode=mode) if any(flat) else x


def _blocks(x: Tensor, growth: float = 1.0) -> Iterator[Tensor]:
    """Runs of examples, widened; ``growth`` times their size is what gets bounded."""
    size = growth * _sum_dtype(x).itemsize * math.prod(x.shape[1:])
    for block in torch.split(x, max(1, int(BLOCK_BYTES / size))):
        yield block.to(_sum_dtype(x))


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


_MOMENTS = {
    "pointwise": _pointwise,
    "im2col": _im2col,
    "autocorrelation": _autocorrelation,
}
