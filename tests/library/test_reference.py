"""The engine is what the plain references are, step by step, in float64."""

import ast
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.reference.kfac import KFAC
from tests.reference.muon import Muon
from tests.reference.polar import Polar, polar
from tests.reference.soap import SOAP
from tests.reference.spngd import SPNGD
from torch import Tensor, nn
from torch.nn import functional as F

import natgrad

STEPS = 10
REFERENCES = sorted((Path(__file__).parents[1] / "reference").glob("*.py"))


def mlp() -> nn.Module:
    """Linear layers with biases, and a batch norm."""
    torch.manual_seed(0)
    layers = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4)
    return nn.Sequential(*layers).double()


def convnet() -> nn.Module:
    """Convolutions with and without bias, stride and padding, and a batch norm."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Unflatten(1, (1, 6)),
        nn.Unflatten(2, (6, 1)),
        nn.Conv2d(1, 5, (3, 1), padding=(1, 0), bias=False),
        nn.BatchNorm2d(5),
        nn.ReLU(),
        nn.Conv2d(5, 3, (2, 1), stride=2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(9, 4),
    ).double()


def square_mlp() -> nn.Module:
    """Square matrices: the basis of a null space would be rounding's to choose."""
    torch.manual_seed(2)
    layers = nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh()
    return nn.Sequential(*layers, nn.Linear(6, 6, bias=False)).double()


def square_convnet() -> nn.Module:
    """Likewise."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Unflatten(1, (1, 6)),
        nn.Unflatten(2, (3, 2)),
        nn.Conv2d(1, 4, 2, bias=False, padding=1),
        nn.BatchNorm2d(4),
        nn.Tanh(),
        nn.Conv2d(4, 4, 1, bias=False),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 4, bias=False),
    ).double()


Net = Callable[[], nn.Module]


def by_class(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Backward of a classifier's loss."""
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()


