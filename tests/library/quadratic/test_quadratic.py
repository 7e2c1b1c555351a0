"""Learning rate, momentum and predictions against a dense Gauss-Newton matrix."""

import copy
import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.support.quadratic import Dense, Outputs, Part, as_tuple, flat, followed
from torch import Tensor, nn
from torch.nn import functional as F

import natgrad

N = 7


class Heads(nn.Module):
    """A mean and something positive, or its logarithm."""

    def __init__(self, log: bool) -> None:
        super().__init__()
        self.body, self.log = nn.Linear(4, 5), log
        self.mean, self.spread = nn.Linear(5, 2), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.body(x))
        spread = self.spread(h)
        return self.mean(h), spread if self.log else F.softplus(spread) + 0.1


def mlp(outputs: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs))


def nll(y: Tensor, log: bool) -> Callable[[Outputs], Tensor]:
    def loss(o: Outputs) -> Tensor:
        return F.gaussian_nll_loss(o[0], y, o[1].exp() if log else o[1], eps=0.0)

    return loss


def gaussian_fisher(log: bool) -> Callable[[Outputs], Tensor]:
    def fisher(o: Outputs) -> Tensor:
        v = o[1].exp() if log else o[1]
        second = torch.full_like(v, 0.5) if log else 1 / (2 * v**2)
        return torch.diag(flat([1 / v, second]) / v.numel())

    return fisher


def quartic(o: Outputs, tangents: list[Tensor]) -> list[Tensor]:
    """What a user may give: half of the true curvature of the loss below."""
    return [6 * o[0] ** 2 * tangents[0] / o[0].numel()]


Case = tuple[nn.Module, Part, dict[str, Any]]


def case(name: str, seed: int = 0, n: int = N) -> Case:
    torch.manual_seed(0)
    models = {"gaussian": Heads(False), "gaussian_log": Heads(True)}
    model = models.get(name, mlp()).double()
    torch.manual_seed(1 + seed)
    x = torch.randn(n, 4, dtype=torch.float64)
    y = torch.randn(n, 2 if name in models else 3, dtype=torch.float64)
    labels = torch.arange(n) % 3
    if name == "squared error":
        return model, Part(inputs=x, loss=lambda o: F.mse_loss(o[0], y)), {}
    if name == "cross-entropy":
        weight = torch.tensor([1.0, 2.0, 0.5]).double()
        part = Part(inputs=x, loss=lambda o: F.cross_entropy(o[0], labels, weight))
        return model, part, {}
    if name == "binary cross-entropy":
        bits = (y > 0).double()
        bce = F.binary_cross_entropy_with_logits
        return model, Part(inputs=x, loss=lambda o: bce(o[0], bits)), {}
    if name == "own":
        h: Callable[[Outputs], Tensor] = lambda o: torch.diag(  # noqa: E731
            flat([6 * o[0] ** 2]) / o[0].numel()
        )
        part = Part(inputs=x, loss=lambda o: (o[0] ** 4).mean(), curvature=h)
        return model, part, {"hessian": quartic}
    log = name == "gaussian_log"
    part = Part(inputs=x, loss=nll(y, log), curvature=gaussian_fisher(log))
    return model, part, {"hessian": name}


CASES = (
    "squared error",
    "cross-entropy",
    "binary cross-entropy",
    "gaussian",
    "gaussian_log",
    "own",
)
RATES = ("lr", "momentum", "trust")
BEGIN = natgrad.AutoDamping(initial=0.02, every=1)


def closure_of(model: nn.Module, part: Part) -> Callable[[], Any]:
    def closure() -> Any:
        outputs = model(part.inputs)
        return outputs, part.loss(as_tuple(outputs))

    return closure


def theta_of(model: nn.Module) -> Tensor:
    return flat([p.detach() for p in model.parameters()]).clone()


def spngd(model: nn.Module, **options: Any) -> natgrad.SPNGD:
    return natgrad.SPNGD(
        model,
        options=dataclasses.replace(
            natgrad.SPNGD.auto,
            **{
                "damping": BEGIN,
                "refresh": natgrad.Every(),
                "weight_decay": 0.01,
                **options,
            },
        ),
    )


