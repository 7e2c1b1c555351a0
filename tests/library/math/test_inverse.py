"""Damped inverses and eigendecompositions, and the ladder when they fail."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.toys import backward, mlp, parameters, same, sgd, train
from torch import Tensor

import natgrad
from natgrad.math.inverse import (
    JITTER,
    InverseError,
    damped_from_eigen,
    damped_inverses,
    eigendecompositions,
    pi_split,
    split_damping,
    track,
)

F32, F64 = torch.float32, torch.float64


def psd(stack: int, size: int, dtype: torch.dtype = F64, seed: int = 0) -> Tensor:
    source = torch.Generator().manual_seed(seed + 100 * size)
    x = torch.randn(stack, size, size + 2, generator=source, dtype=F64)
    return (x @ x.mT / size).to(dtype)


def one(matrix: Tensor, damping: float) -> Tensor:
    (result,) = damped_inverses([matrix], [damping])
    assert isinstance(result, Tensor)
    return result


def exact(matrix: Tensor, damping: float) -> Tensor:
    if matrix.dim() == 2:
        return 1 / (matrix.double() + damping)
    eye = torch.eye(matrix.shape[-1], dtype=F64)
    return torch.linalg.inv(matrix.double() + damping * eye)


# -- against torch.linalg -------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 65])
@pytest.mark.parametrize("stack", [1, 4])
@pytest.mark.parametrize("damping", [1e-3, 2.0])
def test_damped_inverse(size: int, stack: int, damping: float) -> None:
    x = psd(stack, size)
    before = x.clone()
    torch.testing.assert_close(one(x, damping), exact(x, damping))
    assert torch.equal(x, before)


def test_an_inverse_is_stored_by_rows_and_exactly_symmetric() -> None:
    """So that neither sending it nor a product with it copies it first."""
    for inverse in damped_inverses([psd(3, 6), psd(1, 300)], [0.1, 0.1]):
        assert isinstance(inverse, Tensor)
        assert inverse.is_contiguous()
        assert torch.equal(inverse, inverse.mT)


def test_a_damping_beyond_the_dtype_is_inverted_in_float64() -> None:
    matrix = psd(2, 3, F32)
    found = one(matrix, 1e39)
    wanted = 1e-39 / JITTER * torch.eye(3).expand(2, 3, 3)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=0.0)


def test_diagonal() -> None:
    x = torch.tensor([[0.0, 1.0, 4.0]], dtype=F64)
    torch.testing.assert_close(one(x, 0.5), exact(x, 0.5))


def test_many_at_once_are_the_same_as_one_by_one() -> None:
    sizes = [(1, 3), (2, 3), (1, 70), (3, 2), (1, 70), (2, 1), (1, 3)]
    matrices = [psd(s, n, seed=i) for i, (s, n) in enumerate(sizes)]
    matrices.append(torch.rand(2, 3, dtype=F64))
    dampings = [0.1 * (i + 1) for i in range(len(matrices))]
    results = damped_inverses(matrices, dampings)
    for result, x, damping in zip(results, matrices, dampings, strict=True):
        assert isinstance(result, Tensor)
        torch.testing.assert_close(result, exact(x, damping))


def test_equal_small_sizes_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []
    cholesky_ex = torch.linalg.cholesky_ex

    def counted(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        shapes.append(tuple(x.shape))
        return cholesky_ex(x, *args, **kwargs)

    monkeypatch.setattr(torch.linalg, "cholesky_ex", counted)
    sizes = [(1, 5), (2, 5), (1, 8), (1, 65), (1, 65)]
    damped_inverses([psd(s, n) for s, n in sizes], [0.1] * 5)
    assert sorted(shapes) == [(1, 8, 8), (1, 65, 65), (1, 65, 65), (3, 5, 5)]


def test_nothing_to_invert() -> None:
    assert damped_inverses([], []) == []
    assert eigendecompositions([]) == []


@pytest.mark.parametrize("size", [1, 2, 5, 40])
@pytest.mark.parametrize("stack", [1, 3])
def test_eigendecomposition(size: int, stack: int) -> None:
    x = psd(stack, size)
    ((vectors, values),) = pairs(eigendecompositions([x]))
    torch.testing.assert_close(values, torch.linalg.eigvalsh(x))
    torch.testing.assert_close(vectors @ torch.diag_embed(values) @ vectors.mT, x)
    damped = damped_from_eigen(vectors, values, 0.3)
    torch.testing.assert_close(damped, exact(x, 0.3))


def test_eigendecomposition_of_a_diagonal_has_no_vectors() -> None:
    x = torch.tensor([[2.0, 0.0, 1.0]], dtype=F64)
    ((vectors, values),) = pairs(eigendecompositions([x]))
    assert vectors.numel() == 0
    assert torch.equal(values, x)
    torch.testing.assert_close(damped_from_eigen(vectors, values, 0.5), exact(x, 0.5))


def test_eigenvalues_below_zero_are_rounding_errors() -> None:
    x = torch.diag_embed(torch.tensor([[-1e-9, 1.0]], dtype=F64))
    ((_, values),) = pairs(eigendecompositions([x]))
    assert values.tolist() == [[0.0, 1.0]]


def test_a_tracked_basis_stays_where_it_is_right_and_comes_to_it_elsewhere() -> None:
    x = psd(2, 6)
    exact_one = pairs(eigendecompositions([x]))[0]
    vectors, values = track(x, exact_one)
    torch.testing.assert_close(values, exact_one[1])
    torch.testing.assert_close(vectors.abs(), exact_one[0].abs())
    found = pairs(eigendecompositions([psd(2, 6, seed=1)]))[0]
    for _ in range(2000):
        found = track(x, found)
    torch.testing.assert_close(
        found[0] @ torch.diag_embed(found[1]) @ found[0].mT, x, rtol=1e-8, atol=1e-8
    )


def test_eigenvalues_of_a_tracked_basis_are_off_by_the_square() -> None:
    x = psd(1, 5)
    vectors, values = pairs(eigendecompositions([x]))[0]
    skew = torch.randn(5, 5, dtype=F64, generator=torch.Generator().manual_seed(0))
    errors: list[float] = []
    for off in (1e-3, 1e-4):
        turned = vectors @ torch.linalg.matrix_exp(off * (skew - skew.T))
        found = track(x, (turned, values))[1]
        errors.append(float((found - values).abs().max()))
    assert 50 < errors[0] / errors[1] < 200


def test_a_basis_that_cannot_be_tracked_is_made_anew() -> None:
    x, diagonal = psd(1, 4), torch.rand(1, 4, dtype=F64)
    lost = torch.full((1, 4, 4), torch.nan, dtype=F64), torch.ones(1, 4, dtype=F64)
    none = torch.empty(0, dtype=F64), torch.ones(1, 4, dtype=F64)
    exact_one = pairs(eigendecompositions([x]))[0]
    found, flat, first = pairs(
        eigendecompositions([x, diagonal, x], [lost, none, None])
    )
    for pair in (found, first):
        assert torch.equal(pair[0], exact_one[0])
        assert torch.equal(pair[1], exact_one[1])
    assert flat[0].numel() == 0
    assert torch.equal(flat[1], diagonal)


def pairs(results: list[Any]) -> list[tuple[Tensor, Tensor]]:
    assert not any(isinstance(x, InverseError) for x in results)
    return results


def test_pi_split() -> None:
    """SP-NGD, eq. 12: the parts multiply to lambda, their ratio is pi squared."""
    right, left = split_damping(0.04, pi_split(9.0, 4.0))
    assert right * left == pytest.approx(0.04)
    assert right / left == pytest.approx(9.0 / 4.0)


@pytest.mark.parametrize(
    ("right", "left"), [(0.0, 1.0), (1.0, 0.0), (math.nan, 1.0), (math.inf, 1.0)]
)
def test_pi_of_a_dead_layer_is_one(right: float, left: float) -> None:
    assert pi_split(right, left) == 1.0


# -- the ladder -----------------------------------------------------------------------


def test_jitter_helps_a_matrix_that_is_not_quite_positive() -> None:
    for x in (torch.diag_embed(torch.tensor([[-0.5, 1.0, 2.0]], dtype=F64)),):
        torch.testing.assert_close(one(x, 0.1), exact(x, JITTER * 0.1))


def test_jitter_helps_a_singular_matrix_without_damping() -> None:
    x = torch.ones(1, 4, 4)
    result = one(x, 0.0)
    assert torch.isfinite(result).all()
    assert float(result.diagonal(dim1=-2, dim2=-1).min()) > 0


@pytest.mark.parametrize("size", [1, 2])
def test_closed_forms_climb_the_ladder_too(size: int) -> None:
    x = torch.diag_embed(torch.tensor([[-0.5, 1.0][:size]], dtype=F64))
    torch.testing.assert_close(one(x, 0.1), exact(x, JITTER * 0.1))


def test_one_bad_matrix_in_a_batch_leaves_the_others_alone() -> None:
    good, bad = psd(1, 4), torch.full((1, 4, 4), math.nan, dtype=F64)
    first, second, third = damped_inverses([good, bad, good], [0.1, 0.1, 0.1])
    assert isinstance(second, InverseError)
    for x in (first, third):
        assert isinstance(x, Tensor)
        torch.testing.assert_close(x, exact(good, 0.1))


def test_the_error_names_shape_and_damping() -> None:
    (error,) = damped_inverses([torch.full((1, 3, 3), math.nan)], [0.25])
    assert isinstance(error, InverseError)
    assert "(1, 3, 3)" in str(error)
    assert "0.25" in str(error)


Breaks = Callable[[Tensor], bool]


def break_eigh(monkeypatch: pytest.MonkeyPatch, breaks: Breaks) -> list[Tensor]:
    """Let eigh fail on some matrices; returns what it was called with."""
    calls: list[Tensor] = []
    eigh = torch.linalg.eigh

    def flaky(x: Tensor) -> Any:
        calls.append(x)
        if breaks(x):
            raise torch.linalg.LinAlgError("forced")
        return eigh(x)

    monkeypatch.setattr(torch.linalg, "eigh", flaky)
    return calls


def break_cholesky(monkeypatch: pytest.MonkeyPatch, breaks: Breaks) -> list[Tensor]:
    """Let Cholesky fail on some matrices; returns what it was called with."""
    calls: list[Tensor] = []
    cholesky_ex = torch.linalg.cholesky_ex

    def flaky(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        calls.append(x)
        factor, info = cholesky_ex(x, *args, **kwargs)
        return factor, torch.ones_like(info) if breaks(x) else info

    monkeypatch.setattr(torch.linalg, "cholesky_ex", flaky)
    return calls


def test_cholesky_fails_once(monkeypatch: pytest.MonkeyPatch) -> None:
    x = psd(1, 4, F32)
    plain = x.diagonal(dim1=-2, dim2=-1) + 0.01
    calls = break_cholesky(
        monkeypatch, lambda m: torch.equal(m.diagonal(dim1=-2, dim2=-1), plain)
    )
    result = one(x, 0.01)
    assert {c.dtype for c in calls} == {F32}
    torch.testing.assert_close(result, exact(x, JITTER * 0.01).float())


def test_cholesky_fails_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    x = psd(1, 4, F32)
    calls = break_cholesky(monkeypatch, lambda m: m.dtype == F32)
    result = one(x, 0.01)
    assert [c.dtype for c in calls][-2:] == [F32, F64]
    assert result.dtype == F32
    torch.testing.assert_close(result, exact(x, JITTER * 0.01).float())


def test_cholesky_always_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    break_cholesky(monkeypatch, lambda _: True)
    (result,) = damped_inverses([psd(1, 4)], [0.01])
    assert isinstance(result, InverseError)


def test_eigh_fails_once(monkeypatch: pytest.MonkeyPatch) -> None:
    x = psd(1, 4, F32)
    calls = break_eigh(monkeypatch, lambda m: torch.equal(m, x))
    # large enough to see whether it is taken out of the eigenvalues again
    monkeypatch.setattr("natgrad.math.inverse.JITTER", 1e4)
    ((vectors, values),) = pairs(eigendecompositions([x]))
    assert [c.dtype for c in calls] == [F32, F32]
    assert not torch.equal(calls[1], x)
    torch.testing.assert_close(vectors @ torch.diag_embed(values) @ vectors.mT, x)


def test_eigh_fails_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    x = psd(1, 4, F32)
    calls = break_eigh(monkeypatch, lambda m: m.dtype == F32)
    ((vectors, values),) = pairs(eigendecompositions([x]))
    assert [c.dtype for c in calls] == [F32, F32, F64]
    assert vectors.dtype == values.dtype == F32
    torch.testing.assert_close(vectors @ torch.diag_embed(values) @ vectors.mT, x)


def test_eigh_always_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = break_eigh(monkeypatch, lambda _: True)
    (result,) = eigendecompositions([psd(1, 4)])
    assert isinstance(result, InverseError)
    assert len(calls) == 3


# -- the ladder's end, through KFAC and SPNGD -----------------------------------------

BREAK = {"eigen": break_eigh, "factored": break_cholesky}
# 0/A is the only statistic of this size
SIZE = 6


@pytest.mark.parametrize("style", ["eigen", "factored"])
def test_the_last_good_inverse_is_kept(
    style: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = mlp()
    optimizer, kfac = sgd(
        model, rule=natgrad.Kronecker(style=style), refresh=natgrad.Every(1, 1)
    )
    train(model, optimizer, range(2))
    state = kfac.engine.statistics.states["0/A"]
    good = state.inverse
    assert good is not None
    with monkeypatch.context() as patch:
        BREAK[style](patch, lambda x: x.shape[-1] == SIZE)
        backward(model, 2)
        with pytest.warns(UserWarning, match=r"0/A.*size 6.*1 time.*last good"):
            optimizer.step()
        assert state.inverse is good
        assert kfac.health()["failures"] == {"0/A": 1}
        other = kfac.engine.statistics.states["0/G"]
        assert other.failures == 0
    before = parameters(model)
    train(model, optimizer, range(3, 4))
    assert state.inverse is not good
    assert kfac.health()["failures"] == {}
    assert not same(before, parameters(model))
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize("style", ["eigen", "factored"])
def test_three_failures_in_a_row_are_an_error(
    style: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = mlp()
    optimizer, kfac = sgd(
        model, rule=natgrad.Kronecker(style=style), refresh=natgrad.Every(1, 1)
    )
    train(model, optimizer, range(2))
    BREAK[style](monkeypatch, lambda x: x.shape[-1] == SIZE)
    for step in (2, 3):
        with pytest.warns(UserWarning, match=r"0/A"):
            train(model, optimizer, range(step, step + 1))
    before = parameters(model)
    backward(model, 4)
    with pytest.raises(InverseError, match=r"0/A.*3 time.*damping"):
        optimizer.step()
    assert same(before, parameters(model))
    assert kfac.health()["failures"] == {"0/A": 3}


def test_failures_must_be_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    optimizer, _ = sgd(model, refresh=natgrad.Every(1, 1))
    for step in range(12):
        with monkeypatch.context() as patch:
            backward(model, step)
            if step % 3 == 2:
                optimizer.step()
                continue
            break_eigh(patch, lambda x: x.shape[-1] == SIZE)
            with pytest.warns(UserWarning, match=r"0/A"):
                optimizer.step()


def test_without_a_good_inverse_the_plain_gradient_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = mlp()
    kfac = natgrad.KFAC(model, length=natgrad.Free())
    break_eigh(monkeypatch, lambda x: x.shape[-1] == SIZE)
    backward(model, 0)
    plain = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    with pytest.warns(UserWarning, match=r"0/A.*plain gradient"):
        kfac.step()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert [torch.equal(a, b) for a, b in zip(plain, grads, strict=True)] == [
        *(True, True),  # 0: no inverse
        *(True, True),  # 1: a norm layer, skipped
        *(False, False),  # 3
    ]


def test_spngd_stops_after_three_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    optimizer = natgrad.SPNGD(model, lr=0.01, refresh=natgrad.Every(1, 1))
    break_cholesky(monkeypatch, lambda x: x.shape[-1] == SIZE)
    for step in range(2):
        with pytest.warns(UserWarning, match=r"0/A"):
            train(model, optimizer, range(step, step + 1))
    before = parameters(model)
    backward(model, 2)
    with pytest.raises(InverseError, match=r"0/A"):
        optimizer.step()
    assert same(before, parameters(model))
