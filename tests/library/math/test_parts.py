"""Parts of a factor against the whole factor with zeros between its parts."""

import pytest
import torch
from torch import Tensor

from natgrad.math.conv.geometry import ConvGeometry
from natgrad.math.conv.moments import (
    conv_input_moment,
    conv_input_parts,
    conv_output_moment,
    conv_output_parts,
)
from natgrad.math.parts import (
    cut,
    diagonal_parts,
    kronecker_values,
    on_left,
    on_right,
    stacked,
    with_padding,
    without_padding,
)
from natgrad.math.statistics import gram, input_moment


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def whole(parts: Tensor, stack: int, size: int) -> Tensor:
    """``(s, n, n)`` with the parts on its diagonal, one after another."""
    each = [torch.block_diag(*x) for x in parts.unflatten(0, (stack, -1))]
    return torch.stack(each)[:, :size, :size]


def some_parts(stack: int, parts: int, size: int, rows: int) -> Tensor:
    """Random parts of so many rows, the last of each matrix padded."""
    filled = [size] * (parts - 1) + [rows - (parts - 1) * size]
    return stacked([draw(1, n, n) for _ in range(stack) for n in filled], size)


@pytest.mark.parametrize(
    ("rows", "largest", "unit", "want"),
    [
        (9217, 1152, 1, (9, 1025)),
        (9217, None, 1, (1, 9217)),
        (1152, 1152, 9, (1, 1152)),
        (4608, 1152, 9, (4, 1152)),  # 512 channels of 9
        (4609, 1152, 9, (5, 927)),  # the bias is one more channel
        (10, 1, 1, (10, 1)),
        (19, 2, 9, (3, 9)),  # a channel stays whole
        (5, 2, 1, (3, 2)),
    ],
)
def test_a_factor_is_cut_into_few_and_equal_parts(
    rows: int, largest: int | None, unit: int, want: tuple[int, int]
) -> None:
    parts, size = cut(rows, largest, unit)
    assert (parts, size) == want
    assert 0 <= parts * size - rows < size


@pytest.mark.parametrize("rows", [6, 5])
@pytest.mark.parametrize("stack", [1, 2])
def test_products_with_parts_are_those_with_the_whole(stack: int, rows: int) -> None:
    torch.manual_seed(0)
    factor = some_parts(stack, 3, 2, rows)
    dense = whole(factor, stack, rows)
    for batch in ((), (4,)):
        x = draw(*batch, stack, 7, rows)
        torch.testing.assert_close(on_right(x, factor), x @ dense)
        torch.testing.assert_close(on_left(factor, x.mT), dense @ x.mT)


def test_products_of_values_leave_padding_out() -> None:
    right, left = torch.rand(6, 2), torch.rand(4, 3)
    values = kronecker_values(right, left, torch.empty(2, 5, 5))
    for i in range(2):
        want = torch.outer(left.reshape(2, -1)[i, :5], right.reshape(2, -1)[i, :5])
        torch.testing.assert_close(values[i], want)


@pytest.mark.parametrize("rows", [6, 5])
def test_padding_is_taken_off_and_put_back(rows: int) -> None:
    factor = some_parts(2, 3, 2, rows)
    values = factor.diagonal(dim1=1, dim2=2)
    for x in (factor, values):
        pieces = without_padding(x, 3, 6 - rows)
        assert len(pieces) == 1 + (rows < 6)
        assert pieces[-1].shape[-1] == (2 if rows == 6 else 1)
        torch.testing.assert_close(with_padding(pieces, 3), x, rtol=0, atol=0)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_the_parts_of_a_linear_moment(size: int, bias: bool) -> None:
    torch.manual_seed(0)
    rows = draw(11, 6)
    dense = input_moment(rows, bias=bias)
    parts = -(-dense.shape[-1] // size)
    want = diagonal_parts(dense, parts, size)
    torch.testing.assert_close(input_moment(rows, bias=bias, size=size), want)
    torch.testing.assert_close(
        gram(rows, size), input_moment(rows, bias=False, size=size)
    )


@pytest.mark.parametrize("method", ["pointwise", "im2col", "autocorrelation"])
@pytest.mark.parametrize("channels", [1, 2, 3])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("groups", [1, 2])
def test_the_parts_of_a_convolutions_moments(
    groups: int, bias: bool, channels: int, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    pointwise = method == "pointwise"
    kernel = (1, 1) if pointwise else (2, 3)
    padding = ((0, 0), (0, 0)) if pointwise else ((1, 0), (1, 1))
    geometry = ConvGeometry(
        kernel=kernel,
        stride=(1, 2),
        padding=padding,
        dilation=(1, 1),
        groups=groups,
        bias=bias,
    )
    x, g = draw(3, 4 * groups, 4, 5), draw(3, 4 * groups, 4, 3)
    dense = conv_input_moment(x, geometry)
    monkeypatch.setattr(
        "natgrad.math.conv.moments.choose_method", lambda *_, **__: method
    )
    size = channels * geometry.taps
    parts = -(-dense.shape[-1] // size)
    found = conv_input_parts(x, geometry, size)
    torch.testing.assert_close(found, diagonal_parts(dense, parts, size))
    want = diagonal_parts(conv_output_moment(g, groups), -(-4 // channels), channels)
    torch.testing.assert_close(conv_output_parts(g, groups, channels), want)


@pytest.mark.parametrize(("columns", "parts", "size"), [(4, 1, 4), (5, 2, 3)])
def test_a_factor_may_be_that_of_several_directions(
    columns: int, parts: int, size: int
) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 2, columns, dtype=torch.float64)
    factor = torch.randn(2 * parts, size, size, dtype=torch.float64)
    values = torch.randn(2 * parts, size, dtype=torch.float64)
    each = factor.unflatten(0, (2, parts)).repeat_interleave(3, 0).flatten(0, 1)
    own = values.unflatten(0, (2, parts)).repeat_interleave(3, 0).flatten(0, 1)
    torch.testing.assert_close(on_right(x, factor), on_right(x, each))
    left = torch.randn(6, 2, dtype=torch.float64)
    alone = kronecker_values(own, left, x)
    torch.testing.assert_close(kronecker_values(values, left, x), alone)
