"""Every row against its public implementation, 50 steps in float64.

Where a package does not have the published rule, against a few lines of torch here, and
the comment says what differs.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import natgrad
from natgrad import (
    SPNGD,
    Adam,
    AverageGradients,
    Decoupled,
    EigenAdam,
    Every,
    FixedNorm,
    Free,
    Kronecker,
    LayerTrust,
    MuonLength,
    Orthogonal,
    Plain,
)

STEPS = 50
NESTEROV = AverageGradients(nesterov=True)
MUON = Orthogonal(sides="none", iteration="muon")


def net(*sizes: int, bias: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for n, m in pairwise(sizes):
        layers += [nn.Linear(n, m, bias=bias), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).double()


def backward(model: Any, step: int) -> None:
    source = torch.Generator().manual_seed(step)
    inputs, outputs = model[0].in_features, model[-1].out_features
    x = torch.randn(32, inputs, generator=source, dtype=torch.float64)
    y = torch.randn(32, outputs, generator=source, dtype=torch.float64)
    model.zero_grad()
    (model(x) - y).square().sum(1).mean().backward()


Step = Callable[[], Any]
peer = pytest.mark.skipif(
    find_spec("pytorch_optimizer") is None, reason="needs pytorch_optimizer"
)


def trained(model: nn.Module, step: Step, steps: int = STEPS) -> list[Tensor]:
    for i in range(steps):
        backward(model, i)
        step()
    return [p.detach() for p in model.parameters()]


def ours(model: nn.Module, **parts: Any) -> list[Tensor]:
    options = replace(SPNGD.defaults, **({"length": Free()} | parts))
    with SPNGD(model, options=options) as optimizer:
        return trained(model, optimizer.step)


def same(left: Sequence[Tensor], right: Sequence[Tensor], rtol: float = 1e-9) -> None:
    for p, q in zip(left, right, strict=True):
        torch.testing.assert_close(p, q, rtol=rtol, atol=1e-11)


# -- the fallbacks, against torch ------------------------------------------------------


@pytest.mark.parametrize("nesterov", [False, True])
def test_plain_is_sgd(nesterov: bool) -> None:
    model = net(6, 5, 3, bias=True)
    sgd = torch.optim.SGD(
        model.parameters(), lr=0.02, momentum=0.9, weight_decay=0.1, nesterov=nesterov
    )
    found = ours(
        net(6, 5, 3, bias=True),
        rule=Plain(),
        average=natgrad.AverageUpdates(nesterov=nesterov),
        lr=0.02,
        momentum=0.9,
        weight_decay=0.1,
    )
    same(found, trained(model, sgd.step))


def test_adam_is_adamw() -> None:
    # Our damping is relative to the gradient: without any, both have the same formula.
    model = net(6, 5, 3, bias=True)
    adamw = torch.optim.AdamW(
        model.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.1, eps=0.0
    )
    found = ours(
        net(6, 5, 3, bias=True),
        rule=Adam(beta2=0.95, damping=0.0),
        average=AverageGradients(),
        decay=Decoupled(of="all"),
        lr=0.01,
        momentum=0.9,
        weight_decay=0.1,
    )
    same(found, trained(model, adamw.step))


# -- Muon and its family ---------------------------------------------------------------


def in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Newton and Schulz' iteration of torch and of pytorch_optimizer keep float64.

    Both iterate in bfloat16, which would hide any difference below a hundredth.
    """
    monkeypatch.setattr(Tensor, "bfloat16", lambda x: x.clone())
    if find_spec("pytorch_optimizer") is None:
        return
    from pytorch_optimizer.optimizer.muon import base, normuon
    from pytorch_optimizer.optimizer.utils import matrix

    exact = partial(matrix.zero_power_via_newton_schulz_5, dtype=torch.float64)
    for module in (base, normuon):
        if hasattr(module, "zero_power_via_newton_schulz_5"):
            monkeypatch.setattr(module, "zero_power_via_newton_schulz_5", exact)


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [False, True])
def test_muon_is_torchs(
    adjust: Any, nesterov: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_float64(monkeypatch)
    model = net(6, 8, 5, 3)
    muon = torch.optim.Muon(
        model.parameters(),
        lr=0.02,
        momentum=0.9,
        weight_decay=0.1,
        nesterov=nesterov,
        adjust_lr_fn=adjust,
    )
    found = ours(
        net(6, 8, 5, 3),
        rule=MUON,
        length=MuonLength(adjust=adjust, normalise=False),
        average=AverageGradients(nesterov=nesterov),
        decay=Decoupled(),
        lr=0.02,
        momentum=0.9,
        weight_decay=0.1,
    )
    same(found, trained(model, muon.step))


@peer
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(
    ("adjusted", "length"),
    [
        (False, MuonLength(normalise=False)),
        (True, MuonLength(adjust="match_rms_adamw", normalise=False)),
    ],
)
def test_muon_is_pytorch_optimizers(
    adjusted: bool, length: MuonLength, nesterov: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It has the published rule but for the bfloat16 of its iteration, as torch's; its
    # weight decay is the decoupled one, without the factor of the length.
    in_float64(monkeypatch)
    from pytorch_optimizer import Muon

    model = net(6, 8, 5, 3)
    group = {"params": list(model.parameters()), "use_muon": True}
    muon: Any = Muon(
        [group],
        lr=0.02,
        momentum=0.9,
        weight_decay=0.1,
        nesterov=nesterov,
        use_adjusted_lr=adjusted,
        foreach=False,
    )
    found = ours(
        net(6, 8, 5, 3),
        rule=MUON,
        length=length,
        average=AverageGradients(nesterov=nesterov),
        decay=Decoupled(),
        lr=0.02,
        momentum=0.9,
        weight_decay=0.1,
    )
    same(found, trained(model, muon.step))


@peer
@pytest.mark.parametrize(
    ("scale", "length"),
    [
        ("preserve_norm", MuonLength(normalise=False)),
        ("match_rms", MuonLength(adjust="match_rms_adamw")),
    ],
)
def test_normuon_is_pytorch_optimizers(
    scale: str, length: MuonLength, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_float64(monkeypatch)
    from pytorch_optimizer import NorMuon

    model = net(6, 8, 5, 3)
    group = {"params": list(model.parameters()), "use_muon": True}
    normuon: Any = NorMuon(
        [group],
        lr=0.02,
        momentum=0.9,
        beta2=0.8,
        weight_decay=0.1,
        update_scale=scale,
        eps=0.0,
        foreach=False,
    )
    found = ours(
        net(6, 8, 5, 3),
        rule=replace(MUON, beta2=0.8),
        length=length,
        average=NESTEROV,
        decay=Decoupled(),
        lr=0.02,
        momentum=0.9,
        weight_decay=0.1,
    )
    same(found, trained(model, normuon.step))


def quintic(x: Tensor) -> Tensor:
    """Muon's iteration as its authors have it, of one matrix."""
    wide = x.T if x.shape[0] > x.shape[1] else x
    y = wide / wide.norm()
    for _ in range(5):
        a = y @ y.T
        y = 3.4445 * y + (-4.7750 * a + 2.0315 * a @ a) @ y
    return y.T if x.shape[0] > x.shape[1] else y


Rule = Callable[[nn.Parameter, dict[str, Any]], Tensor]


def by_hand(model: nn.Module, rule: Rule, lr: float = 0.02) -> list[Tensor]:
    """Train by a function of a parameter and its own state, which gives the step."""
    state: dict[nn.Parameter, dict[str, Any]] = {}

    @torch.no_grad()
    def step() -> None:
        for p in model.parameters():
            assert p.grad is not None
            p -= lr * rule(p, state.setdefault(p, {}))

    return trained(model, step)


def look_ahead(p: nn.Parameter, state: dict[str, Any], m: float = 0.9) -> Tensor:
    """Nesterov momentum, as Muon has it: a running average that begins at zero."""
    assert p.grad is not None
    state["m"] = m * state.get("m", torch.zeros_like(p)) + (1 - m) * p.grad
    return m * state["m"] + (1 - m) * p.grad


def muonh(p: nn.Parameter, state: dict[str, Any]) -> Tensor:
    update, norm = quintic(look_ahead(p, state)), p.norm()
    new = p - 0.02 * norm * update / update.norm()
    return (p - new / new.norm() * norm) / 0.02


def test_muonh_holds_the_norm_of_each_weight() -> None:
    # No package has it: its authors' formula (modded-nanogpt, track 3).
    model = net(6, 8, 5, 3)
    found = ours(
        model,
        rule=MUON,
        length=LayerTrust(memory=None),
        average=NESTEROV,
        decay=FixedNorm(),
        lr=0.02,
    )
    same(found, by_hand(net(6, 8, 5, 3), muonh))
    for p, q in zip(found, net(6, 8, 5, 3).parameters(), strict=True):
        torch.testing.assert_close(p.norm(), q.norm())


def inverse_power(x: Tensor, damping: float, power: float) -> Tensor:
    values, vectors = torch.linalg.eigh(x)
    return vectors @ torch.diag((values + damping) ** -power) @ vectors.T


def averaged(x: Tensor, state: dict[str, Any], key: str, decay: float = 0.95) -> Tensor:
    """A running average without bias."""
    old, mass = state.get(key, (torch.zeros_like(x), 0.0))
    state[key] = decay * old + (1 - decay) * x, decay * mass + 1 - decay
    return state[key][0] / state[key][1]


def pmuon(p: nn.Parameter, state: dict[str, Any]) -> Tensor:
    g = p.grad
    assert g is not None
    v = look_ahead(p, state)
    for side, x in (("right", g.T @ g), ("left", g @ g.T)):
        x = averaged(x, state, side)
        w = inverse_power(x, 0.1 * float(x.diagonal().mean()), 0.3)
        v = v @ w if side == "right" else w @ v
    return quintic(v) * max(1.0, p.shape[0] / p.shape[1]) ** 0.5


def test_pmuon_is_the_polar_factor_between_powers_of_gradient_covariances() -> None:
    # No package has it: its author's formula (modded-nanogpt, pull request 285), with
    # covariances without bias and damped relative to their mean eigenvalue.
    rule = replace(MUON, sides="both", source="gradients", whitening="full", power=0.3)
    found = ours(
        net(6, 8, 5, 3),
        rule=rule,
        length=MuonLength(normalise=False),
        average=NESTEROV,
        damping=0.1,
        factor_decay=0.95,
        refresh=Every(1, 1),
        lr=0.02,
    )
    same(found, by_hand(net(6, 8, 5, 3), pmuon), rtol=1e-7)


def newton_muon(model: nn.Sequential) -> list[Tensor]:
    """Polar factor of momentum times (A + 0.2 tr(A) / n)^-1, A a running average."""
    seen: dict[int, Tensor] = {}
    for layer in model:
        if isinstance(layer, nn.Linear):
            layer.register_forward_pre_hook(
                lambda layer, args: seen.update({id(layer.weight): args[0].detach()})
            )

    def rule(p: nn.Parameter, state: dict[str, Any]) -> Tensor:
        x = seen[id(p)]
        a = x.T @ x / len(x)
        old = state.get("A", a)
        state["A"] = a = 0.95 * old + 0.05 * a
        inverse = inverse_power(a, 0.2 * float(a.diagonal().mean()), 1.0)
        factor = max(1.0, p.shape[0] / p.shape[1]) ** 0.5
        return factor * quintic(look_ahead(p, state) @ inverse)

    return by_hand(model, rule)


def test_newton_muon_whitens_the_inputs_in_full() -> None:
    # Its authors take momentum after the inverse instead of before it, which is the
    # same as long as the inverse stays (they refresh it every 32 steps).
    found = ours(
        net(6, 8, 5, 3),
        rule=replace(MUON, sides="inputs", whitening="full"),
        length=MuonLength(normalise=False),
        average=NESTEROV,
        damping=0.2,
        factor_decay=0.95,
        refresh=Every(1, 1),
        lr=0.02,
    )
    same(found, newton_muon(net(6, 8, 5, 3)), rtol=1e-7)


# -- Shampoo and SOAP ------------------------------------------------------------------


@peer
@pytest.mark.parametrize("every", [1, 5])
def test_shampoo_is_pytorch_optimizers(every: int) -> None:
    # Without momentum: theirs takes part of the last *update* into the gradient. And
    # theirs makes its first roots in step k instead of the first, so here in turn.
    from pytorch_optimizer import Shampoo

    model = net(6, 5, 3)
    shampoo: Any = Shampoo(model.parameters(), lr=0.1, matrix_eps=1e-3)
    calls = 0

    def step() -> None:
        nonlocal calls
        shampoo.preconditioning_compute_steps = 1 if calls % every == 0 else 10**9
        calls += 1
        shampoo.step()

    found = ours(
        net(6, 5, 3),
        rule=Kronecker(source="gradients", power=0.25, style="whole"),
        factor_decay=1.0,
        damping=1e-3,
        refresh=Every(1, every),
        lr=0.1,
        momentum=0.0,
    )
    same(found, trained(model, step), rtol=1e-7)


def one_sided(p: nn.Parameter, state: dict[str, Any]) -> Tensor:
    g = p.grad
    assert g is not None
    state["R"] = state.get("R", 1e-3 * torch.eye(g.shape[1]).double()) + g.T @ g
    v = g @ inverse_power(state["R"], 0.0, 0.5)
    state["v"] = 0.9 * state.get("v", 0.0) + v
    return state["v"]


def test_one_sided_shampoo_takes_the_square_root() -> None:
    # No package has it. With momentum after the rule, as SGD has it.
    rule = Kronecker(source="gradients", power=0.5, sides="inputs", style="whole")
    found = ours(
        net(6, 5, 3),
        rule=rule,
        factor_decay=1.0,
        damping=1e-3,
        refresh=Every(1, 1),
        lr=0.02,
    )
    same(found, by_hand(net(6, 5, 3), one_sided), rtol=1e-7)


class Wide:
    """torch, but for float32, in which SOAP would make its QR decompositions."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


SOAP = EigenAdam(
    source="gradients", late=True, basis="tracked", moments="keep", beta2=0.95
)
SOAP_OPTIONS: dict[str, Any] = {
    "average": AverageGradients(),
    "factor_decay": 0.9,
    "damping": 0.0,
    "lr": 0.01,
}


@peer
@pytest.mark.parametrize("every", [1, 7])
def test_soap_is_pytorch_optimizers(
    every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Layers are square and the batch large: else the first factors have a null space,
    # in which rounding chooses the basis. Their decay comes after the update instead of
    # before it, so there is none. Their eps is added before the bias is divided out.
    import pytorch_optimizer.optimizer.soap as module

    monkeypatch.setattr(module, "torch", Wide())
    model = net(5, 5, 5)
    soap: Any = module.SOAP(
        model.parameters(),
        lr=0.01,
        betas=(0.9, 0.95),
        shampoo_beta=0.9,
        weight_decay=0.0,
        precondition_frequency=every,
        eps=0.0,
    )
    found = ours(net(5, 5, 5), rule=SOAP, refresh=Every(1, every), **SOAP_OPTIONS)
    same(found, trained(model, soap.step), rtol=1e-6)


def soap_muon(p: nn.Parameter, state: dict[str, Any]) -> Tensor:
    """SOAP with new eigenbases at every step, then the polar factor."""
    g = p.grad
    assert g is not None
    bases = [state[key][1] for key in ("R", "L")] if "L" in state else None
    for key, x in (("R", g.T @ g), ("L", g @ g.T)):
        x = averaged(x, state, f"average {key}", 0.9)
        state[key] = x, torch.linalg.eigh(x)[1]
    if bases is None:
        return torch.zeros_like(p)
    right, left = bases
    momentum = averaged(g, state, "m", 0.9)
    square = averaged((left.T @ g @ right) ** 2, state, "S", 0.95)
    v = left @ ((left.T @ momentum @ right) / square.sqrt()) @ right.T
    u, _, vh = torch.linalg.svd(v)
    return u @ vh


def test_soap_muon_is_the_polar_factor_of_soaps_update() -> None:
    # No package has it. The polar factor by six quintics is exact to 2e-3 a step. The
    # first steps are made of signs, and a matrix of signs may have no polar factor.
    rule = replace(SOAP, basis="exact", orthogonal=True)
    model, hand = net(5, 5, 5), net(5, 5, 5)
    options = replace(SPNGD.defaults, rule=rule, refresh=Every(1, 1), **SOAP_OPTIONS)
    state: dict[nn.Parameter, dict[str, Any]] = {}
    with SPNGD(model, options=options) as optimizer:
        for step in range(STEPS):
            backward(model, step)
            backward(hand, step)
            optimizer.step()
            for p, q in zip(model.parameters(), hand.parameters(), strict=True):
                q.data -= 0.01 * soap_muon(q, state.setdefault(q, {}))
                if step > 2:
                    torch.testing.assert_close(p, q, rtol=0, atol=1e-4)
                q.data.copy_(p.data)  # each step for itself


# -- layer-wise learning rates ---------------------------------------------------------

TRUST = LayerTrust(reference="now", memory=None)


@peer
def test_lars_is_pytorch_optimizers() -> None:
    # Without weight decay, which enters their denominator as a sum of norms, and ours
    # as the norm of the sum.
    from pytorch_optimizer import LARS

    model = net(6, 5, 3)
    lars: Any = LARS(
        model.parameters(), lr=1.0, momentum=0.9, trust_coefficient=0.01, weight_decay=0
    )
    found = ours(net(6, 5, 3), rule=Plain(), length=TRUST, lr=0.01, momentum=0.9)
    same(found, trained(model, lars.step))


def lamb(p: nn.Parameter, state: dict[str, Any]) -> Tensor:
    g = p.grad
    assert g is not None
    u = averaged(g, state, "m", 0.9) / averaged(g**2, state, "v", 0.95).sqrt()
    return u * p.norm() / u.norm()


def test_adam_with_a_trust_ratio_is_lamb() -> None:
    # Of LAMB's formula without its decay; pytorch_optimizer's clips the norm of the
    # weight to 10 and divides by eps, which ours does not.
    found = ours(
        net(6, 5, 3),
        rule=Adam(damping=0.0),
        length=TRUST,
        average=AverageGradients(),
        lr=0.02,
    )
    same(found, by_hand(net(6, 5, 3), lamb))
