"""Factors of the weight's own gradient, against linear algebra by hand in float64."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.world import run_world
from torch import Tensor, nn

import natgrad
from natgrad import (
    SPNGD,
    AverageGradients,
    EigenAdam,
    Every,
    Free,
    Kronecker,
    Orthogonal,
    Rule,
)
from natgrad.plan import make_plan

LR = 0.1


def net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(6, 4, bias=False), nn.Tanh(), nn.Linear(4, 3, bias=False)
    return nn.Sequential(*layers).double()


def backward(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(12, 6, generator=generator, dtype=torch.float64)
    y = torch.randn(12, 3, generator=generator, dtype=torch.float64)
    model.zero_grad()
    (model(x) - y).square().sum(1).mean().backward()


def made(model: nn.Module, rule: Rule, **changes: Any) -> SPNGD:
    options = replace(
        SPNGD.defaults,
        rule=rule,
        length=Free(),
        momentum=0.0,
        refresh=Every(1, 1),
        lr=LR,
        **changes,
    )
    return SPNGD(model, options=options)


def power(x: Tensor, damping: float, p: float) -> Tensor:
    values, vectors = torch.linalg.eigh(x)
    return vectors @ torch.diag((values + damping) ** -p) @ vectors.T


def test_shampoo_is_the_fourth_roots_of_sums_on_both_sides() -> None:
    model, by_hand = net(), net()
    rule = Kronecker(source="gradients", power=0.25, style="relative")
    optimizer = made(model, rule, factor_decay=1.0, damping=0.1)
    sums: dict[str, list[Tensor]] = {}
    for step in range(4):
        backward(model, step)
        optimizer.step()
        backward(by_hand, step)
        for name, p in by_hand.named_parameters():
            g = p.grad
            assert g is not None
            new = [g @ g.T, g.T @ g]
            old = sums.get(name)
            sums[name] = (
                new if old is None else [a + b for a, b in zip(old, new, strict=True)]
            )
            left, right = (
                power(x, 0.1 * float(x.diagonal().mean()), 0.25) for x in sums[name]
            )
            p.data -= LR * left @ g @ right
    for p, q in zip(model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


def test_soap_is_adam_in_the_eigenbases_of_its_factors() -> None:
    model, by_hand = net(), net()
    rule = EigenAdam(source="gradients", moments="keep", beta2=0.9)
    optimizer = made(model, rule, factor_decay=0.8, damping=0.01)
    state: dict[str, Any] = {}
    for step in range(4):
        backward(model, step)
        optimizer.step()
        backward(by_hand, step)
        for name, p in by_hand.named_parameters():
            g = p.grad
            assert g is not None
            old = state.get(name)
            # from zero: without bias it has the same eigenvectors
            both = [0.2 * g @ g.T, 0.2 * g.T @ g]
            if old is not None:
                both = [0.8 * a + b for a, b in zip(old[0], both, strict=True)]
            left, right = (torch.linalg.eigh(x)[1] for x in both)
            turned = left.T @ g @ right
            square = 0.1 * turned**2 + (0.9 * old[1] if old else 0.0)
            state[name] = both, square
            mean = square / (1 - 0.9 ** (step + 1))
            root = mean.sqrt() + 0.01 * mean.mean().sqrt()
            p.data -= LR * left @ (turned / root) @ right.T
    for p, q in zip(model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("sides", ["none", "inputs", "both"])
def test_polar_factors_in_whitened_coordinates(sides: Any) -> None:
    model, by_hand = net(), net()
    optimizer = made(
        model, Orthogonal(sides=sides, source="gradients", power=0.25), damping=0.1
    )
    backward(model, 0)
    optimizer.step()
    backward(by_hand, 0)
    for p in by_hand.parameters():
        g = p.grad
        assert g is not None
        left, right = torch.eye(len(g)).double(), torch.eye(g.shape[1]).double()
        if sides != "none":
            x = g.T @ g
            right = power(x, 0.1 * float(x.diagonal().mean()), 0.25)
        if sides == "both":
            x = g @ g.T
            left = power(x, 0.1 * float(x.diagonal().mean()), 0.25)
        u, _, v = torch.linalg.svd(left @ g @ right, full_matrices=False)
        p.data -= LR * left @ u @ v @ right
    for p, q in zip(model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=2e-3)


def test_any_matrix_has_them_whatever_layer_uses_it() -> None:
    model = nn.LSTM(5, 4)
    optimizer = natgrad.Polar(model, lr=0.01, rule=Orthogonal(source="gradients"))
    model(torch.randn(3, 2, 5))[0].square().sum().backward()
    optimizer.step()
    assert optimizer.statistic("weight_ih_l0/R").shape == (1, 5, 5)
    assert optimizer.statistic("weight_hh_l0/L").shape == (1, 16, 16)
    assert "matrix" in optimizer.report()


def trained(strategy: str, rule: Rule, stop: int | None = None) -> Tensor:
    model = net()
    options = replace(
        SPNGD.defaults,
        rule=rule,
        lr=LR,
        refresh=Every(2, 2),
        factor_decay=0.5,
        average=AverageGradients(nesterov=True),
        strategy=strategy,
    )
    optimizer = SPNGD(model, options=options)
    for step in range(6):
        if step == stop:
            optimizer.gather()
            state = optimizer.state_dict()
            optimizer.close()
            optimizer = SPNGD(model, options=options)
            optimizer.load_state_dict(state)
        backward(model, step)
        optimizer.step()
    optimizer.close()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


ROWS = [
    Kronecker(source="gradients", power=0.25, style="relative"),
    EigenAdam(source="gradients", moments="keep"),
    Orthogonal(source="gradients", power=0.25),
    Orthogonal(sides="none"),
]


def compare(rank: int) -> list[Tensor]:
    return [
        trained(strategy, rule, stop)
        for rule in ROWS
        for strategy in ("spngd", "factor_wise", "hybrid(0.5)")
        for stop in (None, 3)
    ]


def test_two_ranks_train_as_one_and_resume_in_mid_interval() -> None:
    alone = [trained("spngd", rule) for rule in ROWS]
    for found in run_world(2, compare):
        for i, weights in enumerate(found):
            torch.testing.assert_close(weights, alone[i // 6], rtol=1e-9, atol=1e-11)


def test_they_never_move_and_their_owner_must_be_a_worker() -> None:
    from natgrad.layers import LayerOptions, find_blocks

    blocks = find_blocks(net(), LayerOptions(source="gradients"))
    plan = make_plan([b.spec for b in blocks], world=2, strategy="spngd")
    assert not plan.exchanges["reduce_statistics"].items
    plan.check()
    name = next(iter(plan.owners))
    wrong = replace(plan, owners={**plan.owners, name: 1 - plan.owners[name]})
    with pytest.raises(ValueError, match="reduced gradient"):
        wrong.check()
