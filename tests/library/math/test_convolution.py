"""Every method is checked in float64 against a loop over output positions."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from natgrad.math import products
from natgrad.math.conv import moments as convolution
from natgrad.math.conv.correlation import correlate_images, correlate_spectra
from natgrad.math.conv.geometry import PADDING_MODES
from natgrad.math.conv.moments import (
    ConvGeometry,
    choose_method,
    conv_input_moment,
    conv_output_moment,
    positions,
)
from natgrad.math.tuning import CPU, PLAIN

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


def make_geometry(kernel: int | tuple[int, ...], **changes: Any) -> ConvGeometry:
    kernel = (kernel, kernel) if isinstance(kernel, int) else kernel
    dims = len(kernel)
    default: dict[str, Any] = {
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

    mode = draw(st.sampled_from([*PADDING_MODES, "zeros", "zeros"]))
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


@settings(max_examples=200, deadline=None)
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


@settings(max_examples=100, deadline=None)
@given(cases())
def test_every_way_to_correlate_agrees(case: tuple[Tensor, ConvGeometry]):
    x, geometry = case
    geometry = replace(geometry, groups=1, stride=(1,) * geometry.dims)
    expected = correlate_images(x, geometry)
    for spectral in {geometry.dims, geometry.dims - 1} - {0}:
        actual = correlate_spectra(x, geometry, spectral)
        assert_close(x, actual, expected)


@pytest.mark.parametrize("stride", [(1, 1), (2, 3)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("groups", [1, 3])
def test_pointwise_agrees_with_the_loop(
    stride: tuple[int, int], bias: bool, groups: int
):
    x = random_input(3, 6, 5, 7)
    geometry = make_geometry(1, stride=stride, bias=bias, groups=groups)
    assert choose_method(x.shape, geometry) == "pointwise"
    expected = looped_moment(x, geometry)
    assert_close(x, conv_input_moment(x, geometry, "pointwise"), expected)
    assert_close(x, conv_input_moment(x, geometry, "im2col"), expected)


def test_padding_wider_than_the_image_reads_rows_of_zeros():
    x = random_input(2, 2, 1, 2)
    geometry = make_geometry(3, padding=((4, 4), (4, 3)), bias=True)
    expected = looped_moment(x, geometry)
    for method in ("im2col", "autocorrelation"):
        assert_close(x, conv_input_moment(x, geometry, method), expected)


@pytest.mark.parametrize("method", ["im2col", "autocorrelation"])
def test_many_small_blocks_add_up(method: str, monkeypatch: pytest.MonkeyPatch):
    x = random_input(7, 3, 6, 5)
    geometry = make_geometry(3, padding=((1, 1), (1, 1)), bias=True)
    expected = looped_moment(x, geometry)
    tuning = replace(CPU, block_bytes=1000, panel=4)
    monkeypatch.setattr(products, "tuning_of", lambda _: tuning)
    assert_close(x, conv_input_moment(x, geometry, method, tuning), expected)
    g = x.flatten(2)
    outer = torch.einsum("nct,ndt->cd", g, g)
    assert_close(x, conv_output_moment(x), outer[None])


def test_constants_of_the_cpu_do_not_decide_elsewhere():
    """One whole product of im2col's patches; the meta device stands for a GPU."""
    geometry = make_geometry(3, padding=((1, 1), (1, 1)), bias=True)
    called: dict[str, list[str]] = {}
    for device in ("cpu", "meta"):
        x = torch.empty(8, 64, 32, 32, device=device)
        with torch.profiler.profile() as found:
            conv_input_moment(x, geometry, "im2col")
        called[device] = [e.key for e in found.key_averages()]
    assert "aten::addmm_" in called["cpu"]
    assert "aten::baddbmm_" in called["meta"]
    assert "aten::addmm_" not in called["meta"]
    shape = (8, 64, 32, 32)
    assert choose_method(shape, geometry) == "autocorrelation"
    assert choose_method(shape, geometry, PLAIN) == "im2col"
    assert choose_method(shape, make_geometry(1), PLAIN) == "pointwise"


def test_patches_stay_within_a_block():
    x = random_input(5, 3, 9, 8)
    geometry = make_geometry(3)
    tuning = replace(CPU, block_bytes=4000)
    blocks = list(convolution._patch_blocks(x, geometry, tuning))
    assert sum(block.numel() for block in blocks) == 5 * 27 * 7 * 6
    assert max(block.numel() for block in blocks) * x.element_size() <= 4000


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("method", ["im2col", "autocorrelation", "auto"])
def test_low_precision_is_summed_in_float32(method: str, dtype: torch.dtype):
    x = random_input(4, 3, 8, 7, dtype=dtype)
    geometry = make_geometry(3, padding=((1, 1), (1, 1)), bias=True)
    expected = looped_moment(x.double(), geometry)
    actual = conv_input_moment(x, geometry, method)
    assert actual.dtype == torch.float32
    assert_close(x.double(), actual.double(), expected, 1e-6)


@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("spatial", [(9,), (5, 3), (2, 3, 4)])
@pytest.mark.parametrize("channels_last", [False, True])
def test_output_moment(groups: int, spatial: tuple[int, ...], channels_last: bool):
    g = random_input(4, 6, *spatial)
    if channels_last and g.dim() > 3:
        g = g.contiguous(memory_format=LAYOUTS[g.dim()])
    rows = g.reshape(4, groups, 6 // groups, -1)
    expected = torch.einsum("ngit,ngjt->gij", rows, rows)
    assert_close(g, conv_output_moment(g, groups), expected)
    assert conv_output_moment(g.bfloat16(), groups).dtype == torch.float32


def test_results_are_exactly_symmetric():
    x = random_input(4, 8, 9, 9, dtype=torch.float32)
    geometry = make_geometry(3, padding=((1, 1), (1, 1)))
    moment = conv_input_moment(x, geometry, "im2col")
    assert torch.equal(moment, moment.mT)
    assert torch.equal(conv_output_moment(x), conv_output_moment(x).mT)


@pytest.mark.parametrize(
    ("shape", "geometry", "method"),
    [
        ((128, 16, 32, 32), make_geometry(3, padding=((1, 1),) * 2), "autocorrelation"),
        ((128, 16, 32, 32), make_geometry(3, stride=(2, 2)), "im2col"),
        ((8, 3, 224, 224), make_geometry(7, stride=(2, 2)), "autocorrelation"),
        ((8, 512, 7, 7), make_geometry(3, padding=((1, 1),) * 2), "im2col"),
        ((8, 256, 14, 14), make_geometry(1), "pointwise"),
    ],
)
def test_auto_follows_what_was_measured(
    shape: tuple[int, ...], geometry: ConvGeometry, method: str
):
    assert choose_method(shape, geometry) == method


def test_errors_name_the_value_and_what_is_legal():
    x = random_input(2, 4, 5, 5)
    with pytest.raises(ValueError, match=r"Invalid stride=\(0, 1\)"):
        make_geometry(3, stride=(0, 1))
    with pytest.raises(ValueError, match=r"Invalid padding_mode='same'"):
        make_geometry(3, padding_mode="same")
    with pytest.raises(ValueError, match=r"Invalid method='fast'"):
        conv_input_moment(x, make_geometry(3), "fast")
    with pytest.raises(ValueError, match="divisible by 3"):
        conv_input_moment(x, make_geometry(3, groups=3))
    with pytest.raises(ValueError, match="Smaller than the kernel"):
        conv_input_moment(x, make_geometry(7))
    with pytest.raises(ValueError, match="Invalid method='pointwise'"):
        conv_input_moment(x, make_geometry(3), "pointwise")