@pytest.mark.parametrize("batch_part", [1.0, 0.8])
@pytest.mark.parametrize("name", CASES)
def test_rates_and_prediction_are_those_of_the_dense_matrix(
    name: str, batch_part: float
) -> None:
    """They follow the least of the damped model over the two directions."""
    model, part, options = case(name)
    kept = None if batch_part == 1.0 else 6  # of seven
    dense = Dense(model, [part], 0.01, kept)
    # of a part the matrix is too small, and more damping keeps steps from being undone
    begin = BEGIN if kept is None else dataclasses.replace(BEGIN, initial=0.5)
    optimizer = spngd(model, **options, batch_part=batch_part, damping=begin)
    last, group, rates = None, optimizer.param_groups[0], (0.0, 0.0)
    for _ in range(3):
        theta = theta_of(model)
        damping = optimizer.health()["damping"]
        loss = optimizer.step(closure_of(model, part))
        torch.testing.assert_close(
            loss, dense.objective(theta) - 0.01 * theta.square().sum() / 2
        )
        step = theta_of(model) - theta
        b, g = dense.matrix(theta), dense.gradient(theta)
        lr, momentum, trust = (optimizer.health()[n] for n in RATES)
        update = (step if last is None else step - momentum * last) / lr
        two = torch.stack([update] if last is None else [update, last])
        best = torch.linalg.solve(two @ (b @ two.T + damping * two.T), -two @ g)
        rates = followed(rates, (*best.tolist(), 0.0)[:2], trust)
        assert (lr, momentum) == pytest.approx((trust * rates[0], rates[1]), rel=1e-7)
        true = dense.objective(theta + step) - dense.objective(theta)
        predicted = g @ step + step @ b @ step / 2
        assert optimizer.health()["ratio"] == pytest.approx(float(true / predicted))
        last = step
    assert group["lr"] > 0
    assert group["momentum"] != 0


def test_the_direction_is_that_of_the_same_options_with_numbers() -> None:
    found: list[Tensor] = []
    for auto in (True, False):
        model, part, _ = case("cross-entropy")
        theta = theta_of(model)
        numbers: dict[str, Any] = {} if auto else {"lr": 1.0, "damping": 0.02}
        optimizer = spngd(model, fisher="empirical", **numbers, momentum=0.0)
        if auto:
            optimizer.step(closure_of(model, part))
        else:
            closure_of(model, part)()[1].backward()
            optimizer.step()
        found.append((theta_of(model) - theta) / optimizer.param_groups[0]["lr"])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("name", ["lr", "momentum", "damping"])
def test_each_can_be_on_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("natgrad.math.quadratic.RAREST", 1)  # found in every step
    model, part, _ = case("squared error")
    numbers: dict[str, Any] = {"lr": 0.3, "momentum": 0.4, "damping": 0.02}
    chosen = numbers | {name: BEGIN if name == "damping" else "auto"}
    optimizer = spngd(model, **chosen, weight_decay=0.0)
    dense, last, group = Dense(model, [part], 0.0), None, optimizer.param_groups[0]
    found = 0.0
    for _ in range(3):
        theta, damping = theta_of(model), optimizer.health()["damping"]
        optimizer.step(closure_of(model, part))
        step = theta_of(model) - theta
        left = dense.gradient(theta) + dense.matrix(theta) @ step + damping * step
        if last is not None and name == "momentum":
            beyond = -float(left @ last) * math.copysign(1, group["momentum"])
            if abs(group["momentum"]) == 1:  # more of it would be better, less worse
                assert beyond > 0
            else:
                assert beyond == pytest.approx(0.0, abs=1e-12)
        if last is not None and name == "lr":
            along = (step - group["momentum"] * last) / group["lr"]
            curved = dense.matrix(theta) @ along + damping * along
            best = group["lr"] - float(left @ along) / float(curved @ along)
            trust = optimizer.health()["trust"]
            found = followed((found, 0.0), (best, 0.0), trust)[0]
            assert group["lr"] == pytest.approx(trust * found)
        elif name == "lr":
            found = group["lr"] / optimizer.health()["trust"]
        last = step
    kept = {n: group[n] for n in ("lr", "momentum") if n != name}
    assert kept == {n: numbers[n] for n in kept}
    assert (optimizer.health()["damping"] == 0.02) == (name != "damping")


def test_damping_follows_the_ratio_within_its_bounds() -> None:
    model, part, _ = case("squared error")
    auto = natgrad.AutoDamping(initial=1.0, every=2, factor=0.9, lowest=0.05)
    optimizer = spngd(model, damping=auto)
    seen = [1.0]
    for _ in range(10):
        optimizer.step(closure_of(model, part))
        assert optimizer.health()["ratio"] > 0.75
        seen.append(optimizer.health()["damping"])
    # the first two steps are compared, then every second; each falls by more
    assert seen[:6] == pytest.approx([0.81**n for n in (0, 1, 3, 6, 6, 10)])
    assert seen[-1] == 0.05


