"""Preconditioned gradients and whole steps against dense linear algebra."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support import oracle
from tests.support.construct import construct
from tests.support.layer_table import KRONECKER, NORM, Readout, Row, build, draw
from torch import Tensor, nn

from natgrad import (
    KFAC,
    SPNGD,
    Coupled,
    Every,
    Free,
    KLClip,
    Kronecker,
    Rescaled,
    schedules,
)

DAMPING = 0.03


def near(actual: Tensor | None, expected: Tensor) -> None:
    """Equal but for the rounding of an inverse."""
    oracle.near(actual, expected, rtol=1e-7, atol=1e-10)


def layer_gradient(module: nn.Module) -> Tensor:
    """The gradient of a layer as ``(s, m, n)``."""
    grads = [p.grad.clone() for p in oracle.trained(module) if p.grad is not None]
    return oracle.as_stack(module, grads)


def weights_of(module: nn.Module) -> Tensor:
    """The weights of a layer as ``(s, m, n)``."""
    return oracle.as_stack(module, [p.detach() for p in oracle.trained(module)])


def preconditioned(row: Row, **options: Any) -> tuple[Readout, KFAC, Tensor]:
    """A row's model after one step, its closed K-FAC, and the plain gradient."""
    model, x, y = build(row)
    options = {"damping": DAMPING, "length": Free(), "refresh": Every()} | options
    with construct(KFAC, model, **row.options, **options) as kfac:
        F.cross_entropy(model(x), y).backward()
        plain = layer_gradient(model.layer)
        kfac.step()
    return model, kfac, plain


def factors_of(kfac: KFAC) -> tuple[Tensor, Tensor]:
    """A and G as the optimizer has them: they are checked elsewhere."""
    return kfac.statistic("layer/A"), kfac.statistic("layer/G")


@pytest.mark.parametrize("name", KRONECKER)
def test_eigen_damping_is_the_dense_solution(name: str) -> None:
    model, kfac, plain = preconditioned(KRONECKER[name])
    a, g = factors_of(kfac)
    want = oracle.solve(oracle.kronecker(g, a), plain, DAMPING)
    near(layer_gradient(model.layer), want)


@pytest.mark.parametrize("name", KRONECKER)
def test_factored_damping_is_the_dense_solution(name: str) -> None:
    model, kfac, plain = preconditioned(
        KRONECKER[name], rule=Kronecker(style="factored")
    )
    a, g = factors_of(kfac)
    want = oracle.solve_factored(a, g, plain, DAMPING)
    near(layer_gradient(model.layer), want)


@pytest.mark.parametrize("name", ["linear", "conv2d"])
@pytest.mark.parametrize("style", ["whole", "root"])
def test_each_factor_with_the_damping_or_its_root_is_the_dense_solution(
    name: str, style: Any
) -> None:
    """Pauloski et al., eq. 11-12; Ma et al., appendix B."""
    rule = Kronecker(style=style)
    model, kfac, plain = preconditioned(KRONECKER[name], rule=rule)
    added = DAMPING if style == "whole" else DAMPING**0.5
    a, g = (x + added * torch.eye(x.shape[-1], dtype=x.dtype) for x in factors_of(kfac))
    near(layer_gradient(model.layer), oracle.solve(oracle.kronecker(g, a), plain, 0.0))


@pytest.mark.parametrize("style", ["eigen", "factored"])
@pytest.mark.parametrize("name", NORM)
def test_norms_take_the_whole_damping_in_either_style(name: str, style: Any) -> None:
    ratio = 3.0
    model, kfac, plain = preconditioned(
        NORM[name], rule=Kronecker(style=style), norm_damping_ratio=ratio
    )
    form = NORM[name].norm
    fisher = oracle.as_dense(kfac.statistic(f"layer/{form}"))
    stack = plain if form == "unit" else plain.reshape(1, 1, -1)
    want = oracle.solve(fisher, stack, ratio * DAMPING).reshape(plain.shape)
    near(layer_gradient(model.layer), want)


def test_the_norm_damping_ratio_is_for_norms_only() -> None:
    plain, _, _ = preconditioned(KRONECKER["conv2d"])
    other, _, _ = preconditioned(KRONECKER["conv2d"], norm_damping_ratio=9.0)
    near(layer_gradient(other.layer), layer_gradient(plain.layer))


