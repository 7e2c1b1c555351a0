"""Which forwards and backwards count, and what a step's loss averages over."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.construct import construct
from tests.support.oracle import near
from torch import Tensor, nn

import natgrad
from natgrad import KFAC, SPNGD, Every

COUNT = 8


class Net(nn.Module):
    """One linear layer, also to be had without the model's own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def encode(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x)


def made() -> tuple[Net, Tensor, Tensor]:
    torch.manual_seed(0)
    x, y = torch.randn(COUNT, 4).double(), torch.randn(COUNT, 4).double()
    return Net().double(), x, y


def loss_of(outputs: Tensor) -> Tensor:
    return outputs.square().sum(1).mean()


def second_moment(rows: Tensor) -> Tensor:
    return rows.T @ rows


def captured(
    model: nn.Module, run: Callable[[KFAC], object], **options: Any
) -> dict[str, Tensor]:
    with construct(
        KFAC, model, length=natgrad.Free(), refresh=Every(), **options
    ) as kfac:
        run(kfac)
        kfac.step()
        return {kind: kfac.statistic(f"layer/{kind}")[0] for kind in "AG"}


# -- gradients that no weight gets ----------------------------------------------------


def attack(model: Net, x: Tensor, *, retained: bool = False) -> None:
    """Gradients of the inputs alone, as an adversary or a saliency map takes them."""
    z = x.clone().requires_grad_()
    loss = loss_of(model(z))
    for _ in range(4):
        torch.autograd.grad(loss, z, retain_graph=True)
    loss.backward(inputs=[z], retain_graph=retained)


@pytest.mark.parametrize("options", [{}, {"rule": natgrad.Kronecker(sides="inputs")}])
def test_gradients_of_inputs_are_no_micro_batches(options: dict[str, Any]) -> None:
    model, x, _ = made()

    def run(_: KFAC) -> None:
        attack(model, x)
        loss_of(model(x)).backward()

    with construct(
        KFAC, model, length=natgrad.Free(), refresh=Every(), **options
    ) as kfac:
        run(kfac)
        assert kfac.engine.capture.current.forwards == 1
        assert kfac.engine.capture.current.calls["layer/A"] == 1
    model.zero_grad()
    found = captured(model, run)
    ghat = 2 * model(x).detach()
    near(found["G"], second_moment(ghat) / COUNT)


def test_a_graph_whose_inputs_were_asked_first_still_counts() -> None:
    """Saliency and loss of one forward: the second backward is the one that counts."""
    model, x, _ = made()

    def run(_: KFAC) -> None:
        z = x.clone().requires_grad_()
        loss = loss_of(model(z))
        torch.autograd.grad(loss, z, retain_graph=True)
        loss.backward()

    near(captured(model, run)["G"], second_moment(2 * model(x).detach()) / COUNT)


def test_weights_that_are_asked_for_by_name_count() -> None:
    model, x, _ = made()

    def run(_: KFAC) -> None:
        params = list(model.parameters())
        grads = torch.autograd.grad(loss_of(model(x)), params)
        for p, g in zip(params, grads, strict=True):
            p.grad = g

    near(captured(model, run)["G"], second_moment(2 * model(x).detach()) / COUNT)


def test_a_backward_into_other_layers_alone_does_not_count() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    x = torch.randn(COUNT, 4).double()
    with KFAC(model, length=natgrad.Free(), refresh=Every()) as kfac:
        loss_of(model(x)).backward(inputs=list(model[2].parameters()))
        assert set(kfac.engine.capture.current.calls) == {"2/A", "2/G"}


# -- several forwards -----------------------------------------------------------------


@pytest.mark.parametrize("accumulation", ["mean", "sum"])
def test_a_layer_called_without_its_model_has_micro_batches_too(
    accumulation: str,
) -> None:
    model, x, y = made()
    divisor = 2 if accumulation == "mean" else 1

    def run(_: KFAC) -> None:
        for part in (x, y):
            (loss_of(model.encode(part)) / divisor).backward()

    found = captured(model, run, accumulation=accumulation)
    ghat = 2 * model(torch.cat((x, y))).detach()
    near(found["G"], second_moment(ghat) / (2 * COUNT))


@pytest.mark.parametrize("accumulation", ["mean", "sum"])
@pytest.mark.parametrize("loss", ["mean", "sum", "tokens"])
def test_pairs_of_one_loss_with_its_terms_given_for_the_step(
    accumulation: str, loss: str
) -> None:
    """A Siamese network: N pairs, two forwards, one mean."""
    model, x, y = made()

    def run(kfac: KFAC) -> None:
        kfac.set_loss_terms(COUNT, whole_step=True)
        distances = (model(x) - model(y)).square().sum(1)
        (distances.sum() if loss == "sum" else distances.mean()).backward()

    found = captured(model, run, accumulation=accumulation, loss=loss)
    ghat = 2 * (model(x) - model(y)).detach()
    near(found["G"], 2 * second_moment(ghat) / COUNT)


