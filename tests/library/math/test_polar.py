"""The polar factor: all forms of the iteration do the same to singular values."""

import pytest
import torch
from torch import Tensor

from natgrad.math import polar as module
from natgrad.math.polar import (
    FIRST,
    LEAST,
    MUON,
    SECOND,
    STEPS,
    gram_is_cheaper,
    newton_schulz,
    polar,
    quintics,
)
from natgrad.math.products import symmetric_product, triangular_product

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
    found = polar(x, STEPS)
    monkeypatch.setattr(module, "gram_is_cheaper", lambda *_: False)
    torch.testing.assert_close(found, polar(x, STEPS), rtol=0, atol=error)


@pytest.mark.parametrize(
    ("dtype", "error"), [(torch.float64, 1e-10), (torch.float32, 1e-3)]
)
@pytest.mark.parametrize("shape", [WIDE, (400, 420), (16, 40)])
@pytest.mark.parametrize("rank", [1.0, 0.25])
def test_singular_values_go_through_the_rational_functions(
    shape: tuple[int, int], rank: float, dtype: torch.dtype, error: float
) -> None:
    """By brute force, over four decades; where they are zero, rounding stays small."""
    rows, columns = shape
    count = int(rank * rows)
    values = torch.zeros(rows, dtype=torch.float64)
    values[:count] = torch.logspace(0, -4, count, dtype=torch.float64)
    x = with_singular_values(values, columns)
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    y = s / s.pow(4).sum().pow(1 / 4)
    for c, weights in (FIRST, SECOND):
        z = 1 / (1 + c * y * y)
        y = y * sum(w * z**i for i, w in enumerate(weights))
    want = ((u * y.unsqueeze(1)) @ v).to(dtype)
    for given, expected in ((x, want), (x.mT, want.mT)):
        found = polar(given.to(dtype))
        assert float(torch.linalg.matrix_norm(found - expected, 2)) < error


def test_the_rational_functions_are_near_one_on_three_decades() -> None:
    s = torch.logspace(0, -3, 100_001, dtype=torch.float64)
    for i, (c, weights) in enumerate((FIRST, SECOND)):
        z = 1 / (1 + c * s * s)
        s = s * sum(w * z**k for k, w in enumerate(weights))
        # rounding may have carried the largest beyond 1
        s = torch.cat((s, s.new_tensor([1.003]))) if i == 0 else s
    assert float((s - 1).abs().max()) < 1.28e-3


@pytest.mark.parametrize("shape", [(40, 60), (128, 512), (400, 420)])
@pytest.mark.parametrize(("steps", "least"), [(STEPS, LEAST), (3, 1e-2), (2, 0.1)])
def test_singular_values_go_through_the_quintics(
    shape: tuple[int, int], steps: int, least: float
) -> None:
    """By brute force, for all forms: direct and Gram, whole and symmetric products."""
    rows, columns = shape
    values = torch.logspace(0, -2, rows, dtype=torch.float64)
    x = with_singular_values(values, columns)
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    y = s / s.pow(4).sum().pow(1 / 4)
    for a, b, c in quintics(least, steps):
        y = a * y + b * y**3 + c * y**5
    found = polar(x, steps, least=least)
    torch.testing.assert_close(found, (u * y.unsqueeze(1)) @ v, rtol=0, atol=1e-9)


def test_small_and_square_matrices_are_iterated_directly() -> None:
    assert not gram_is_cheaper(16, 144, steps=6)
    assert not gram_is_cheaper(512, 512, steps=6)
    assert gram_is_cheaper(256, 2304, steps=6)


@pytest.mark.parametrize("size", [40, 400])
def test_symmetric_and_triangular_products_are_the_products(size: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, size, size, dtype=torch.float64)
    x = x + x.mT
    square = 0.5 * x + 2.0 * x @ x
    found = symmetric_product(x, x, x, beta=0.5, alpha=2.0)
    torch.testing.assert_close(found, square, rtol=0, atol=1e-9)
    root, v = x.triu(), torch.randn(2, size, size, dtype=torch.float64)
    for transposed in (False, True):
        want = v @ (root.mT if transposed else root)
        found = triangular_product(v, root, transposed=transposed)
        torch.testing.assert_close(found, want, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("dtype", "error"), [(torch.float64, 1e-12), (torch.float32, 5e-5)]
)
@pytest.mark.parametrize("shape", [WIDE, (32, 288), (16, 40)])
def test_muons_quintics_act_on_singular_values_in_both_forms(
    shape: tuple[int, int], dtype: torch.dtype, error: float
) -> None:
    """By brute force; also on values that a Gram matrix hides without a restart."""
    values = torch.logspace(0, -4, shape[0], dtype=torch.float64)
    x = with_singular_values(values, shape[1])
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    y = s / s.square().sum().sqrt()
    for a, b, c in MUON:
        y = a * y + b * y**3 + c * y**5
    want = ((u * y.unsqueeze(1)) @ v).to(dtype)
    for given, expected in ((x, want), (x.mT, want.mT)):
        found = newton_schulz(given.to(dtype))
        torch.testing.assert_close(found, expected, rtol=0, atol=error)


def test_a_matrix_that_is_not_finite_leaves_the_others_of_its_stack_alone() -> None:
    x = torch.randn(3, 140, 200, generator=torch.Generator().manual_seed(0))
    want = polar(x)
    for bad in (torch.nan, torch.inf):
        x[1, 3, 4] = bad
        found = polar(x)
        assert not found[1].isfinite().any()
        torch.testing.assert_close(found[::2], want[::2])