def test_damping_may_follow_the_step() -> None:
    row = KRONECKER["linear"]
    model, x, y = build(row)
    with KFAC(
        model, damping=lambda t: 0.1 * (t + 1), length=Free(), factor_decay=0.5
    ) as kfac:
        for step in range(3):
            model.zero_grad()
            F.cross_entropy(model(x), y).backward()
            plain = layer_gradient(model.layer)
            kfac.step()
            a, g = factors_of(kfac)
            want = oracle.solve(oracle.kronecker(g, a), plain, 0.1 * (step + 1))
            near(layer_gradient(model.layer), want)


@pytest.mark.parametrize("name", ["linear-3d", "conv2d-groups", "embedding"])
def test_the_pi_split_is_of_the_running_averages(name: str) -> None:
    row = KRONECKER[name]
    model, _, _ = build(row)
    options: dict[str, Any] = {
        "rule": Kronecker(style="factored"),
        "length": Free(),
    }
    with construct(
        KFAC, model, damping=DAMPING, factor_decay=0.6, refresh=Every(), **options
    ) as kfac:
        for scale in (1.0, 7.0, 0.1):
            x, y = draw(row)
            model.zero_grad()
            (scale * F.cross_entropy(model(x), y)).backward()
            plain = layer_gradient(model.layer)
            kfac.step()
            want = oracle.solve_factored(*factors_of(kfac), plain, DAMPING)
            near(layer_gradient(model.layer), want)