@pytest.mark.parametrize("host", [torch.optim.SGD, torch.optim.AdamW])
def test_kfac_judges_the_step_that_its_optimizer_took(host: Any) -> None:
    model, part, _ = case("cross-entropy")
    decay = 0.01 if host is torch.optim.SGD else 0.0  # AdamW's is no part of the loss
    optimizer = host(model.parameters(), lr=0.05, weight_decay=0.01)
    kfac = natgrad.KFAC(
        model,
        optimizer,
        damping=natgrad.AutoDamping(initial=0.5, every=2),
        refresh=natgrad.Every(),
    )
    dense = Dense(model, [part], decay)
    for i in range(4):
        theta, before = theta_of(model), kfac.health()["damping"]
        loss = optimizer.step(closure_of(model, part))
        step = theta_of(model) - theta
        b, g = dense.matrix(theta), dense.gradient(theta)
        true = dense.objective(theta + step) - dense.objective(theta)
        ratio = float(true / (g @ step + step @ b @ step / 2))
        if i < 3:  # at first each step is compared
            assert kfac.health()["ratio"] == pytest.approx(ratio)
            assert kfac.health()["damping"] == pytest.approx(
                before * 0.95 ** (2 * i + 2)
            )
        else:
            assert kfac.health()["damping"] == before
        assert dense.decay or loss == pytest.approx(float(dense.objective(theta)))


def test_micro_batches_are_one_batch() -> None:
    found: list[Tensor] = []
    for parts in (1, 2):
        model, part, _ = case("squared error", n=8)
        y = torch.randn(8, 3, generator=torch.Generator().manual_seed(3)).double()
        optimizer = spngd(model, fisher="empirical")
        for _ in range(3):
            pairs = zip(part.inputs.chunk(parts), y.chunk(parts), strict=True)

            def closure(x: Tensor, y: Tensor, model: nn.Module = model) -> Any:
                outputs = model(x)
                return outputs, F.mse_loss(outputs, y)

            optimizer.step([partial(closure, x, y) for x, y in pairs])
        found.append(theta_of(model))
    torch.testing.assert_close(*found)


def test_resuming_is_exact() -> None:
    def run(optimizer: natgrad.SPNGD, model: nn.Module, steps: int) -> None:
        for _ in range(steps):
            optimizer.step(closure_of(model, part))

    model, part, _ = case("squared error")
    optimizer = spngd(model, fisher="empirical")
    run(optimizer, model, 8)
    saved, weights = copy.deepcopy(optimizer.state_dict()), theta_of(model)
    run(optimizer, model, 4)
    again, _, _ = case("squared error")
    nn.utils.vector_to_parameters(weights, again.parameters())
    resumed = spngd(again, fisher="empirical")
    resumed.load_state_dict(saved)
    assert resumed.health()["lr"] == saved["param_groups"][0]["lr"]
    run(resumed, again, 4)
    assert torch.equal(theta_of(model), theta_of(again))
    assert optimizer.health() == resumed.health()


def test_what_is_found_is_in_health_and_in_diagnostics() -> None:
    model, part, _ = case("squared error")
    optimizer = spngd(model)
    optimizer.watch(every=1)
    for _ in range(2):
        optimizer.step(closure_of(model, part))
        found = optimizer.health()
        numbers = {n: found[n] for n in ("damping", "ratio", *RATES)}
        assert numbers.items() <= optimizer.diagnostics().items()
    host = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer.close()
    kfac = natgrad.KFAC(model, host, damping="auto")
    kfac.watch(every=1)
    host.step(closure_of(model, part))
    assert kfac.diagnostics()["lr"] == 0.05
    assert kfac.diagnostics()["damping"] > 0


def test_a_scheduler_multiplies_what_is_found() -> None:
    found: list[float] = []
    for gamma in (1.0, 0.5):
        model, part, _ = case("squared error")
        optimizer = spngd(model, fisher="empirical", momentum=0.0, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma)
        optimizer.step(closure_of(model, part))
        schedule.step()
        theta = theta_of(model)
        optimizer.step(closure_of(model, part))
        found.append(float((theta_of(model) - theta).norm()))
    assert found[1] == pytest.approx(found[0] / 2)


def test_a_scaler_is_refused() -> None:
    model, scaler = mlp(), torch.amp.GradScaler("cpu")
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="takes no closure"):
        natgrad.SPNGD(model, lr="auto", grad_scaler=scaler)
    with pytest.raises(ValueError, match="takes no closure"):
        natgrad.KFAC(model, sgd, damping="auto", grad_scaler=scaler)
