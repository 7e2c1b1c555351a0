"""Packing is checked against a loop over the upper triangle."""

import pytest
import torch
from torch import Tensor

from natgrad.math import packing
from natgrad.math.packing import (
    pack,
    pack_upper,
    packed_size,
    unpack,
    unpack_upper,
)

SHAPES = [(1, 1), (1, 2), (3, 2), (1, 7), (4, 5), (2, 130), (1, 300)]


def symmetric(stack: int, size: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(stack * 1000 + size)
    x = torch.randn(stack, size, size, generator=generator, dtype=dtype)
    return x + x.mT


def looped(x: Tensor) -> Tensor:
    rows = [matrix[i, i:] for matrix in x for i in range(matrix.shape[0])]
    return torch.cat(rows)


@pytest.fixture(params=["index", "views"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "views":
        monkeypatch.setattr(packing, "SMALL", 0)
    return request.param


@pytest.mark.parametrize(("stack", "size"), SHAPES)
def test_pack_is_the_upper_triangle_row_by_row(path: str, stack: int, size: int):
    x = symmetric(stack, size)
    flat = pack(x)
    assert flat.shape == (stack * packed_size(size),)
    assert torch.equal(flat, looped(x))


@pytest.mark.parametrize(("stack", "size"), SHAPES)
def test_unpack_undoes_pack(path: str, stack: int, size: int):
    x = symmetric(stack, size)
    assert torch.equal(unpack(pack(x), stack, size), x)


@pytest.mark.parametrize(("stack", "size"), SHAPES)
def test_triangles_come_back_with_zeros_below(path: str, stack: int, size: int):
    x = symmetric(stack, size)
    rows = pack_upper(x)
    assert rows.shape == (stack, packed_size(size) + 1)
    assert torch.equal(unpack_upper(rows, size), x.triu())


def test_only_the_upper_triangle_is_read(path: str):
    x = symmetric(2, 9)
    spoiled = torch.where(torch.ones(9, 9).tril(-1).bool(), torch.nan, x)
    assert torch.equal(pack(spoiled), pack(x))


def test_strided_input(path: str):
    x = symmetric(3, 12)[::2, :6, :6]
    assert not x.is_contiguous()
    assert torch.equal(pack(x), looped(x))
    flat = pack(x).repeat_interleave(2)[::2]
    assert torch.equal(unpack(flat, 2, 6), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtype_is_kept(path: str, dtype: torch.dtype):
    x = symmetric(2, 6, dtype)
    assert pack(x).dtype == dtype
    assert torch.equal(unpack(pack(x), 2, 6), x)


def test_out_is_filled_and_returned(path: str):
    x = symmetric(2, 6)
    buffer = torch.full((2 * 21 + 5,), -1.0, dtype=x.dtype)
    flat = pack(x, out=buffer[3:45])
    assert flat.data_ptr() == buffer[3:].data_ptr()
    assert torch.equal(flat, looped(x))
    assert (buffer[:3] == -1).all()
    assert (buffer[45:] == -1).all()
    square = torch.full_like(x, torch.nan)
    assert unpack(flat, 2, 6, out=square) is square
    assert torch.equal(square, x)


def test_bad_shapes_say_what_is_legal(path: str):
    x = symmetric(2, 6)
    with pytest.raises(ValueError, match=r"Must be \(s, n, n\)"):
        pack(x[0])
    with pytest.raises(ValueError, match=r"Must be \(42,\)"):
        unpack(pack(x)[1:], 2, 6)
    with pytest.raises(ValueError, match="contiguous"):
        pack(x, out=x.new_empty(84)[::2])
    with pytest.raises(ValueError, match=r"Must be torch.float64"):
        pack(x, out=torch.empty(42))