def by_value(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Backward of a regression, whose gradients have no null space."""
    model.zero_grad()
    outputs = model(x)
    targets = torch.stack([x[:, i % 6].sin() * (i + 1) for i in range(len(outputs[0]))])
    F.mse_loss(outputs, targets.T).backward()


def trained(
    net: Net,
    made: Callable[[nn.Module], Callable[[], Any]],
    backward: Callable[[nn.Module, Tensor, Tensor], None] = by_class,
) -> list[Tensor]:
    """The weights after each step, all in one vector."""
    model, weights = net(), list[Tensor]()
    step = made(model)
    generator = torch.Generator().manual_seed(7)
    for _ in range(STEPS):
        x = torch.randn(32, 6, generator=generator, dtype=torch.float64)
        backward(model, x, x[:, :4].argmax(1))
        step()
        weights.append(nn.utils.parameters_to_vector(model.parameters()).detach())
    return weights


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    for step, (x, y) in enumerate(zip(found, expected, strict=True)):
        what = f"after step {step}"
        torch.testing.assert_close(
            x, y, rtol=1e-10, atol=1e-10, msg=lambda m, what=what: f"{what}: {m}"
        )


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)


def in_turn(*steps: Callable[[], Any]) -> Callable[[], None]:
    def step() -> None:
        for each in steps:
            each()

    return step


@pytest.mark.parametrize("net", [mlp, convnet])
@pytest.mark.parametrize(("kappa", "damping"), [(1e-3, 1e-3), (10.0, 0.1)])
def test_kfac(net: Net, kappa: float, damping: float) -> None:
    """With updates that the KL clip shortens, and with such that it leaves alone."""
    rates: Any = {"damping": damping}

    def plain(model: nn.Module) -> Callable[[], None]:
        optimizer = sgd(model)
        kfac = KFAC(model, optimizer, **rates, kappa=kappa, statistics=2, inverses=3)
        return in_turn(kfac.step, optimizer.step)

    def ours(model: nn.Module) -> Callable[[], Any]:
        optimizer, length = sgd(model), natgrad.KLClip(kappa=kappa)
        when = natgrad.Every(2, 3)
        natgrad.KFAC(model, optimizer, **rates, refresh=when, length=length)
        return optimizer.step

    assert_equal(trained(net, ours), trained(net, plain))


@pytest.mark.parametrize("net", [mlp, convnet])
@pytest.mark.parametrize("rescale", [False, True])
def test_spngd(net: Net, rescale: bool) -> None:
    rates: Any = {"lr": 0.02, "momentum": 0.9, "weight_decay": 1e-3}

    def plain(model: nn.Module) -> Callable[[], None]:
        return SPNGD(model, **rates, tolerance=0.3, rescale=rescale).step

    def ours(model: nn.Module) -> Callable[[], Any]:
        decay = natgrad.Rescaled() if rescale else natgrad.Coupled()
        options = replace(natgrad.SPNGD.defaults, decay=decay)
        refresh = natgrad.Adaptive(tolerance=0.3)
        optimizer = natgrad.SPNGD(model, **rates, refresh=refresh, options=options)
        return optimizer.step

    assert_equal(trained(net, ours), trained(net, plain))


def test_statistics_of_the_references_find_intervals_of_their_own() -> None:
    found: list[SPNGD] = []

    def plain(model: nn.Module) -> Callable[[], None]:
        found.append(SPNGD(model, lr=0.02, tolerance=0.3))
        return found[0].step

    trained(convnet, plain)
    intervals = {x.interval for x in (*found[0].a.values(), *found[0].g.values())}
    assert len(intervals) > 1


@pytest.mark.parametrize(("net", "normalised"), [(mlp, "0"), (convnet, "2")])
def test_polar(net: Net, normalised: str) -> None:
    def plain(model: nn.Module) -> Callable[[], None]:
        return Polar(model, every=3, normalised=[normalised]).step

    def ours(model: nn.Module) -> Callable[[], Any]:
        return natgrad.Polar(model, refresh=natgrad.Every(3, 3)).step

    assert_equal(trained(net, ours), trained(net, plain))


# No bias before a batch norm: its gradient is rounding, which Adam would raise.
@pytest.mark.parametrize("net", [square_mlp, convnet])
def test_muon(net: Net) -> None:
    rates: Any = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.1}

    def plain(model: nn.Module) -> Callable[[], None]:
        return Muon(model, **rates).step

    def ours(model: nn.Module) -> Callable[[], Any]:
        options = replace(
            natgrad.SPNGD.defaults,
            rule=natgrad.Orthogonal(sides="none", iteration="muon"),
            fallback=natgrad.Adam(),
            length=natgrad.MuonLength(normalise=False),
            average=natgrad.AverageGradients(nesterov=True),
            decay=natgrad.Decoupled(),
            norm="skip",
        )
        return natgrad.SPNGD(model, **rates, options=options).step

    assert_equal(trained(net, ours), trained(net, plain))


@pytest.mark.parametrize("net", [square_mlp, square_convnet])
def test_soap(net: Net) -> None:
    def plain(model: nn.Module) -> Callable[[], None]:
        return SOAP(model, lr=0.01, beta1=0.9, weight_decay=0.1, frequency=3).step

    def ours(model: nn.Module) -> Callable[[], Any]:
        options = replace(
            natgrad.SPNGD.defaults,
            rule=natgrad.SOAP.defaults.rule,
            fallback=natgrad.Adam(),
            damping=1e-3,
            average=natgrad.AverageGradients(),
            decay=natgrad.Decoupled(),
            factor_decay=0.95,
            norm="skip",
        )
        options = replace(options, refresh=natgrad.Every(1, 3))
        return natgrad.SPNGD(model, lr=0.01, weight_decay=0.1, options=options).step

    assert_equal(trained(net, ours, by_value), trained(net, plain, by_value))


def test_the_polar_factor_of_the_references_is_that_of_the_svd() -> None:
    x = torch.randn(5, 9, dtype=torch.float64)
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    torch.testing.assert_close(polar(x), u @ v, rtol=0, atol=2e-3)
    torch.testing.assert_close(polar(x.T), (u @ v).T, rtol=0, atol=2e-3)


@pytest.mark.parametrize("path", REFERENCES, ids=lambda path: path.stem)
def test_references_are_short_and_use_torch_alone(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 150
    for node in ast.walk(ast.parse(path.read_text())):
        names = [x.name for x in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        assert not any(name.startswith("natgrad") for name in names)


# -- a rule for every group ----------------------------------------------------------


def parts_of(model: nn.Module) -> tuple[list[Any], list[Any], list[Any]]:
    """Named parameters: of convolutions, weights of linear layers, and the rest."""
    convolutions: list[Any] = []
    linear: list[Any] = []
    rest: list[Any] = []
    for name, p in model.named_parameters():
        module = model.get_submodule(name.rpartition(".")[0])
        if isinstance(module, nn.Conv2d):
            convolutions.append((name, p))
        elif isinstance(module, nn.Linear) and p.dim() == 2:
            linear.append((name, p))
        else:
            rest.append((name, p))
    return convolutions, linear, rest


def only(method: Polar | Muon, kind: type[nn.Module]) -> Callable[[], None]:
    """A reference for the layers of one kind; it leaves other parameters alone."""
    method.layers = {
        n: x for n, x in method.layers.items() if isinstance(x.layer, kind)
    }
    method.rest = {}
    return method.step


def momentum_on(parameters: list[Any]) -> torch.optim.SGD:
    return torch.optim.SGD([p for _, p in parameters], lr=0.1, momentum=0.9)


def test_polar_on_convolutions_and_sgd_on_the_rest() -> None:
    def plain(model: nn.Module) -> Callable[[], None]:
        _, linear, rest = parts_of(model)
        polar = only(Polar(model, every=3), nn.Conv2d)
        return in_turn(polar, momentum_on([*linear, *rest]).step)

    def ours(model: nn.Module) -> Callable[[], None]:
        convolutions, linear, rest = parts_of(model)
        often = natgrad.Every(3, 3)
        polar = natgrad.Polar(model, [{"params": convolutions}], refresh=often)
        return in_turn(polar.step, momentum_on([*linear, *rest]).step)

    assert_equal(trained(convnet, ours), trained(convnet, plain))


def test_three_groups_of_different_rules() -> None:
    """Polar for convolutions, Muon for the linear weight, SGD for all else."""

    def plain(model: nn.Module) -> Callable[[], None]:
        polar = only(Polar(model, every=3), nn.Conv2d)
        muon = only(Muon(model, lr=0.02, weight_decay=0.1), nn.Linear)
        return in_turn(polar, muon, momentum_on(parts_of(model)[2]).step)

    def ours(model: nn.Module) -> Callable[[], Any]:
        convolutions, linear, rest = parts_of(model)
        muon = {
            "rule": natgrad.Orthogonal(sides="none", iteration="muon"),
            "length": natgrad.MuonLength(normalise=False),
            "lr": 0.02,
            "momentum": 0.95,
            "weight_decay": 0.1,
        }
        sgd = {
            "rule": natgrad.Plain(),
            "fallback": natgrad.Plain(),
            "length": natgrad.Free(),
            "average": natgrad.AverageUpdates(),
            "lr": 0.1,
            "momentum": 0.9,
            "weight_decay": 0.0,
        }
        groups = [
            {"params": convolutions},
            {"params": linear, **muon},
            {"params": rest, **sgd},
        ]
        return natgrad.Polar(model, groups, refresh=natgrad.Every(3, 3)).step

    assert_equal(trained(convnet, ours), trained(convnet, plain))
