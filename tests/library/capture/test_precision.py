"""Statistics in half precision: those of what was rounded, summed in float32."""

from typing import Any

import pytest
import torch
from tests.library.capture.test_scaling import STATISTICS, images, kfac_of, network
from tests.support.construct import construct
from torch import Tensor
from torch.nn import functional as F

import natgrad
from natgrad import EKFAC, KFAC, Every

HALF = (torch.bfloat16, torch.float16)


def seen(precision: Any, scale: float = 1.0, **options: Any) -> dict[str, Tensor]:
    """Statistics of a batch of which every activation fits into half precision."""
    model = network().float()
    kfac = kfac_of(model, factor_precision=precision, **options)
    x, y = images(16)
    for _ in range(2):  # what is in the bases of factors comes with the second
        model.zero_grad()
        (scale * F.cross_entropy(model(x.float()), y)).backward()
        kfac.step()
    found = {name: kfac.statistic(name) for name in kfac.engine.statistics.states}
    kfac.close()
    return found


@pytest.mark.parametrize("precision", HALF)
def test_they_are_close_to_those_of_float32_and_kept_in_float32(
    precision: torch.dtype,
) -> None:
    wanted, found = seen(None), seen(precision)
    eps = torch.finfo(precision).eps
    assert set(found) == set(STATISTICS)
    for name, x in found.items():
        assert x.dtype == torch.float32
        away = float((x - wanted[name]).norm() / wanted[name].norm())
        assert 0 < away < 2 * eps, name


def test_small_gradients_are_as_good_as_large_ones_in_float16() -> None:
    large, small = seen(torch.float16), seen(torch.float16, scale=2.0**-30)
    for name, x in small.items():
        squared = 1.0 if name.endswith("/A") else 2.0**60
        torch.testing.assert_close(squared * x, large[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("precision", HALF)
def test_factors_of_gradients_and_moments_in_their_bases_are_rounded_too(
    precision: torch.dtype,
) -> None:
    eps = torch.finfo(precision).eps
    own = natgrad.Kronecker(source="gradients")
    for rule, kinds in ((EKFAC(), "S"), (own, "RL")):
        wanted, found = seen(None, rule=rule), seen(precision, rule=rule)
        names = [n for n in found if n[-1] in kinds]
        assert names
        for name in names:
            x, y = found[name], wanted[name]
            if kinds == "S":  # in other bases, in which its sum is the same
                x, y = x.sum(), y.sum()
            assert 0 < float((x - y).norm() / y.norm()) < 4 * eps, name


def test_a_model_trains_in_autocast_with_a_scaler_and_half_precision_products() -> None:
    torch.manual_seed(0)
    model = network().float()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer = construct(
        natgrad.SPNGD,
        model,
        lr=0.05,
        refresh=Every(),
        grad_scaler=scaler,
        factor_precision=torch.float16,
    )
    x, y = images(32)
    losses: list[float] = []
    for _ in range(8):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x.float()), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss.detach()))
    optimizer.close()
    assert losses[-1] < losses[0]


def test_other_types_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Invalid factor_precision=torch.float64"):
        construct(KFAC, network(), factor_precision=torch.float64)
