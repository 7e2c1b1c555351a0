"""Second moments when their bases are replaced, and what a scale chooses by itself."""

from typing import Any

import pytest
import torch
from tests.support.oracle import near
from tests.support.toys import backward, mlp
from torch import Tensor

from natgrad import KFAC, SPNGD, Every
from natgrad.math.rules import corrected_scale, into_basis, out_of_basis

DAMPING = 0.3


def gradient_of(kfac: KFAC) -> Tensor:
    found = kfac.engine.block["0"].gradient()
    assert found is not None
    return found.clone()


def test_a_restarted_second_moment_is_of_the_steps_since_the_refresh() -> None:
    """Adam in the newest basis, by a loop over the gradients since it was made."""
    model, beta2 = mlp(), 0.8
    options: dict[str, Any] = {"trust": "none", "moments": "restart", "beta2": beta2}
    options |= {"scale": "adaptive", "damping": DAMPING, "decay": 0.5}
    seen: list[Tensor] = []
    with KFAC(model, refresh=Every(3, 3), **options) as kfac:
        for step in range(8):
            backward(model, step)
            seen = [*(seen if step % 3 else []), gradient_of(kfac)]
            kfac.step()
            bases = kfac.engine.preconditioner.bases()["0"]
            square = torch.zeros_like(seen[0])
            for g in seen:
                square = beta2 * square + (1 - beta2) * into_basis(g, *bases).square()
            near(kfac.engine.moments.states["0"].square, square)
            square = square / (1 - beta2 ** len(seen))
            floor = DAMPING * square.mean((1, 2), keepdim=True).sqrt()
            scaled = into_basis(seen[-1], *bases) / (square.sqrt() + floor)
            near(gradient_of(kfac), out_of_basis(scaled, *bases))


def corrected(step: int, **options: Any) -> tuple[KFAC, Tensor]:
    """After the last of so many steps that estimate all and invert every third."""
    model = mlp()
    options = {"scale": "corrected", "kl_clip": None, "decay": 0.5} | options
    kfac = KFAC(model, refresh=Every(1, 3), damping=DAMPING, **options)
    gradient = torch.empty(0)
    for i in range(step + 1):
        backward(model, i)
        gradient = gradient_of(kfac)
        kfac.step()
    kfac.close()
    return kfac, gradient


@pytest.mark.parametrize("step", [3, 4, 5])
def test_a_restarted_scale_is_of_the_steps_since_the_refresh(step: int) -> None:
    """K-FAC's own in the step that refreshes; then the average begins anew."""
    kfac, gradient = corrected(step, moments="restart")
    states = kfac.engine.statistics.states
    right, left = (states[f"0/{kind}"].inverse for kind in "AG")
    assert right is not None
    assert left is not None
    curvature = left[1].unsqueeze(2) * right[1].unsqueeze(1)
    if step == 3:
        assert states["0/S"].inverse is None
    else:
        known = states["0/S"].inverse
        assert known is not None
        curvature = known[0].reshape(curvature.shape)
    bases = right[0], left[0]
    scaled = corrected_scale(into_basis(gradient, *bases), curvature, DAMPING)
    near(gradient_of(kfac), out_of_basis(scaled, *bases))


def test_a_restarted_scale_forgets_and_a_moved_one_does_not() -> None:
    """The first S after a refresh is that of its own step alone, or an average."""
    newest, _ = corrected(4, moments="restart", decay=0.0)
    restarted, _ = corrected(4, moments="restart")
    moved, _ = corrected(4, moments="move")
    found = []
    for kfac in (newest, restarted, moved):
        inverse = kfac.engine.statistics.states["0/S"].inverse
        assert inverse is not None
        # the sum does not depend on the bases, which decay changes too
        found.append(inverse[0].sum())
    near(found[1], found[0])
    assert not torch.isclose(found[2], found[1])


# -- what a scale chooses by itself ---------------------------------------------------

CHOSEN = {
    "kronecker": ("eigen", "kl", "factored", "none"),
    "corrected": ("eigen", "kl", "eigen", "none"),
    "adaptive": ("eigen", "layer", "factored", "none"),
    "orthogonal": ("relative", "layer", "factored", "none"),
}


@pytest.mark.parametrize("scale", CHOSEN)
def test_every_scale_works_with_nothing_else_said(scale: Any) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with KFAC(model, optimizer, scale=scale) as kfac:
        backward(model, 0)
        optimizer.step()
        config = kfac.engine.config
        assert (config.damping_style, config.trust) == CHOSEN[scale][:2]
    with SPNGD(model, 0.01, scale=scale) as spngd:
        backward(model, 1)
        spngd.step()
        config = spngd.engine.config
        assert (config.damping_style, config.trust) == CHOSEN[scale][2:]


def test_what_is_said_is_not_overruled() -> None:
    with pytest.raises(ValueError, match="trust='kl'"):
        KFAC(mlp(), scale="adaptive", trust="kl", lr=0.1)
    with pytest.raises(ValueError, match="damping_style='eigen'"):
        KFAC(mlp(), scale="orthogonal", damping_style="eigen")
    with pytest.raises(ValueError, match="moments='forget'"):
        KFAC(mlp(), kl_clip=None, moments="forget")  # type: ignore[arg-type]
