"""A rule for every parameter group, and what a user's own rule needs."""

import io
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import natgrad
from natgrad import (
    SPNGD,
    Adam,
    AverageGradients,
    Every,
    Free,
    Kronecker,
    Length,
    Matrices,
    Orthogonal,
    Plain,
    Rule,
)
from natgrad.rules.lengths import Sight


def net() -> Any:
    torch.manual_seed(0)
    layers = nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)
    return nn.Sequential(*layers).double()


def backward(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(12, 6, generator=generator, dtype=torch.float64)
    y = torch.randn(12, 3, generator=generator, dtype=torch.float64)
    model.zero_grad()
    loss = (model(x) - y).square().sum(1).mean()
    loss.backward()
    return loss


def named(model: nn.Module, *names: str) -> list[tuple[str, nn.Parameter]]:
    return [(n, p) for n, p in model.named_parameters() if n in names]


def three(model: nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": named(model, "0.weight", "0.bias"), "rule": Kronecker()},
        {
            "params": named(model, "2.weight"),
            "rule": Orthogonal(sides="none"),
            "average": AverageGradients(nesterov=True),
            "lr": 0.02,
            "momentum": 0.5,
        },
        {"params": named(model, "2.bias"), "rule": Plain(), "lr": 0.3},
    ]


def test_what_no_group_names_is_left_to_another_optimizer() -> None:
    model, plain = net(), net()
    optimizer = SPNGD(model, three(model), lr=0.1, momentum=0.0)
    other = torch.optim.SGD(model[4].parameters(), lr=0.1)
    head = torch.optim.SGD(plain[4].parameters(), lr=0.1)
    before = model[4].weight.detach().clone()
    backward(model, 0)
    optimizer.step()
    torch.testing.assert_close(model[4].weight, before, rtol=0, atol=0)
    other.step()
    backward(plain, 0)
    head.step()
    torch.testing.assert_close(model[4].weight, plain[4].weight)


def test_each_group_follows_its_own_rule() -> None:
    model, by_hand = net(), net()
    optimizer = SPNGD(model, three(model), lr=0.1, momentum=0.0, refresh=Every(1, 1))
    alone = SPNGD(
        by_hand,
        [{"params": named(by_hand, "0.weight", "0.bias"), "rule": Kronecker()}],
        lr=0.1,
        momentum=0.0,
        refresh=Every(1, 1),
    )
    average = torch.zeros(4, 4).double()
    for step in range(4):
        backward(model, step)
        optimizer.step()
        backward(by_hand, step)
        alone.step()
        weight, bias = by_hand[2].weight, by_hand[2].bias
        assert weight.grad is not None
        assert bias.grad is not None
        average = 0.5 * average + 0.5 * weight.grad
        u, _, v = torch.linalg.svd(0.5 * average + 0.5 * weight.grad)
        weight.data -= 0.02 * u @ v
        bias.data -= 0.3 * bias.grad
    for p, q in zip(model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-3)


def test_a_bias_of_another_group_is_no_part_of_its_layers_matrix() -> None:
    model = net()
    groups = [
        {"params": named(model, "0.weight")},
        {"params": named(model, "0.bias"), "rule": Adam()},
    ]
    optimizer = SPNGD(model, groups, lr=0.1)
    backward(model, 0)
    optimizer.step()
    assert "A 6, G 4" in optimizer.report()
    assert "its group follows adam" in optimizer.report()


def test_groups_are_saved_as_plain_data_and_checked_when_loaded() -> None:
    model = net()
    optimizer = SPNGD(model, three(model), lr=0.1)
    backward(model, 0)
    optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    optimizer.load_state_dict(state)
    optimizer.close()
    groups = three(model)
    groups[1]["rule"] = Orthogonal(sides="inputs")
    other = SPNGD(model, groups, lr=0.1)
    with pytest.raises(ValueError, match=r"(?s)saved:.*'none'.*here:.*'inputs'"):
        other.load_state_dict(state)


@dataclass(frozen=True, kw_only=True)
class Signs(Rule):
    """A user's rule: the sign of each entry, times a size."""

    name: ClassVar[str] = "signs"
    size: float = 0.5

    def apply(self, x: Matrices) -> Tensor:
        """sign(V)."""
        return self.size * x.direction.sign()


@dataclass(frozen=True, kw_only=True)
class Halved(Length):
    """A user's length: half of what the rule gives."""

    def scaled(self, updates: dict[str, Tensor], sight: Sight) -> dict[str, Tensor]:
        """u / 2."""
        return {name: u / 2 for name, u in updates.items()}


def test_a_users_rule_and_length_are_a_class_each() -> None:
    model = net()
    before = model[2].weight.detach().clone()
    params = named(model, "2.weight")
    group = {"params": params, "rule": Signs(), "length": Halved()}
    optimizer = SPNGD(model, [group], lr=0.1, momentum=0.0)
    backward(model, 0)
    optimizer.step()
    moved = (model[2].weight - before).abs()
    torch.testing.assert_close(moved, torch.full_like(moved, 0.1 * 0.5 / 2))
    assert optimizer.param_groups[0]["rule"] == {"name": "signs", "size": 0.5}
    optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"rule": "muon"}, "Invalid rule='muon'"),
        ({"length": 3}, "Invalid length=3"),
        ({"rule": Orthogonal(), "length": natgrad.KLClip()}, "natural gradient"),
        ({"refresh": natgrad.Budget()}, "a whole step"),
        ({"damping": -1.0}, "Invalid damping=-1.0"),
    ],
)
def test_a_group_with_an_illegal_part_is_refused(
    group: dict[str, Any], message: str
) -> None:
    model = net()
    with pytest.raises((TypeError, ValueError), match=message):
        SPNGD(model, [{"params": named(model, "0.weight"), **group}], lr=0.1)


