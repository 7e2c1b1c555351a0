"""Summaries of spectra against all eigenvalues, in float64."""

import math

import pytest
import torch
from torch import Tensor

from natgrad.math import spectrum
from natgrad.math.packing import pack
from natgrad.math.spectrum import (
    POINTS,
    angle,
    change_rate,
    effective_rank,
    eigenvalues,
    lanczos,
    packed_norm,
    product_quantile,
    quantiles,
    share_above,
    summarise,
)


def with_spectrum(values: Tensor, seed: int = 0) -> Tensor:
    """Symmetric matrices (s, n, n) with the given eigenvalues (s, n)."""
    source = torch.Generator().manual_seed(seed)
    shape = (*values.shape, values.shape[-1])
    basis = torch.linalg.qr(torch.randn(shape, generator=source, dtype=torch.float64)).Q
    return (basis * values.unsqueeze(1)) @ basis.mT


def geometric(size: int, stack: int = 1, low: float = -6.0) -> Tensor:
    return torch.logspace(low, 1, size, dtype=torch.float64).repeat(stack, 1)


@pytest.mark.parametrize(("stack", "size"), [(1, 1), (1, 7), (5, 2), (3, 40)])
def test_a_small_summary_is_exact(stack: int, size: int) -> None:
    values = geometric(size, stack) * torch.arange(1.0, stack + 1).unsqueeze(1)
    largest, smallest, mean, square = summarise(with_spectrum(values))[:4].tolist()
    assert largest == pytest.approx(float(values.max()))
    assert smallest == pytest.approx(float(values.min()), abs=1e-12)
    assert mean == pytest.approx(float(values.mean()))
    assert square == pytest.approx(float(values.square().mean()))


def test_a_diagonal_is_its_own_spectrum() -> None:
    values = geometric(9, 2)
    dense = summarise(torch.diag_embed(values))
    assert torch.allclose(summarise(values), dense)
    assert torch.allclose(summarise(torch.diag_embed(values[:1]), values[1:]), dense)


@pytest.mark.parametrize("stack", [1, 3])
def test_lanczos_has_the_largest_and_is_close_below(stack: int) -> None:
    values = geometric(400, stack)
    x = with_spectrum(values)
    exact, estimate = torch.quantile(values[0], 0.5), summarise(x)
    assert float(estimate[0]) == pytest.approx(10.0, rel=1e-3)
    assert 0 <= estimate[1] - values.min() < 1e-3
    assert float(estimate[2]) == pytest.approx(float(values.mean()), rel=1e-9)
    assert float(estimate[3]) == pytest.approx(float(values.square().mean()), rel=1e-9)
    middle = float(estimate[4 + POINTS // 2])
    assert 0.25 * exact < middle < 4 * exact


def test_lanczos_with_all_steps_is_the_spectral_density() -> None:
    """Its moments are those of the matrix with respect to the start."""
    x = with_spectrum(geometric(12, low=-1.0))
    nodes, weights = lanczos(x, 12)
    assert torch.allclose(nodes.sort().values, geometric(12, low=-1.0))
    assert torch.allclose(weights.sum(1), torch.ones(1, dtype=torch.float64))


def test_lanczos_takes_a_low_rank_and_zero() -> None:
    values = torch.zeros(1, 200, dtype=torch.float64)
    assert torch.equal(lanczos(torch.diag_embed(values), 8)[0], values[:, :8])
    values[0, 0] = 5.0
    nodes, weights = eigenvalues(with_spectrum(values))
    assert float(nodes.max()) == pytest.approx(5.0)
    assert float(weights.sum()) == pytest.approx(1.0)


def test_looking_draws_no_random_number_of_the_run() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    summarise(with_spectrum(geometric(150)))
    assert torch.equal(torch.rand(3), expected)


def test_large_matrices_go_to_lanczos(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    original = spectrum.lanczos

    def counted(x: Tensor, steps: int) -> tuple[Tensor, Tensor]:
        calls.append(x.shape[-1])
        return original(x, steps)

    monkeypatch.setattr(spectrum, "lanczos", counted)
    for size in (spectrum.EXACT, spectrum.EXACT + 1):
        summarise(with_spectrum(geometric(size)))
    assert calls == [spectrum.EXACT + 1]


def test_quantiles_of_equal_weights() -> None:
    values = torch.arange(POINTS * 3.0, dtype=torch.float64)
    found = quantiles(values, torch.full_like(values, 1 / len(values)))
    assert torch.allclose(found, values[1::3])
    repeated = quantiles(values[:2], torch.tensor([0.25, 0.75], dtype=torch.float64), 4)
    assert torch.allclose(repeated[-1:], values[1:2])
    assert repeated[0] == 0.0


def test_of_a_kronecker_product() -> None:
    right, left = geometric(30, low=-2.0)[0], geometric(20, low=-3.0)[0]
    product = torch.outer(right, left).flatten()
    rank = float(product.sum() ** 2 / product.square().sum())
    parts = [
        effective_rank(float(v.mean()), float(v.square().mean()), len(v))
        for v in (right, left)
    ]
    assert math.prod(parts) == pytest.approx(rank)
    points = [summarise(v.unsqueeze(0))[4:] for v in (right, left)]
    exact = float(product.quantile(0.5))
    assert product_quantile(points[0], points[1]) == pytest.approx(exact, rel=0.1)
    share = float((product > 0.05).double().mean())
    assert share_above(points[0], points[1], 0.05) == pytest.approx(share, abs=0.03)


def test_effective_rank_counts_directions() -> None:
    assert effective_rank(1.0, 1.0, 8) == 8.0
    assert effective_rank(1 / 8, 1 / 8, 8) == 1.0
    assert effective_rank(0.0, 0.0, 8) == 0.0


@pytest.mark.parametrize(("stack", "size"), [(1, 1), (3, 2), (2, 9)])
def test_packed_norm_is_frobenius(stack: int, size: int) -> None:
    source = torch.Generator().manual_seed(size)
    x = torch.randn(stack, size, size, generator=source, dtype=torch.float64)
    x = x + x.mT
    assert float(packed_norm(pack(x), stack, size)) == pytest.approx(float(x.norm()))


def test_change_rate() -> None:
    two, four, zero = (torch.tensor(v, dtype=torch.float64) for v in (2.0, 4.0, 0.0))
    assert change_rate(two, four) == 0.5
    assert change_rate(two, zero) == 1.0
    assert change_rate(zero, zero) == 0.0


def test_angle_in_degrees() -> None:
    one = torch.ones((), dtype=torch.float64)
    a, b = torch.tensor([3.0, 0.0]), torch.tensor([2.0, 2.0])
    assert float(angle(a @ b, a.norm(), b.norm())) == pytest.approx(45.0, abs=1e-4)
    assert float(angle(-one, one, one)) == pytest.approx(180.0)
    assert float(angle(one * 0, one * 0, one)) == 0.0
