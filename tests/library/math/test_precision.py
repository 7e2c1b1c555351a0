"""Second moments of what was rounded, against float64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from natgrad.math.conv.geometry import ConvGeometry
from natgrad.math.conv.moments import conv_input_moment, conv_output_moment
from natgrad.math.precision import rescaled, rounded
from natgrad.math.statistics import gram, input_moment, own_moment

HALF = (torch.bfloat16, torch.float16)
GEOMETRY = ConvGeometry(
    kernel=(3, 3), stride=(1, 1), padding=((1, 1), (1, 1)), dilation=(1, 1), bias=True
)
MOMENTS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "gram": ((50, 7), gram),
    "parts": ((50, 7), lambda x: gram(x, 3)),
    "inputs": ((50, 7), lambda x: input_moment(x, bias=True)),
    "panels": ((30, 200), gram),
    "images": ((4, 3, 6, 6), lambda x: conv_input_moment(x, GEOMETRY)),
    "outputs": ((4, 6, 5, 5), lambda x: conv_output_moment(x, 2)),
    "own": ((2, 5, 7), lambda x: own_moment(x, "right", diagonal=False)),
}


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return scale * torch.randn(shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("precision", HALF)
@pytest.mark.parametrize("name", MOMENTS)
def test_products_of_rounded_numbers_are_summed_in_float32(
    name: str, precision: torch.dtype
) -> None:
    shape, moment = MOMENTS[name]
    x = rounded(normal(*shape).float(), precision)
    assert x.dtype == precision
    found, wanted = moment(x), moment(x.double())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-4)
    # a sum in half precision would be this far off, and more
    away = (moment(normal(*shape)) - wanted).norm() / wanted.norm()
    assert 1e-5 < away < 1e-2


@pytest.mark.parametrize("scale", [1e-12, 1e-7, 1.0, 1e6])
def test_gradients_that_float16_would_lose_are_scaled(scale: float) -> None:
    g = normal(40, 6, scale=scale).float()
    half, times = rescaled(g, torch.float16)
    wanted = gram(g.double())
    found = gram(half).double() * float(times)
    assert (found - wanted).norm() < 2e-3 * wanted.norm()
    exact = torch.frexp(torch.as_tensor(times)).mantissa
    assert float(exact) == 0.5, "a power of two rounds nothing"
    plain, one = rescaled(g, torch.bfloat16)
    assert plain.dtype == torch.bfloat16
    assert one == 1.0


def test_what_is_not_finite_stays_so_and_indices_are_left_alone() -> None:
    large = torch.tensor([1e6, -1e6, torch.inf, torch.nan])
    limit = torch.finfo(torch.float16).max
    first, second, third, fourth = rounded(large, torch.float16).float().tolist()
    assert (first, second, third) == (limit, -limit, torch.inf)
    assert fourth != fourth
    for bad in (torch.inf, torch.nan):
        half, times = rescaled(torch.tensor([1.0, bad]), torch.float16)
        assert not half.isfinite().all()
        assert float(times) == 1.0
    half, times = rescaled(torch.zeros(3), torch.float16)
    assert float(half.abs().sum()) == 0.0
    assert float(times) == 1.0
    indices = torch.arange(3)
    assert rounded(indices, torch.float16) is indices
    assert rounded(large, None) is large
