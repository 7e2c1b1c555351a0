"""Second moments when their bases are replaced, and what a rule chooses by itself."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.oracle import near
from tests.support.toys import backward, mlp
from torch import Tensor

from natgrad import (
    EKFAC,
    KFAC,
    SPNGD,
    AverageGradients,
    EigenAdam,
    Every,
    Free,
    KLClip,
    Kronecker,
    LayerTrust,
    Length,
    Orthogonal,
    Rule,
)
from natgrad.math.rules import corrected_scale, into_basis, out_of_basis
from natgrad.rules import eigen_adam
from natgrad.rules.rule import MovedMoments

DAMPING = 0.3


def gradient_of(kfac: KFAC) -> Tensor:
    found = kfac.engine.block["0"].gradient()
    assert found is not None
    return found.clone()


def test_a_restarted_second_moment_is_of_the_steps_since_the_refresh() -> None:
    """Adam in the newest basis, by a loop over the gradients since it was made."""
    model, beta2 = mlp(), 0.8
    rule = EigenAdam(moments="restart", beta2=beta2)
    options: dict[str, Any] = {"damping": DAMPING, "factor_decay": 0.5}
    seen: list[Tensor] = []
    refresh = Every(3, 3)
    with KFAC(model, rule=rule, length=Free(), refresh=refresh, **options) as kfac:
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


def corrected(
    step: int, moments: MovedMoments, factor_decay: float = 0.5
) -> tuple[KFAC, Tensor]:
    """After the last of so many steps that estimate all and invert every third."""
    model = mlp()
    kfac = KFAC(
        model,
        rule=EKFAC(moments=moments),
        length=Free(),
        refresh=Every(1, 3),
        damping=DAMPING,
        factor_decay=factor_decay,
    )
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
    kfac, gradient = corrected(step, "restart")
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
    newest, _ = corrected(4, "restart", factor_decay=0.0)
    restarted, _ = corrected(4, "restart")
    moved, _ = corrected(4, "move")
    found = []
    for kfac in (newest, restarted, moved):
        inverse = kfac.engine.statistics.states["0/S"].inverse
        assert inverse is not None
        # the sum does not depend on the bases, which decay changes too
        found.append(inverse[0].sum())
    near(found[1], found[0])
    assert not torch.isclose(found[2], found[1])


# -- averages in a basis --------------------------------------------------------------


def averaged(nesterov: bool, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Projections into bases that each step has made, of one matrix."""
    model, counts, made = mlp(), list[int](), list[Tensor]()

    def counted(x: Tensor, *bases: Tensor) -> Tensor:
        made.append(x)
        return into_basis(x, *bases)

    monkeypatch.setattr(eigen_adam, "into_basis", counted)
    rule = EigenAdam(source="gradients", late=True)
    average = AverageGradients(nesterov=nesterov)
    options = {"average": average, "factor_decay": 0.9, "refresh": Every(1, 3)}
    chosen = replace(SPNGD.defaults, **options)  # type: ignore[arg-type]
    groups = [{"params": [("0.weight", model[0].weight)], "rule": rule}]  # type: ignore[index]
    with SPNGD(model, groups, lr=0.01, momentum=0.8, options=chosen) as spngd:
        for step in range(8):
            if step == 5:
                spngd.param_groups[0]["momentum"] = 0.6
            backward(model, step)
            made.clear()
            spngd.step()
            counts.append(len(made))
            if not nesterov and counts[-1]:
                state = spngd.engine.moments.states["0"]
                kept = spngd.state[model[0].weight]  # type: ignore[index]
                whole = (kept["velocity"] / kept["mass"]).reshape(made[0].shape)
                if state.mean is not None:
                    bases = spngd.engine.preconditioner.bases()["0"]
                    near(state.mean, into_basis(whole, *bases))
    return counts


def test_an_average_is_projected_once_after_each_refresh(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gradients in every step; bases are there from the first, new with 3 and 6."""
    assert averaged(False, monkeypatch) == [0, 2, 1, 1, 2, 1, 1, 2]


def test_an_average_that_looks_ahead_is_projected_in_each_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert averaged(True, monkeypatch) == [0, *[2] * 7]


# -- what a rule chooses by itself ----------------------------------------------------

CHOSEN: dict[Rule, Length] = {
    Kronecker(): KLClip(),
    EKFAC(): KLClip(),
    EigenAdam(): LayerTrust(),
    Orthogonal(): LayerTrust(),
}


@pytest.mark.parametrize("rule", CHOSEN, ids=lambda rule: rule.name)
def test_every_rule_works_with_nothing_else_said(rule: Rule) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with KFAC(model, optimizer, rule=rule) as kfac:
        backward(model, 0)
        optimizer.step()
        assert kfac.engine.options.the_length == CHOSEN[rule]
    with SPNGD(model, lr=0.01, rule=rule) as spngd:
        backward(model, 1)
        spngd.step()
        assert spngd.engine.options.the_length == Free()


def test_what_is_said_is_not_overruled() -> None:
    with pytest.raises(ValueError, match=r"length=KLClip\(.*rule=EigenAdam\("):
        KFAC(mlp(), rule=EigenAdam(), length=KLClip(lr=0.1))
    with pytest.raises(ValueError, match="style='eigen' of Orthogonal"):
        Orthogonal(style="eigen")
    with pytest.raises(ValueError, match="moments='forget'"):
        EKFAC(moments="forget")  # type: ignore[arg-type]