def test_terms_of_the_whole_step_hold_for_its_micro_batches() -> None:
    """Token counts that differ: each micro-batch's sum over the step's count."""
    model, x, y = made()
    parts = (x[:3], y)

    def run(kfac: KFAC) -> None:
        kfac.set_loss_terms(3 + COUNT, whole_step=True)
        for part in parts:
            (model(part).square().sum() / (3 + COUNT)).backward()

    ghat = 2 * model(torch.cat(parts)).detach()
    near(captured(model, run)["G"], second_moment(ghat) / (3 + COUNT))


def test_terms_of_the_whole_step_come_before_its_first_backward() -> None:
    model, x, _ = made()
    with KFAC(model, length=natgrad.Free(), refresh=Every()) as kfac:
        loss_of(model(x)).backward()
        with pytest.raises(RuntimeError, match="before the first backward"):
            kfac.set_loss_terms(3, whole_step=True)


def test_terms_of_the_whole_step_hold_for_one_step() -> None:
    model, x, _ = made()
    ghat = 2 * model(x).detach()
    with KFAC(model, length=natgrad.Free(), refresh=Every(), factor_decay=0.0) as kfac:
        kfac.watch()  # keeps averages
        kfac.set_loss_terms(3, whole_step=True)
        for _ in range(2):
            model.zero_grad()
            loss_of(model(x)).backward()
            kfac.step()
        near(kfac.statistic("layer/G")[0], second_moment(ghat) / COUNT)


def test_positions_before_examples_with_the_terms_given() -> None:
    """(positions, examples, features): the first dim is not what the loss is over."""
    model, _, _ = made()
    x = torch.randn(50, 4, 4).double()

    def run(kfac: KFAC) -> None:
        kfac.set_loss_terms(4)
        model(x).square().sum().div(4).backward()

    ghat = 2 * model(x).detach().flatten(0, 1)
    near(captured(model, run)["G"], second_moment(ghat) / 4)


# -- a fused optimizer, which unscales gradients by itself ----------------------------

RULES: dict[str, dict[str, Any]] = {
    "kl": {},
    "layer": {"length": natgrad.LayerTrust()},
    "adaptive": {"rule": natgrad.EigenAdam(), "length": natgrad.Free()},
    "orthogonal": {
        "rule": natgrad.Orthogonal(),
        "length": natgrad.LayerTrust(),
        "fallback": natgrad.Adam(),
    },
}


def amp_weights(fused: bool, **options: Any) -> list[Tensor]:
    torch.manual_seed(0)
    layers = (nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    model = nn.Sequential(*layers).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    options = {"grad_scaler": scaler, "refresh": Every()} | options
    with construct(KFAC, model, optimizer, **options):
        for _ in range(3):
            optimizer.zero_grad()
            loss = F.cross_entropy(
                model(torch.randn(16, 6).double()), torch.randint(3, (16,))
            )
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("rule", RULES)
def test_a_fused_optimizer_behind_a_grad_scaler_steps_as_any(rule: str) -> None:
    fused, plain = amp_weights(True, **RULES[rule]), amp_weights(False, **RULES[rule])
    for p, q in zip(fused, plain, strict=True):
        near(p, q)


def test_an_overflow_with_a_fused_optimizer_leaves_no_trace() -> None:
    model, x, _ = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    before = [p.detach().clone() for p in model.parameters()]
    with KFAC(model, optimizer, grad_scaler=scaler):
        scaler.scale(loss_of(model(x)) * float("inf")).backward()
        with pytest.warns(UserWarning, match="skipped"):
            scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() < 2.0**16
    for p, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, old)


# -- the average of gradients ---------------------------------------------------------


def test_rescaling_is_no_part_of_an_average_of_gradients() -> None:
    model, x, _ = made()
    options: dict[str, Any] = {
        "average": natgrad.AverageGradients(),
        "decay": natgrad.Rescaled(),
    }
    with construct(
        SPNGD, model, lr=1e-9, momentum=0.9, damping=1.0, **options
    ) as optimizer:
        loss_of(model(x)).backward()
        weight = model.layer.weight
        assert weight.grad is not None
        gradient = weight.grad.clone()
        optimizer.step()
        near(optimizer.state[weight]["velocity"], 0.1 * gradient)
        near(weight.norm(), torch.tensor(6.0).double().sqrt(), rtol=1e-8)


def test_weights_that_stand_in_for_the_model_s_do_not_disturb_it() -> None:
    """As those of a functional call, from which gradients flow back to the model's."""
    model, x, _ = made()
    fast = {name: p - 0.1 * p for name, p in model.named_parameters()}
    with KFAC(model, length=natgrad.Free(), refresh=Every()) as kfac:
        loss_of(torch.func.functional_call(model, fast, (x,))).backward()
        kfac.step()
        ones = torch.cat((x, torch.ones(COUNT, 1).double()), 1)
        near(kfac.statistic("layer/A")[0], second_moment(ones) / COUNT)
