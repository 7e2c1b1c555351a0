"""Blocks of equal shape are preconditioned by one product, each as if alone."""

from typing import Any

import pytest
import torch
from tests.support.construct import construct
from torch import Tensor, nn
from torch.nn import functional as F

import natgrad
from natgrad import KFAC, SPNGD, Every
from natgrad.math.precondition import descending

FORMS: dict[str, dict[str, Any]] = {
    "eigen": {"rule": natgrad.Kronecker(style="eigen")},
    "factored": {"rule": natgrad.Kronecker(style="factored")},
    "inputs": {"rule": natgrad.Kronecker(sides="inputs", style="relative")},
    "orthogonal": {"rule": natgrad.Orthogonal()},
    "orthogonal-full": {"rule": natgrad.Orthogonal(whitening="full")},
    "adaptive": {"rule": natgrad.EigenAdam()},
    "corrected": {"rule": natgrad.EKFAC(style="eigen")},
    "corrected-relative": {"rule": natgrad.EKFAC(style="relative")},
    "restarted": {"rule": natgrad.EigenAdam(moments="restart")},
    "rest": {"fallback": natgrad.Adam(), "norm": "skip"},
    "rest-averaged": {
        "fallback": natgrad.Adam(),
        "norm": "skip",
        "average": natgrad.AverageGradients(),
        "rule": natgrad.EigenAdam(),
    },
}
# Equal to the last bit. Others have products whose rounding may depend on the stack.
EXACT = ("adaptive", "corrected", "corrected-relative", "restarted", "rest")
MEMBERS = {  # how many blocks each call scales: out; words; layers
    "factored": [1, 2, 3],
    "orthogonal": [1, 2, 3],
    "adaptive": [1, 2, 3],
    "corrected": [1, 2, 3],
    "rest": [7],
}


class Net(nn.Module):
    """Three equal layers with equal norms, an embedding (A is diagonal), and a rest."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.ModuleList(nn.Embedding(7, 5) for _ in range(2))
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(5) for _ in range(3))
        self.out = nn.Linear(5, 4)
        self.shift = nn.Parameter(torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        h = self.words[0](x) + self.words[1](x) + self.shift
        for layer, norm in zip(self.layers, self.norms, strict=True):
            h = h + norm(torch.tanh(layer(h)))
        return self.out(h)


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def backward(model: nn.Module, step: int) -> None:
    torch.manual_seed(100 + step)
    x, y = torch.randint(7, (16,)), torch.randint(4, (16,))
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()


def trained(form: str, steps: int = 4, freeze: str = "") -> dict[str, Tensor]:
    model = net()
    options: dict[str, Any] = {"length": natgrad.Free(), "damping": 0.1, "norm": "unit"}
    options |= FORMS[form]
    refresh = Every(statistics=2, inverses=2)
    with construct(SPNGD, model, lr=0.01, refresh=refresh, **options) as optimizer:
        for step in range(steps):
            backward(model, step)
            if freeze and step == 2:
                model.get_submodule(freeze).zero_grad()
            optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("freeze", ["", "layers.1"])
@pytest.mark.parametrize("form", FORMS)
def test_together_is_as_alone(
    form: str, freeze: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = trained(form, freeze=freeze)
    monkeypatch.setattr("natgrad.rules.preconditioner.TOGETHER_UP_TO", 0)
    alone = trained(form, freeze=freeze)
    for name, p in alone.items():
        torch.testing.assert_close(together[name], p, rtol=1e-11, atol=1e-12)
        assert torch.equal(together[name], p) or form not in EXACT, name


@pytest.mark.parametrize("form", MEMBERS)
def test_every_rule_does_equal_shapes_together(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One application for three layers, not three."""
    seen: list[int] = []
    part = "fallback" if form == "rest" else "rule"
    rule = type(FORMS[form][part])
    inner = rule.apply

    def count(self: natgrad.Rule, x: natgrad.Matrices) -> Tensor:
        seen.append(len(x.direction))
        return inner(self, x)

    monkeypatch.setattr(rule, "apply", count)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"norm": "skip"}
    with construct(KFAC, model, optimizer, **(options | FORMS[form])):
        backward(model, 0)
        optimizer.step()
    assert sorted(seen) == MEMBERS[form]


def test_moments_of_a_group_are_kept_once() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with KFAC(model, optimizer, rule=natgrad.EigenAdam()) as kfac:
        for step in range(2):
            backward(model, step)
            optimizer.step()
        squares = [kfac.engine.moments.states[f"layers.{i}"].square for i in range(3)]
        assert len({x.untyped_storage().data_ptr() for x in squares}) == 1
        assert squares[0].untyped_storage().nbytes() == 3 * squares[0].nbytes


def test_nothing_is_kept_twice_and_what_was_saved_stays() -> None:
    model = net()
    with construct(SPNGD, model, lr=0.01, refresh=Every(), norm="skip") as optimizer:
        backward(model, 0)
        optimizer.step()
        states = optimizer.engine.statistics.states
        kept = [states[f"layers.{i}/A"].inverse for i in range(3)]
        tensors = [x[0] for x in kept if x is not None]
        assert len({x.untyped_storage().data_ptr() for x in tensors}) == 1
        assert tensors[0].untyped_storage().nbytes() == 3 * tensors[0].nbytes
        before = [x.clone() for x in tensors]
        backward(model, 1)
        optimizer.step()
        assert all(map(torch.equal, tensors, before))
        now = states["layers.0/A"].inverse
        assert now is not None
        assert not torch.equal(now[0], tensors[0])


def test_groups_are_forgotten_with_their_blocks() -> None:
    model = net()
    with construct(SPNGD, model, lr=0.01, norm="skip") as optimizer:
        for step, missing in enumerate(("", "layers.0", "layers.1", "layers.2")):
            backward(model, step)
            if missing:
                model.get_submodule(missing).zero_grad()
            optimizer.step()
        assert len(optimizer.engine.preconditioner.stacks._known) == 4  # 2 x A and G


def test_uphill_is_judged_for_each_block() -> None:
    g = torch.ones(6, 2, 2)
    u = torch.cat([torch.full((2, 2, 2), x) for x in (2.0, -1.0, float("nan"))])
    out = descending(g, u, blocks=3)
    assert torch.equal(out[:2], u[:2])
    assert torch.equal(out[2:], g[2:])
