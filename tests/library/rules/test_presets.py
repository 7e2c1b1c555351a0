"""Optimizers by name, the usual groups, and rules by name for `KFAC`."""

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import natgrad
from natgrad import EKFAC, KFAC, SPNGD, Adam, Kronecker, Orthogonal, Plain, Polar


class Net(nn.Module):
    """An embedding, a convolution, hidden matrices (one bare), a norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.conv = nn.Conv1d(4, 5, 2)
        self.norm = nn.LayerNorm(5)
        self.hidden = nn.Linear(5, 6)
        self.mix = nn.Parameter(torch.eye(6))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(self.table(x).mT).mean(2)
        return self.head(torch.tanh(self.hidden(self.norm(y))) @ self.mix)


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def backward(model: nn.Module, step: int = 0) -> Tensor:
    x = torch.randint(7, (16, 6), generator=torch.Generator().manual_seed(step))
    model.zero_grad()
    loss = F.cross_entropy(model(x), x[:, 0] % 3)
    loss.backward()
    return loss.detach()


def names(groups: natgrad.GroupList) -> dict[str, list[str]]:
    return {g["name"]: [name for name, _ in g["params"]] for g in groups}


def test_the_usual_split() -> None:
    assert names(natgrad.groups(net())) == {
        "hidden": ["mix", "hidden.weight", "hidden.bias"],
        "convolutions": ["conv.weight", "conv.bias"],
        "embeddings": ["table.weight"],
        "head": ["head.weight", "head.bias"],
        "rest": ["norm.weight", "norm.bias"],
    }


def test_biases_are_of_the_rest_where_the_rule_reads_no_activations() -> None:
    found = names(natgrad.groups(net(), Orthogonal(sides="none")))
    assert found["hidden"] == ["mix", "hidden.weight"]
    assert found["convolutions"] == ["conv.weight"]
    assert set(found["rest"]) >= {"conv.bias", "hidden.bias"}


def test_groups_print_as_a_table_and_are_edited_as_a_list() -> None:
    model = net()
    groups = natgrad.groups(model, rest=Adam(rate=0.5))
    lines = str(groups).splitlines()
    assert lines[0].split()[:3] == ["group", "tensors", "elements"]
    assert lines[1].startswith("hidden")
    assert "the optimizer's" in lines[1]
    assert "rate=0.5" in lines[-1]
    groups[-1]["lr"] = 3e-4
    del groups[3]  # the head is another optimizer's
    with Polar(model, groups, lr=0.1) as optimizer:
        before = model.head.weight.detach().clone()
        backward(model)
        optimizer.step()
    assert torch.equal(before, model.head.weight)
    assert optimizer.param_groups[-1]["lr"] == 3e-4


def test_an_only_matrix_is_no_head_and_a_tied_one_is_an_embedding() -> None:
    assert names(natgrad.groups(nn.Linear(3, 2, bias=False))) == {"hidden": ["weight"]}
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5))
    model[2].weight = model[0].weight
    assert names(natgrad.groups(model))["embeddings"] == ["0.weight"]


@pytest.mark.parametrize("kind", [natgrad.Muon, natgrad.SOAP, natgrad.Shampoo])
def test_presets_train_a_whole_network(kind: type[SPNGD]) -> None:
    model = net()
    with kind(model, lr=0.02) as optimizer:
        first = backward(model)
        for step in range(30):
            backward(model, step)
            optimizer.step()
    assert backward(model) < 0.8 * first
    found = [g["name"] for g in optimizer.param_groups]
    assert found == ["hidden", "convolutions", "embeddings", "head", "rest"]
    assert kind.defaults.rule.spec() == optimizer.param_groups[0]["rule"]


def test_a_preset_with_groups_takes_those() -> None:
    model = net()
    params = [(n, p) for n, p in model.named_parameters() if n == "hidden.weight"]
    with natgrad.Muon(model, [{"params": params}]) as optimizer:
        backward(model)
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        optimizer.step()
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {"hidden.weight"}


def preconditioned(**options: Any) -> dict[str, Tensor]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if isinstance(options["rule"], list):
        options["rule"] = [
            (getattr(model, x[1:]) if x.startswith(".") else x, rule)
            for x, rule in options["rule"]
        ]
    with KFAC(model, optimizer, length=natgrad.Free(), **options) as kfac:
        backward(model)
        kfac.step()
    return {
        n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
    }


@pytest.mark.parametrize("named", ["conv", ".conv"])
def test_kfac_takes_rules_by_names_and_modules(named: str) -> None:
    one = preconditioned(rule=Kronecker())
    other = preconditioned(rule=EKFAC())
    plain = preconditioned(rule=[("", Plain())])
    rules = [("hidden", Plain()), (named, EKFAC()), ("head.weight", Plain())]
    mixed = preconditioned(rule=rules)
    expected = {
        "conv.weight": other,
        "hidden.weight": plain,
        "hidden.bias": plain,
        "head.weight": plain,
        "table.weight": one,
    }
    for name, source in expected.items():
        torch.testing.assert_close(mixed[name], source[name], rtol=1e-9, atol=1e-12)


def test_a_rule_for_what_is_not_in_the_model_is_refused() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"'convs'.*as table, conv"):
        KFAC(model, optimizer, rule=[("convs", EKFAC())])
    with pytest.raises(ValueError, match="inside of the model"):
        KFAC(model, optimizer, rule=[(nn.Linear(2, 2), EKFAC())])


@pytest.mark.parametrize("kind", [natgrad.Polar, natgrad.Muon, natgrad.SOAP])
def test_rates_that_only_a_natural_gradient_can_find_are_refused(kind: Any) -> None:
    with pytest.raises(ValueError, match=r"Invalid 'auto' for \w+.*use SPNGD"):
        kind(nn.Linear(3, 2), lr="auto")


# -- the public implementations' arguments ---------------------------------------------


def trained(kind: Any, **arguments: Any) -> list[Tensor]:
    model = net()
    with kind(model, **arguments) as optimizer:
        for step in range(4):
            backward(model, step)
            optimizer.step()
    return [p.detach() for p in model.parameters()]


SOAP: Any = natgrad.SOAP.defaults.rule
ONE = (3.0, -3.2, 1.2)
TRANSLATED: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
    (
        natgrad.Muon,
        {"ns_steps": 3, "ns_coefficients": ONE},
        {"rule": Orthogonal(sides="none", iteration=(ONE,) * 3)},
    ),
    (
        natgrad.Muon,
        {"nesterov": False, "adjust_lr_fn": "original"},
        {
            "options": replace(
                natgrad.Muon.defaults,
                average=natgrad.AverageGradients(),
                length=natgrad.MuonLength(normalise=False),
            )
        },
    ),
    (
        natgrad.SOAP,
        {"betas": (0.8, 0.7), "precondition_frequency": 2, "eps": 1e-3},
        {
            "momentum": 0.8,
            "rule": replace(SOAP, beta2=0.7),
            "refresh": natgrad.Every(1, 2),
            "damping": 1e-3,
        },
    ),
    (
        natgrad.SOAP,
        {"shampoo_beta": 0.5, "precondition_frequency": 1},
        {
            "refresh": natgrad.Every(1, 1),
            "options": replace(natgrad.SOAP.defaults, factor_decay=0.5),
        },
    ),
    (
        natgrad.Shampoo,
        {"preconditioning_compute_steps": 2, "matrix_eps": 1e-2},
        {"refresh": natgrad.Every(1, 2), "damping": 1e-2},
    ),
]


@pytest.mark.parametrize(("kind", "theirs", "ours"), TRANSLATED)
def test_public_arguments_are_taken(
    kind: Any, theirs: dict[str, Any], ours: dict[str, Any]
) -> None:
    found = trained(kind, **theirs)
    for p, q in zip(found, trained(kind, **ours), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=0)
    usual = zip(found, trained(kind), strict=True)
    assert any(not torch.equal(p, q) for p, q in usual)


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (
            natgrad.SOAP,
            {"betas": (0.9, 0.9), "momentum": 0.8},
            "momentum=0.8 with beta",
        ),
        (natgrad.SOAP, {"eps": 1e-8, "damping": 1e-3}, r"damping=0\.001 with eps"),
        (natgrad.Muon, {"ns_steps": 0}, "ns_steps=0"),
        (natgrad.Muon, {"ns_steps": 3, "rule": Plain()}, "with ns_coefficients or ns_"),
        (
            natgrad.Shampoo,
            {"preconditioning_compute_steps": 2, "refresh": natgrad.Every()},
            "with preconditioning_compute_steps",
        ),
    ],
)
def test_one_thing_is_said_once(kind: Any, arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(net(), **arguments)


@pytest.mark.parametrize("name", ["polar", "SPNGD", "muon", "SOAP", "shampoo"])
def test_an_optimizer_by_its_name_is_the_class(name: str) -> None:
    kind = {k.lower(): v for k, v in vars(natgrad).items()}[name.lower()]
    by_name, by_class = net(), net()
    first, second = natgrad.create(name, by_name, lr=0.01), kind(by_class, lr=0.01)
    assert type(first) is kind
    for step in range(3):
        for model, optimizer in ((by_name, first), (by_class, second)):
            backward(model, step)
            optimizer.step()
    for p, q in zip(by_name.parameters(), by_class.parameters(), strict=True):
        assert torch.equal(p, q)


def test_what_is_given_to_create_reaches_the_class() -> None:
    model = net()
    chosen: dict[str, Any] = {"lr": 0.2, "momentum": 0.5, "weight_decay": 0.3}
    groups = [{"params": model.head.named_parameters()}]
    optimizer = natgrad.create("polar", model, groups, **chosen)
    (group,) = optimizer.param_groups
    assert {name: group[name] for name in chosen} == chosen
    assert len(group["params"]) == 2


def test_create_takes_what_the_classes_take() -> None:
    wanted = inspect.signature(SPNGD).parameters
    found = inspect.signature(natgrad.create).parameters
    assert ["name", *wanted] == [*found]
    for name, parameter in wanted.items():
        assert found[name] == parameter


def test_an_unknown_name_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ValueError, match=r"name='kfac'.*'polar', 'spngd'.*KFAC\("):
        natgrad.create("kfac", net())
