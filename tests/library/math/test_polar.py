"""The polar factor by its Gram matrix equals the iteration on the whole matrix."""

import pytest
import torch
from torch import Tensor

from natgrad.math import polar as module
from natgrad.math.polar import gram_is_cheaper, polar

WIDE = (128, 512)


def with_singular_values(values: Tensor, columns: int) -> Tensor:
    """A matrix ``(1, m, columns)`` in float64 with these m singular values."""
    torch.manual_seed(0)
    m = len(values)
    left, right = (
        torch.linalg.qr(torch.randn(n, m, dtype=torch.float64))[0] for n in (m, columns)
    )
    return (left * values @ right.mT)[None]


@pytest.mark.parametrize("tall", [False, True])
def test_the_gram_form_is_the_polar_factor_of_the_svd(tall: bool) -> None:
    values = torch.linspace(1.0, 0.05, WIDE[0], dtype=torch.float64)
    x = with_singular_values(values, WIDE[1])
    x = x.mT if tall else x
    assert gram_is_cheaper(*WIDE, steps=12)
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    torch.testing.assert_close(polar(x, steps=12), u @ v, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("dtype", "error"), [(torch.float64, 1e-12), (torch.float32, 5e-5)]
)
def test_the_gram_form_treats_singular_values_as_the_direct_one(
    dtype: torch.dtype, error: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that rounding in the Gram matrix would hide: four decades."""
    values = torch.logspace(0, -4, WIDE[0], dtype=torch.float64)
    x = with_singular_values(values, WIDE[1]).to(dtype)
    found = polar(x)
    monkeypatch.setattr(module, "gram_is_cheaper", lambda *_: False)
    torch.testing.assert_close(found, polar(x), rtol=0, atol=error)


def test_small_and_square_matrices_are_iterated_directly() -> None:
    assert not gram_is_cheaper(16, 144, steps=6)
    assert not gram_is_cheaper(512, 512, steps=6)
    assert gram_is_cheaper(256, 2304, steps=6)
