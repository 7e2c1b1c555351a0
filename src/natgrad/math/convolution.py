"""Second moments of a convolution's inputs and output gradients.

Letters: N examples, C input channels, M outputs, g groups, k kernel offsets, d
dilation, q an output position, T output positions an example, n = C / g * prod(k).

The input moment is A[(c, i), (c', j)] = sum over examples and q of
x_c[s q + d i] x_c'[s q + d j] on the padded input, s being the stride: a sum, not a
mean, so that the caller scales the small result and never the patches.

Note [Autocorrelation]
For stride 1, let q run over every position whose patch touches the image, also those
beyond the padding. Then A depends on (i, j) only through j - i: it is the
autocorrelation of the image, which one weight-gradient call yields for k * (2k - 1)
offsets instead of the k * k * k * k products of im2col (half of the offsets follow by
symmetry). What is too much are the patches of the positions beyond the padding. They
form strips along the border, and there only a few kernel offsets touch the image, so
their patches are short: a 3x3 convolution with padding 1 has four strips, one pixel
wide, of 3C inputs each. A strip is the moment of a small convolution itself.

Note [Phases]
For stride s, position s q + d i lies in phase r = (d i) mod s of the image, at place
q + (d i) // s of it. With the phases as channels the convolution has stride 1 and a
kernel s times smaller, and its moment holds every entry wanted.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

PADDING_MODES = ("zeros", "reflect", "replicate", "circular")
METHODS = ("auto", "pointwise", "im2col", "autocorrelation")

# Temporary patches and copies are made a block of examples at a time. 4 MiB stay in a
# last-level cache and are large enough for a product to run at full speed.
BLOCK_BYTES = 4 * 2**20


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
        dims = len(self.kernel)
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
    def reach(self) -> tuple[int, ...]:
        """Distance from the first to the last pixel of a patch, per dim."""
        return tuple(
            d * (k - 1) for k, d in zip(self.kernel, self.dilation, strict=True)
        )

    @property
    def symmetric(self) -> bool:
        return all(s == 1 for s in self.stride)

    def outputs(self, spatial: Sequence[int]) -> tuple[int, ...]:
        """Output positions per dim for an input of this spatial shape."""
        sizes = zip(spatial, self.padding, self.reach, self.stride, strict=True)
        return tuple((n + sum(p) - r - 1) // s + 1 for n, p, r, s in sizes)


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
    moment = _INPUT_MOMENTS[method](x, geometry).flatten(3).flatten(1, 2)
    return _with_bias(moment, x, geometry) if geometry.bias else moment


def conv_output_moment(g: Tensor, groups: int = 1) -> Tensor:
    """Sum over examples and positions of g g^T: (groups, M / groups, M / groups).

    ``g`` is (N, M, *spatial). Sums are float32 (float64 for a float64 input).
    """
    size = g.shape[1] // groups
    total = g.new_zeros(groups, size, size, dtype=_sum_dtype(g))
    for block in _blocks(g):
        rows = block.transpose(0, 1).reshape(groups, size, -1)
        total.baddbmm_(rows, rows.mT)
    return total


def choose_method(x_shape: Sequence[int], geometry: ConvGeometry) -> str:
    """The fastest method, from shapes alone, so that every rank chooses the same."""
    if _is_pointwise(geometry):
        return "pointwise"
    return "autocorrelation" if geometry.symmetric else "im2col"


def _pointwise(x: Tensor, geometry: ConvGeometry) -> Tensor:
    if not _is_pointwise(geometry):
        raise ValueError(f"Invalid method='pointwise' for {geometry}.")
    steps = tuple(slice(None, None, s) for s in geometry.stride)
    moment = conv_output_moment(x[(..., *steps)], geometry.groups)
    return moment[:, :, None, :, None]


def _im2col(x: Tensor, geometry: ConvGeometry) -> Tensor:
    """Moment (g, C / g, prod(k), C / g, prod(k)) from patches made block by block."""
    taps = math.prod(geometry.kernel)
    size = x.shape[1] // geometry.groups * taps
    total = x.new_zeros(geometry.groups, size, size, dtype=_sum_dtype(x))
    for patches in _patch_blocks(x, geometry):
        rows = patches.reshape(geometry.groups, size, -1)
        total.baddbmm_(rows, rows.mT)
    channels = (size // taps, taps)
    return total.view(geometry.groups, *channels, *channels)


def _patch_blocks(x: Tensor, geometry: ConvGeometry) -> Iterator[Tensor]:
    """Views (C, *kernel, N, *outputs) of all patches, a bounded number at a time."""
    channels = x.shape[1] * math.prod(geometry.kernel)
    outputs = geometry.outputs(x.shape[2:])
    width = channels * x.element_size() * math.prod(outputs[1:])
    lines = max(1, BLOCK_BYTES // width)
    examples = max(1, lines // outputs[0])
    for block in torch.split(x, examples):
        windows = _windows(_pad(_widened(block), geometry.padding), geometry)
        for part in torch.split(windows, lines, dim=2 + geometry.dims):
            yield part.movedim(0, 1 + geometry.dims)


def _windows(padded: Tensor, geometry: ConvGeometry) -> Tensor:
    """View (N, C, *kernel, *outputs) of the patches of an image already padded."""
    free = replace(geometry, padding=((0, 0),) * geometry.dims)
    steps = padded.stride()[2:]
    kernel_steps = (s * d for s, d in zip(steps, geometry.dilation, strict=True))
    output_steps = (s * d for s, d in zip(steps, geometry.stride, strict=True))
    return padded.as_strided(
        (*padded.shape[:2], *geometry.kernel, *free.outputs(padded.shape[2:])),
        (*padded.stride()[:2], *kernel_steps, *output_steps),
    )


def _autocorrelation(x: Tensor, geometry: ConvGeometry) -> Tensor:
    """See Note [Autocorrelation], and for strides Note [Phases]."""
    if not geometry.symmetric:
        return _phased(x, geometry)
    moment = _toeplitz(_correlate(x, geometry), geometry)
    for strip, part, taps in _strips(x, geometry):
        view = moment[(slice(None), slice(None), *taps)]
        view = view[(slice(None),) * (2 + geometry.dims) + (slice(None), *taps)]
        view.sub_(_im2col(strip, part).view(view.shape))
    taps = math.prod(geometry.kernel)
    groups, size = moment.shape[:2]
    return moment.view(groups, size, taps, size, taps)


def _correlate(x: Tensor, geometry: ConvGeometry) -> Tensor:
    """R[g, c, c', e] = sum over p of x_c[p] x_c'[p + d e] with zeros around the image.

    e runs from 0 in the first dim and from -(k - 1) in the others, to k - 1.
    """
    first, *others = geometry.kernel
    reach = geometry.reach
    size = x.shape[1] // geometry.groups
    shape = (x.shape[1], size, first, *(2 * k - 1 for k in others))
    total = x.new_zeros(shape, dtype=_sum_dtype(x))
    for block in _blocks(x):
        # A convolution pads both ends alike, but here the first dim needs only one.
        below = F.pad(block, (0, 0) * (geometry.dims - 1) + (0, reach[0]))
        total += torch.ops.aten.convolution_backward(
            block, below, total, None, [1] * geometry.dims, [0, *reach[1:]],
            geometry.dilation, False, [0] * geometry.dims, geometry.groups,
            [False, True, False],
        )[1]  # fmt: skip
    return total.view(geometry.groups, size, *shape[1:])


def _toeplitz(correlation: Tensor, geometry: ConvGeometry) -> Tensor:
    """Spread R[g, c, c', j - i] to (g, c, *kernel i, c', *kernel j)."""
    dims = tuple(range(3, 3 + geometry.dims))
    half = correlation.narrow(3, 1, geometry.kernel[0] - 1)
    spread = torch.cat([half.transpose(1, 2).flip(dims), correlation], dim=3)
    for dim, k in zip(dims, geometry.kernel, strict=True):
        spread = spread.unfold(dim, k, 1)
    spread = spread.flip(dims)
    last = tuple(range(3 + geometry.dims, 3 + 2 * geometry.dims))
    return spread.permute(0, 1, *dims, 2, *last).contiguous()


def _strips(
    x: Tensor, geometry: ConvGeometry
) -> Iterator[tuple[Tensor, ConvGeometry, tuple[slice, ...]]]:
    """The positions beyond the padding, each once: image, geometry, kernel offsets.

    Dims before the strip's own run over the positions that exist, those after it over
    all that touch the image.
    """
    pairs = zip(geometry.padding, geometry.reach, strict=True)
    existing = [(min(left, r), min(right, r)) for (left, right), r in pairs]
    for dim, (step, length) in enumerate(
        zip(geometry.dilation, x.shape[2:], strict=True)
    ):
        touching = [(r, r) for r in geometry.reach[dim + 1 :]]
        padding = (*existing[:dim], (0, 0), *touching)
        for start, end, low, high in _runs(length, geometry, dim):
            kernel, taps = list(geometry.kernel), [slice(None)] * geometry.dims
            kernel[dim], taps[dim] = high - low + 1, slice(low, high + 1)
            first, last = start + step * low, end + step * high
            part = replace(geometry, kernel=tuple(kernel), padding=padding)
            yield x.narrow(2 + dim, first, last - first), part, tuple(taps)


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
    reads = [
        [divmod(d * i, s) for i in range(k)]
        for k, d, s in zip(
            geometry.kernel, geometry.dilation, geometry.stride, strict=True
        )
    ]
    phases = [sorted({phase for _, phase in dim}) for dim in reads]
    kernel = tuple(1 + max(place for place, _ in dim) for dim in reads)
    ones = (1,) * geometry.dims
    free = ((0, 0),) * geometry.dims
    part = replace(geometry, kernel=kernel, stride=ones, dilation=ones, padding=free)
    images = _phase_images(x, geometry, kernel, phases)
    moment = _autocorrelation(images.flatten(1, 2), part)
    taps = math.prod(kernel) * images.shape[2]
    channels = x.shape[1] // geometry.groups
    moment = moment.view(geometry.groups, channels, taps, channels, taps)
    index = _phase_index(reads, phases, kernel, x.device)
    return moment.index_select(2, index).index_select(4, index)


def _phase_images(
    x: Tensor,
    geometry: ConvGeometry,
    kernel: Sequence[int],
    phases: Sequence[Sequence[int]],
) -> Tensor:
    """The phases of the padded input that are read: (N, C, phases, *spatial)."""
    outputs = geometry.outputs(x.shape[2:])
    sizes = [t + k - 1 for t, k in zip(outputs, kernel, strict=True)]
    # A negative right padding crops pixels that no patch reads.
    padding = [
        (left, s * size - left - n)
        for n, (left, _), s, size in zip(
            x.shape[2:], geometry.padding, geometry.stride, sizes, strict=True
        )
    ]
    padded = _pad(x, padding)
    images = [
        padded[
            (
                ...,
                *(
                    slice(r, None, s)
                    for r, s in zip(phase, geometry.stride, strict=True)
                ),
            )
        ]
        for phase in itertools.product(*phases)
    ]
    return torch.stack(images, dim=2)


def _phase_index(
    reads: Sequence[Sequence[tuple[int, int]]],
    phases: Sequence[Sequence[int]],
    kernel: Sequence[int],
    device: torch.device,
) -> Tensor:
    """Where each kernel offset lies in the phases times the smaller kernel."""
    shape = (*(len(dim) for dim in phases), *kernel)
    cells = torch.arange(math.prod(shape), device=device).view(shape)
    index = [
        cells[
            (
                *(p.index(r) for p, (_, r) in zip(phases, offset, strict=True)),
                *(a for a, _ in offset),
            )
        ]
        for offset in itertools.product(*reads)
    ]
    return torch.stack(index)


def _with_bias(moment: Tensor, x: Tensor, geometry: ConvGeometry) -> Tensor:
    sums = _patch_sums(x, geometry)
    size = moment.shape[-1]
    result = moment.new_empty(moment.shape[0], size + 1, size + 1)
    result[:, :size, :size] = moment
    result[:, size, :size] = result[:, :size, size] = sums
    result[:, size, size] = positions(x.shape, geometry)
    return result


def _patch_sums(x: Tensor, geometry: ConvGeometry) -> Tensor:
    """Sum of all patches (g, n): examples are summed first, then one dim at a time."""
    total = x.sum(0, keepdim=True, dtype=_sum_dtype(x))
    windows = _windows(_pad(total, geometry.padding), geometry)
    return windows.flatten(2 + geometry.dims).sum(-1).view(geometry.groups, -1)


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
    padded = any(itertools.chain.from_iterable(geometry.padding))
    return math.prod(geometry.kernel) == 1 and not padded


def _pad_explicitly(x: Tensor, geometry: ConvGeometry) -> tuple[Tensor, ConvGeometry]:
    padded = _pad(x, geometry.padding, geometry.padding_mode)
    free = ((0, 0),) * geometry.dims
    return padded, replace(geometry, padding=free, padding_mode="zeros")


def _pad(
    x: Tensor, padding: Sequence[tuple[int, int]], mode: str = "constant"
) -> Tensor:
    flat = list(itertools.chain.from_iterable(reversed(padding)))
    return F.pad(x, flat, mode=mode) if any(flat) else x


def _blocks(x: Tensor) -> Iterator[Tensor]:
    """Runs of examples of bounded size, in the dtype sums are made in."""
    size = _sum_dtype(x).itemsize * math.prod(x.shape[1:])
    for block in torch.split(x, max(1, BLOCK_BYTES // size)):
        yield _widened(block)


def _widened(x: Tensor) -> Tensor:
    return x.to(_sum_dtype(x))


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


_INPUT_MOMENTS = {
    "pointwise": _pointwise,
    "im2col": _im2col,
    "autocorrelation": _autocorrelation,
}
