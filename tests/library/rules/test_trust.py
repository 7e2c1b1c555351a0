"""How long steps are: of layers that rest, of tables, and of unknown matrices."""

from typing import Any

import pytest
import torch
from tests.support.construct import construct
from torch import Tensor, nn

import natgrad
from natgrad.math.rules import moving_part, trust_ratio

LR = 0.1


def close(a: Tensor, b: Tensor | float) -> bool:
    return torch.allclose(a, torch.as_tensor(b, dtype=a.dtype), rtol=1e-6)


class Heads(nn.Module):
    """A trunk and two heads, of which a forward uses one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.one, self.two = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, head: str) -> Tensor:
        return getattr(self, head)(self.trunk(x).tanh())


@pytest.mark.parametrize(
    ("average", "fade"),
    [(natgrad.AverageGradients(), 0.0), (natgrad.AverageUpdates(), 0.8)],
)
def test_a_layer_whose_gradients_are_zero_comes_to_rest(
    average: Any, fade: float
) -> None:
    """Its average fades, and the trust ratio must not make up for it."""
    model = Heads().double()
    rule = natgrad.Orthogonal(sides="inputs")
    parts = {"rule": rule, "length": natgrad.LayerTrust(), "average": average}
    optimizer = construct(natgrad.SPNGD, model, lr=LR, momentum=0.8, **parts)
    x = torch.randn(8, 4, dtype=torch.float64)
    lengths = []
    for step in range(12):
        optimizer.zero_grad(set_to_none=False)
        model(x, "two" if step else "one").square().mean().backward()
        before = model.one.weight.detach().clone()
        optimizer.step()
        lengths.append(float((model.one.weight.detach() - before).norm()))
    assert lengths[0] > 0.01
    assert lengths[1:] == pytest.approx([lengths[0] * fade**i for i in range(1, 12)])


def test_gradients_that_are_tiny_are_not_taken_for_zero() -> None:
    """Their squares are zero in float32."""
    model = nn.Linear(4, 3)
    optimizer = natgrad.Polar(model, lr=LR)
    before = model.weight.detach().clone()
    (1e-30 * model(torch.randn(8, 4)).square().mean()).backward()
    optimizer.step()
    assert not torch.equal(model.weight, before)


def test_where_all_columns_move_alike_the_whole_table_counts() -> None:
    weight = torch.randn(1, 3, 7, dtype=torch.float64)
    update = torch.ones_like(weight)
    norm, share = moving_part(weight, update)
    assert close(norm, float(weight.norm()))
    assert float(share) == 1.0


@pytest.mark.parametrize("size", [1e-200, 1.0, 1e200])
def test_no_column_of_a_table_moves_further_than_columns_are_long(size: float) -> None:
    torch.manual_seed(0)
    weight = torch.randn(1, 3, 50, dtype=torch.float64)
    update = torch.zeros_like(weight)
    update[:, :, :5] = torch.randn(1, 3, 5, dtype=torch.float64)
    norm, share = moving_part(weight, size * update)
    ratio = trust_ratio(norm, update.norm(), 3 * share)
    moved = (ratio * update).norm(dim=1)
    steps = update.square().sum(1)
    typical = ((weight.square().sum(1) * steps).sum() / steps.sum()).sqrt()
    assert close(moved.max(), float(typical))
    assert not moved[0, 5:].any()
    none, nothing = moving_part(weight, torch.zeros_like(weight))
    assert (float(none), float(nothing)) == (0.0, 0.0)


def test_polar_changes_the_rows_that_were_read_by_the_learning_rate() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(400, 6), nn.Linear(6, 3)).double()
    optimizer = natgrad.Polar(model, [{"params": model.named_parameters()}], lr=LR)
    table: Any = model[0].weight
    before = table.detach().clone()
    read = torch.arange(10)
    model(read).square().mean().backward()
    optimizer.step()
    change = (table.detach() - before).norm(dim=1)
    assert not change[10:].any()
    longest = change.max() / before[:10].norm(dim=1).mean()
    assert 0.5 * LR < float(longest) < 1.6 * LR


class Unknown(nn.Module):
    """A matrix, a vector and a token that no kind of layer knows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.matrix = nn.Parameter(torch.randn(3, 4))
        self.vector = nn.Parameter(torch.randn(3))
        self.token = nn.Parameter(torch.randn(1, 1, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) @ self.matrix.T + self.vector + self.token[0]


def changes(optimizer: Any, model: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model(torch.randn(8, 4, dtype=torch.float64)).square().mean().backward()
    optimizer.step()
    after = dict(model.named_parameters())
    return {name: (after[name].detach() - x, x) for name, x in before.items()}


def test_a_matrix_without_a_block_changes_by_the_learning_rate_too() -> None:
    model = Unknown().double()
    found = changes(natgrad.Polar(model, lr=LR), model)
    change, before = found["matrix"]
    assert close(change.norm(), float(LR * before.norm()))
    for name in ("vector", "token"):  # Adam's first step has the rate's size
        size = found[name][0].abs()
        assert torch.allclose(size, torch.full_like(size, 0.2 * LR), rtol=0.02)


def test_with_the_plain_rule_a_matrix_without_a_block_keeps_its_gradient() -> None:
    model = Unknown().double()
    optimizer = construct(
        natgrad.SPNGD, model, lr=LR, momentum=0.0, length=natgrad.LayerTrust()
    )
    change, _ = changes(optimizer, model)["matrix"]
    gradient: Any = model.matrix.grad
    torch.testing.assert_close(change, -LR * gradient)


def test_decoupled_decay_is_of_weights_and_not_of_biases() -> None:
    def trained(decay: float) -> nn.Linear:
        torch.manual_seed(0)
        model = nn.Linear(4, 3).double()
        rule: Any = {
            "rule": natgrad.Orthogonal(sides="inputs", style="factored"),
            "length": natgrad.LayerTrust(),
            "decay": natgrad.Decoupled(),
        }
        optimizer = construct(natgrad.SPNGD, model, lr=LR, weight_decay=decay, **rule)
        model(torch.ones(2, 4, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
        return model

    torch.manual_seed(0)
    start = nn.Linear(4, 3).double()
    plain, decayed = trained(0.0), trained(0.5)
    assert torch.allclose(decayed.weight, plain.weight - LR * 0.5 * start.weight)
    assert torch.equal(decayed.bias, plain.bias)
