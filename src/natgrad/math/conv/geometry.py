"""What a convolution reads where."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

PADDING_MODES = ("zeros", "reflect", "replicate", "circular")


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


def is_pointwise(geometry: ConvGeometry) -> bool:
    """Whether each output reads one pixel, and always one of the image."""
    return geometry.taps == 1 and not any(map(any, geometry.padding))


def pad_explicitly(x: Tensor, geometry: ConvGeometry) -> tuple[Tensor, ConvGeometry]:
    """The padded input, and the geometry that reads it without padding."""
    padded = pad(x, geometry.padding, geometry.padding_mode)
    free = ((0, 0),) * geometry.dims
    return padded, replace(geometry, padding=free, padding_mode="zeros")


def pad(
    x: Tensor, padding: Sequence[tuple[int, int]], mode: str = "constant"
) -> Tensor:
    """``x`` with (before, after) pixels added in each dim; itself if there are none."""
    flat = list(itertools.chain.from_iterable(reversed(padding)))
    return F.pad(x, flat, mode=mode) if any(flat) else x


class Strip(NamedTuple):
    """Positions beyond the padding: where of ``dim`` they read, and which offsets."""

    dim: int
    start: int
    length: int
    taps: tuple[slice, ...]
    geometry: ConvGeometry


@lru_cache(maxsize=1024)
def border_strips(shape: tuple[int, ...], geometry: ConvGeometry) -> tuple[Strip, ...]:
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
            strips.append(Strip(dim, start + step * low, length, tuple(taps), part))
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
