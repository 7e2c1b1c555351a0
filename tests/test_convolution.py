"""Every method is checked in float64 against a loop over output positions."""

import itertools

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from natgrad.math import convolution
from natgrad.math.convolution import (
    ConvGeometry,
    conv_input_moment,
    positions,
)

LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}


def looped_moment(x: Tensor, geometry: ConvGeometry) -> Tensor:
    """Patch by patch, as the definition says."""
    pads = [side for pair in reversed(geometry.padding) for side in pair]
    mode = geometry.padding_mode.replace("zeros", "constant")
    padded = F.pad(x, pads, mode=mode) if any(pads) else x
    counts = [
        (length - d * (k - 1) - 1) // s + 1
        for length, k, s, d in zip(
            padded.shape[2:],
            geometry.kernel,
            geometry.stride,
            geometry.dilation,
            strict=True,
        )
    ]
    total = torch.zeros((), dtype=x.dtype)
    for position in itertools.product(*map(range, counts)):
        window = tuple(
            slice(q * s, q * s + d * (k - 1) + 1, d)
            for q, k, s, d in zip(
                position,
                geometry.kernel,
                geometry.stride,
                geometry.dilation,
                strict=True,
            )
        )
        patch = padded[(slice(None), slice(None), *window)]
        patch = patch.reshape(x.shape[0], geometry.groups, -1)
        if geometry.bias:
            patch = torch.cat([patch, torch.ones_like(patch[..., :1])], dim=-1)
        total = total + torch.einsum("ngi,ngj->gij", patch, patch)
    return total


def assert_close(x: Tensor, actual: Tensor, expected: Tensor, tolerance: float = 1e-12):
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    # Patches may read nothing but padding and leave zeros: the input sets the scale.
    scale = torch.maximum(expected.abs().max(), x.square().sum())
    error = (actual - expected).abs().max() / scale
    assert error <= tolerance, f"relative error {error:.2e}"


def make_geometry(kernel: int | tuple[int, ...], **changes) -> ConvGeometry:
    kernel = (kernel, kernel) if isinstance(kernel, int) else kernel
    dims = len(kernel)
    default = {
        "stride": (1,) * dims,
        "padding": ((0, 0),) * dims,
        "dilation": (1,) * dims,
    }
    return ConvGeometry(kernel=kernel, **{**default, **changes})


def random_input(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) + 0.5


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensor, ConvGeometry]:
    dims = draw(st.sampled_from([1, 2, 2, 2, 3]))
    largest = 3 if dims == 3 else 5

    def each(strategy: st.SearchStrategy) -> tuple:
        return tuple(draw(strategy) for _ in range(dims))

    mode = draw(st.sampled_from([*convolution.PADDING_MODES, "zeros", "zeros"]))
    sides = st.integers(0, 4 if mode == "zeros" else 1)
    geometry = ConvGeometry(
        kernel=each(st.integers(1, largest)),
        stride=each(st.integers(1, 3)) if draw(st.booleans()) else (1,) * dims,
        padding=each(st.tuples(sides, sides)),
        dilation=each(st.integers(1, 3)),
        groups=draw(st.integers(1, 3)),
        padding_mode=mode,
        bias=draw(st.booleans()),
    )
    # From the smallest image with one output position upwards, so that images smaller
    # than the padding and than the kernel's reach are common.
    spatial = [
        max(2 if mode != "zeros" else 1, 1 + reach - sum(pads))
        + draw(st.integers(0, 5))
        for reach, pads in zip(geometry.reach, geometry.padding, strict=True)
    ]
    channels = geometry.groups * draw(st.integers(1, 2))
    x = random_input(draw(st.integers(1, 3)), channels, *spatial)
    if dims > 1 and draw(st.booleans()):
        x = x.contiguous(memory_format=LAYOUTS[x.dim()])
    return x, geometry


@settings(max_examples=400, deadline=None)
@given(cases())
def test_methods_agree_with_the_loop(case: tuple[Tensor, ConvGeometry]):
    x, geometry = case
    expected = looped_moment(x, geometry)
    for method in ("im2col", "autocorrelation", "auto"):
        assert_close(x, conv_input_moment(x, geometry, method), expected)


@settings(max_examples=40, deadline=None)
@given(cases())
def test_positions_is_the_corner(case: tuple[Tensor, ConvGeometry]):
    x, geometry = case
    weight = x.new_zeros(
        geometry.groups, x.shape[1] // geometry.groups, *geometry.kernel
    )
    pads = [side for pair in reversed(geometry.padding) for side in pair]
    convolve = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[geometry.dims]
    y = convolve(
        F.pad(x, pads),
        weight,
        stride=geometry.stride,
        dilation=geometry.dilation,
        groups=geometry.groups,
    )
    assert positions(x.shape, geometry) == y.numel() // geometry.groups
