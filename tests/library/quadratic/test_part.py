"""Products of the first examples of a batch, and where there can be none."""

import dataclasses
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import natgrad
from natgrad.quadratic.replay import Replay, Run


class Two(nn.Module):
    """Takes tensors by name and in a list, and returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 2)
        self.seen: list[int] = []

    def forward(self, xs: list[Tensor], *, scale: Tensor, table: Tensor) -> Any:
        self.seen.append(len(xs[0]))
        return {"y": torch.tanh(self.body(xs[0])) * scale, "table": table}


def pushed(model: nn.Module, run: Run, part: float) -> list[Tensor]:
    torch.manual_seed(2)
    weights = dict(model.named_parameters())
    ways = [{n: torch.randn_like(p) for n, p in weights.items()} for _ in range(2)]
    found = Replay(model, nullcontext, part).tangents(run, weights, ways)
    return [torch.stack(x) for x in zip(*found, strict=True)]


def test_rows_are_the_first_ones_and_the_model_sees_no_others() -> None:
    torch.manual_seed(0)
    model = Two().double()
    x, scale = torch.randn(5, 3).double(), torch.rand(5, 1).double()

    def closure() -> tuple[Tensor, Tensor]:
        out = model([x], scale=scale, table=torch.ones(2).double())
        y = (out["y"] * out["table"]).log_softmax(1)
        return y, -y[torch.arange(5), [0, 1, 0, 1, 1]].mean()

    run = Run(closure, [])
    (whole,) = pushed(model, run, 1.0)
    model.seen.clear()
    (first,) = pushed(model, run, 0.5)
    assert set(model.seen) == {3}
    torch.testing.assert_close(first[:, :3], whole[:, :3] * (5 / 3) ** 0.5)
    assert not first[:, 3:].any()


def test_each_call_is_cut_for_itself_and_derivatives_of_inputs_too() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    x = torch.randn(6, 2).double().requires_grad_()
    border = torch.randn(4, 2).double()

    def closure() -> Any:
        u = model(x)
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        inside, edge = u * slope.sum(1, keepdim=True) - 1, model(border)
        return (inside, edge), inside.square().mean() + edge.square().mean()

    run = Run(closure, [])
    whole, first = pushed(model, run, 1.0), pushed(model, run, 0.5)
    for x, y, n, k in zip(whole, first, (6, 4), (3, 2), strict=True):
        torch.testing.assert_close(y[:, :k], x[:, :k] * (n / k) ** 0.5)
        assert not y[:, k:].any()


def test_what_has_no_first_examples_is_refused() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.drop = nn.Linear(3, 3), nn.Dropout(0.5)

        def forward(self, x: Tensor | float) -> Tensor:
            return self.layer(torch.zeros(1, 3) + x)

    def tried(outputs: Any, message: str) -> None:
        options = dataclasses.replace(natgrad.SPNGD.auto, batch_part=0.5)
        optimizer = natgrad.SPNGD(model, options=options)

        def closure() -> Any:
            y = outputs()
            return y, y.square().mean()

        with pytest.raises(ValueError, match=f"Invalid batch_part=0.5: {message}"):
            optimizer.step(closure)
        optimizer.close()

    model, x = Odd(), torch.ones(4, 3)
    tried(lambda: model.drop(model(x)), "the closure draws random numbers")
    tried(lambda: model(1.0), "Odd is called without a tensor")
    tried(lambda: model.layer(x), "the closure never calls the Odd")
    tried(lambda: model(x).T, r"an output of shape \(3, 4\)")
    for part in (0.0, 1.5, -1, "half", float("nan")):
        with pytest.raises((TypeError, ValueError), match=r"batch_part.*in \(0, 1\]"):
            dataclasses.replace(natgrad.SPNGD.auto, batch_part=part)