class Mixed(nn.Module):
    """Known layers, a norm, and parameters of no known layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 2)
        self.norm = nn.GroupNorm(1, 2)
        self.scale = nn.Parameter(torch.ones(8))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.conv(x))).flatten(1)
        return self.head(x * self.scale)


def mixed() -> tuple[Mixed, Tensor, Tensor]:
    torch.manual_seed(0)
    model = Mixed().double()
    x = torch.randn(6, 1, 3, 3, dtype=torch.float64)
    return model, x, torch.randint(3, (6,))


def natural(
    model: Mixed, x: Tensor, y: Tensor, damping: float, *, factored: bool = False
) -> dict[str, tuple[Tensor, Tensor]]:
    """Plain and natural gradient of each block, all by brute force."""
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for name in ("conv", "head"):
        plain = layer_gradient(model.get_submodule(name))
        a, g = oracle.factors(oracle.examples(model, name, x, y))
        if factored:
            update = oracle.solve_factored(a, g, plain, damping)
        else:
            update = oracle.solve(oracle.kronecker(g, a), plain, damping)
        found[name] = plain, update
    plain = layer_gradient(model.norm)
    unit = oracle.norm_statistic(oracle.examples(model, "norm", x, y), "unit")
    found["norm"] = plain, oracle.solve(unit, plain, damping)
    assert model.scale.grad is not None
    found["scale"] = model.scale.grad.clone(), model.scale.grad.clone()
    return found


KAPPAS = {"binding": 1e-4, "slack": 1e4, "off": None}


@pytest.mark.parametrize("kappa", KAPPAS.values(), ids=KAPPAS)
@pytest.mark.parametrize("inside", [True, False], ids=["optimizer.step", "kfac.step"])
def test_the_kl_clip(kappa: float | None, inside: bool) -> None:
    """nu = min(1, sqrt(kappa / (lr^2 sum |<natural, plain>|))), for layers only."""
    model, x, y = mixed()
    lr = 0.2
    blocks = natural(model, x, y, DAMPING)
    nu = 1.0
    if kappa is not None:
        layers = ("conv", "norm", "head")
        inner = sum(float((u * p).sum().abs()) for p, u in (blocks[n] for n in layers))
        nu = min(1.0, math.sqrt(kappa / (lr**2 * inner)))
        assert (nu < 1) == (kappa < 1)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    told = None if inside else lr
    length = Free() if kappa is None else KLClip(kappa=kappa, lr=told)
    options: dict[str, Any] = {"damping": DAMPING, "length": length, "norm": "unit"}
    model.zero_grad()
    if inside:
        with KFAC(model, optimizer, **options):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    else:
        with KFAC(model, **options) as kfac:
            F.cross_entropy(model(x), y).backward()
            kfac.step()
            optimizer.step()
    for name in ("conv", "norm", "head"):
        near(layer_gradient(model.get_submodule(name)), nu * blocks[name][1])
    near(model.scale.grad, blocks["scale"][0])
    for p, old in zip(model.parameters(), before, strict=True):
        assert p.grad is not None
        near(p, old - lr * p.grad)


def test_the_kl_clip_reads_a_scheduled_learning_rate() -> None:
    model, x, y = mixed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    options: dict[str, Any] = {"damping": DAMPING, "norm": "unit", "factor_decay": 0.0}
    with KFAC(model, optimizer, length=KLClip(kappa=1e-6), refresh=Every(), **options):
        for step in range(3):
            blocks = natural(model, x, y, DAMPING)
            pairs = [blocks[name] for name in ("conv", "norm", "head")]
            inner = sum(float((u * p).sum().abs()) for p, u in pairs)
            nu = math.sqrt(1e-6 / inner) / (0.2 * 0.5**step)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            near(layer_gradient(model.head), nu * blocks["head"][1])
            scheduler.step()


def test_momentum_of_the_optimizer_sees_preconditioned_gradients() -> None:
    model, x, y = mixed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    buffer = torch.zeros(1, 3, 9, dtype=torch.float64)
    settings: dict[str, Any] = {"norm": "unit", "factor_decay": 0.0, "refresh": Every()}
    with construct(KFAC, model, optimizer, damping=DAMPING, length=Free(), **settings):
        for _ in range(3):
            weight = weights_of(model.head)
            buffer = 0.9 * buffer + natural(model, x, y, DAMPING)["head"][1]
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            after = weights_of(model.head)
            near(after, weight - 0.1 * buffer)


def test_a_closure_is_preconditioned_too() -> None:
    """Lightning hands its whole step to the optimizer as a closure."""
    plain, closed = _weights_after(by_closure=False), _weights_after(by_closure=True)
    for p, q in zip(plain, closed, strict=True):
        near(q, p)


def _weights_after(*, by_closure: bool) -> list[Tensor]:
    model, x, y = mixed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure() -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss.item()

    with KFAC(model, optimizer, damping=DAMPING, refresh=Every(), norm="unit"):
        for _ in range(2):
            if by_closure:
                assert isinstance(optimizer.step(closure), float)
            else:
                closure()
                optimizer.step()
    return [p.detach() for p in model.parameters()]


# -- SPNGD: a hand-written loop of SP-NGD's eq. 23 and 24 ------------------------------


class ByHand:
    """w <- w - lr natural(g + decay w) + m (w - w_before), then eq. 24 if asked."""

    def __init__(self, model: Mixed, *, rescale: bool = False) -> None:
        self.model, self.rescale = model, rescale
        self.before = [p.detach().clone() for p in model.parameters()]

    def step(
        self,
        x: Tensor,
        y: Tensor,
        *,
        lr: dict[str, float],
        momentum: dict[str, float],
        decay: dict[str, float],
    ) -> None:
        """One update; settings by block name."""
        model = self.model
        updates = self._updates(x, y, decay)
        old = [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            for i, (name, p) in enumerate(model.named_parameters()):
                block = name.split(".")[0]
                velocity = old[i] - self.before[i]
                p.copy_(old[i] - lr[block] * updates[name] + momentum[block] * velocity)
                if self.rescale and name in ("conv.weight", "head.weight"):
                    p.mul_(math.sqrt(2 * len(p)) / (p.norm() + 1e-9))
        self.before = old

    def _updates(
        self, x: Tensor, y: Tensor, decay: dict[str, float]
    ) -> dict[str, Tensor]:
        """Natural gradients by parameter name."""
        model, found = self.model, {}
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        stacks: dict[str, Tensor] = {}
        for name in ("conv", "norm", "head"):
            module = model.get_submodule(name)
            stacks[name] = layer_gradient(module) + decay[name] * weights_of(module)
        assert model.scale.grad is not None
        found["scale"] = model.scale.grad + decay["scale"] * model.scale.detach()
        for name in ("conv", "head"):
            a, g = oracle.factors(oracle.examples(model, name, x, y))
            update = oracle.solve_factored(a, g, stacks[name], DAMPING)[0]
            weight = model.get_parameter(f"{name}.weight")
            found[f"{name}.weight"] = update[:, :-1].reshape(weight.shape)
            found[f"{name}.bias"] = update[:, -1]
        unit = oracle.norm_statistic(oracle.examples(model, "norm", x, y), "unit")
        update = oracle.solve(unit, stacks["norm"], DAMPING)[:, 0]
        found["norm.weight"], found["norm.bias"] = update[:, 0], update[:, 1]
        return found


BLOCKS = ("conv", "norm", "scale", "head")


def alike(value: float) -> dict[str, float]:
    return dict.fromkeys(BLOCKS, value)


def compare(
    optimizer_of: Callable[[Mixed], SPNGD],
    settings: Callable[[int], dict[str, dict[str, float]]],
    *,
    rescale: bool = False,
    scheduler_of: Callable[[SPNGD], Any] | None = None,
    steps: int = 4,
) -> None:
    """SPNGD and the loop by hand end each step with the same weights."""
    model, x, y = mixed()
    twin, _, _ = mixed()
    by_hand = ByHand(twin, rescale=rescale)
    optimizer = optimizer_of(model)
    scheduler = scheduler_of(optimizer) if scheduler_of else None
    for step in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        by_hand.step(x, y, **settings(step))
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            near(p.detach(), q.detach())
        if scheduler is not None:
            scheduler.step()
    optimizer.close()


def spngd(model: Mixed, groups: Any = None, **options: Any) -> SPNGD:
    options = {
        "lr": 0.1,
        "momentum": 0.8,
        "damping": DAMPING,
        "refresh": Every(),
    } | options
    return construct(SPNGD, model, groups, **options)


@pytest.mark.parametrize("rescale", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.05])
def test_spngd_by_hand(rescale: bool, decay: float) -> None:
    compare(
        lambda model: spngd(
            model, decay=Rescaled() if rescale else Coupled(), weight_decay=decay
        ),
        lambda _: {"lr": alike(0.1), "momentum": alike(0.8), "decay": alike(decay)},
        rescale=rescale,
    )


def test_spngd_with_the_default_refresh_starts_alike() -> None:
    """`Adaptive` refreshes everything in the first two steps."""
    compare(
        lambda model: SPNGD(model, lr=0.1, momentum=0.8, damping=DAMPING),
        lambda _: {"lr": alike(0.1), "momentum": alike(0.8), "decay": alike(0.0)},
        steps=2,
    )


def test_parameter_groups_have_settings_of_their_own() -> None:
    def grouped(model: Mixed) -> SPNGD:
        named = list(model.named_parameters())
        slow = [(n, p) for n, p in named if n.startswith("head")]
        rest = [(n, p) for n, p in named if not n.startswith("head")]
        groups = [
            {"params": slow, "lr": 0.01, "momentum": 0.5, "weight_decay": 0.1},
            {"params": rest},
        ]
        return spngd(model, groups)

    compare(
        grouped,
        lambda _: {
            "lr": alike(0.1) | {"head": 0.01},
            "momentum": alike(0.8) | {"head": 0.5},
            "decay": alike(0.0) | {"head": 0.1},
        },
    )


def test_a_torch_scheduler_moves_the_learning_rate() -> None:
    compare(
        spngd,
        lambda step: {
            "lr": alike(0.1 * 0.5**step),
            "momentum": alike(0.8),
            "decay": alike(0.0),
        },
        scheduler_of=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5),
    )


def test_polynomial_decay_couples_the_momentum() -> None:
    """eq. 21 and 22, in the unit that step() is called in."""

    def factor(step: int) -> float:
        return (1 - max(0.0, step - 1) / (6 - 1)) ** 3

    compare(
        spngd,
        lambda step: {
            "lr": alike(0.1 * factor(step)),
            "momentum": alike(0.8 * factor(step)),
            "decay": alike(0.0),
        },
        scheduler_of=lambda o: schedules.PolynomialDecay(o, start=1, end=6, power=3),
        steps=5,
    )


def test_spngd_takes_a_closure() -> None:
    model, x, y = mixed()
    twin, _, _ = mixed()
    optimizer = spngd(model)

    def closure() -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss.item()

    want = closure()
    assert optimizer.step(closure) == pytest.approx(want)
    by_hand = ByHand(twin)
    by_hand.step(x, y, lr=alike(0.1), momentum=alike(0.8), decay=alike(0.0))
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        near(p.detach(), q.detach())
    optimizer.close()
