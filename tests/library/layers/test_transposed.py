"""Transposed convolutions against what each input position gives to the outputs."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support import oracle
from tests.support.oracle import near
from torch import Tensor, nn

import natgrad

CLASSES, EXAMPLES = 3, 5
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "stride": {"stride": 2, "padding": 1, "output_padding": 1},
    "dilation": {"dilation": 2, "stride": (1, 2), "bias": False},
    "groups": {"groups": 2, "padding": (1, 0)},
}


class Net(nn.Module):
    """A transposed convolution, by torch or position by position, and a readout."""

    readout: Tensor

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.layer = nn.ConvTranspose2d(4, 6, (2, 3), **options)
        size = self.layer(torch.zeros(1, 4, 3, 2)).numel()
        self.register_buffer("readout", torch.randn(size, CLASSES) / size**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)).flatten(1) @ self.readout

    def given(self, x: Tensor) -> Tensor:
        """``(e, s, m, t)``: what each input position gives."""
        groups, weight = self.layer.groups, self.layer.weight
        matrices = weight.unflatten(0, (groups, -1)).flatten(2)
        return matrices.mT @ x.unflatten(1, (groups, -1)).flatten(3)

    def after(self, given: Tensor, x: Tensor) -> Tensor:
        """Logits, from that."""
        layer = self.layer
        y = F.fold(
            given.flatten(1, 2),
            layer(x).shape[2:],
            layer.kernel_size,
            layer.dilation,
            layer.padding,  # pyright: ignore
            layer.stride,
        )
        y = y if layer.bias is None else y + layer.bias[:, None, None]
        return torch.tanh(y).flatten(1) @ self.readout


def factors(model: Net, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A, G and the second moment of each example's gradient, ``(s, mn, mn)``."""
    rows = x.unflatten(1, (model.layer.groups, -1)).flatten(3)
    a = torch.einsum("esit,esjt->sij", rows, rows) / (len(x) * rows.shape[-1])
    g, fisher = torch.zeros(1), torch.zeros(1)
    for i in range(len(x)):
        given = model.given(x[i : i + 1]).detach().requires_grad_()
        logits = model.after(given, x[i : i + 1])
        near(logits, model(x[i : i + 1]))
        (at,) = torch.autograd.grad(F.cross_entropy(logits, y[i : i + 1]), given)
        g = g + torch.einsum("smt,snt->smn", at[0], at[0]) / len(x)
        each = (at[0] @ rows[i].mT).flatten(1)
        fisher = fisher + oracle.outer(each) / len(x)
    return a, g, fisher


def gradient(layer: nn.ConvTranspose2d) -> Tensor:
    """As ``(s, m, n)``."""
    assert layer.weight.grad is not None
    return layer.weight.grad.unflatten(0, (layer.groups, -1)).flatten(2).mT


@pytest.mark.parametrize("options", LAYERS)
@pytest.mark.parametrize("rule", [natgrad.Kronecker(), natgrad.EKFAC()])
def test_factors_and_updates_are_those_of_brute_force(
    options: str, rule: natgrad.Rule
) -> None:
    torch.manual_seed(0)
    model = Net(LAYERS[options]).double()
    x = torch.randn(EXAMPLES, 4, 3, 2, dtype=torch.float64)
    y = torch.arange(EXAMPLES) % CLASSES
    chosen = dataclasses.replace(
        natgrad.KFAC.defaults, rule=rule, length=natgrad.Free(), damping=0.1
    )
    before = torch.empty(0)
    with natgrad.KFAC(model, options=chosen) as kfac:
        for _ in range(2):  # EKFAC's bases are those of the step before
            model.zero_grad()
            F.cross_entropy(model(x), y).backward()
            before = gradient(model.layer).clone()
            kfac.step()
        a, g, fisher = factors(model, x, y)
        near(kfac.statistic("layer/A"), a)
        near(kfac.statistic("layer/G"), g)
        if isinstance(rule, natgrad.EKFAC):
            bases = [
                torch.stack([torch.linalg.eigh(part)[1] for part in f]) for f in (g, a)
            ]
            q = oracle.kronecker(*bases)
            scale = (q.mT @ fisher @ q).diagonal(dim1=1, dim2=2)
            near(kfac.statistic("layer/S").sum(), scale.sum(), rtol=1e-9)
        else:
            want = oracle.solve(oracle.kronecker(g, a), before, 0.1)
            near(gradient(model.layer), want, rtol=1e-8)
        if model.layer.bias is not None:
            row = next(r for r in str(kfac).splitlines() if "layer.bias" in r)
            assert "no part of the matrix of its layer" in row


def test_an_output_padding_of_a_whole_stride_is_refused() -> None:
    layer = nn.ConvTranspose1d(2, 3, 2, dilation=3, output_padding=2)
    model = nn.Sequential(layer, nn.Flatten(), nn.LazyLinear(2))
    model(torch.randn(2, 2, 4))
    with natgrad.Polar(model, lr=0.1) as polar:
        assert "its output_padding is not below its stride" in str(polar)