def test_lengths_of_groups_do_not_mix() -> None:
    model = net()
    groups = [
        {"params": named(model, "0.weight"), "length": natgrad.LayerTrust()},
        {"params": named(model, "2.weight"), "length": Free()},
    ]
    optimizer = SPNGD(model, groups, lr=0.1, momentum=0.0)
    before = model[0].weight.detach().clone()
    backward(model, 0)
    optimizer.step()
    moved = (model[0].weight - before).norm()
    torch.testing.assert_close(moved, 0.1 * before.norm())


class Words(nn.Module):
    """Tokens to the logits of tokens, with a hidden layer or without."""

    def __init__(self, hidden: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.hidden = nn.Linear(6, 6) if hidden else nn.Tanh()
        self.head = nn.Linear(6, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.hidden(self.embedding(tokens)).tanh())


def _groups_of(optimizer: SPNGD) -> list[set[str]]:
    return [set(group["param_names"]) for group in optimizer.param_groups]


def test_polar_gives_a_vocabulary_a_group_of_its_own() -> None:
    words = {"embedding.weight", "head.weight", "head.bias"}
    optimizer = natgrad.Polar(Words())
    assert _groups_of(optimizer) == [{"hidden.weight", "hidden.bias"}, words]
    assert optimizer.param_groups[1]["rule"]["rate"] == natgrad.Polar.vocabulary.rate
    told = f"{66 + 77} parameters without a block follow Adam's rule, at "
    assert told + f"{natgrad.Polar.vocabulary.rate:g} of" in str(optimizer)


def test_polar_without_a_vocabulary_or_without_hidden_layers_has_one_group() -> None:
    for model in (net(), Words(hidden=False)):
        assert len(_groups_of(natgrad.Polar(model))) == 1


def test_polar_trains_a_vocabulary_as_groups_by_hand_do() -> None:
    def trained(by_hand: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model: Any = Words().double()
        split: list[dict[str, Any]] | None = None
        if by_hand:
            words = [*model.embedding.parameters(), *model.head.parameters()]
            rest = {
                "rule": natgrad.Polar.vocabulary,
                "length": Free(),
                "average": AverageGradients(),
                "momentum": 0.9,
                "weight_decay": 0.0,
            }
            split = [
                {"params": list(model.hidden.parameters())},
                {"params": words, **rest},
            ]
        optimizer = natgrad.Polar(model, split)
        for step in range(4):
            optimizer.zero_grad()
            tokens = torch.arange(8).roll(step)
            nn.functional.cross_entropy(model(tokens), tokens + 2).backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    for ours, theirs in zip(trained(False), trained(True), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_polar_gives_layers_before_a_normalisation_a_rule_of_their_own() -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Conv2d(3, 2, 3))
    with natgrad.Polar(model) as optimizer:
        rules = {name: b.rule for name, b in optimizer.engine.block.items()}
        damping = {g.get("name"): g.get("damping") for g in optimizer.param_groups}
    assert rules["0"] == Orthogonal(sides="inputs")
    assert rules["2"] == natgrad.Polar.defaults.rule
    assert damping == {None: None, "normalised": 1.0}


@pytest.mark.parametrize("asked", [{"rule": Orthogonal()}, {"damping": 0.5}])
def test_a_rule_or_damping_that_is_asked_for_is_that_of_all_layers(asked: Any) -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Conv2d(3, 2, 3))
    with natgrad.Polar(model, **asked) as optimizer:
        blocks = optimizer.engine.block
        assert (
            blocks["0"].rule == blocks["2"].rule == asked.get("rule", blocks["2"].rule)
        )
        assert [g.get("damping") for g in optimizer.param_groups] == [None, None]
