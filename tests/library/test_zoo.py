"""The zoo: each shape runs under each optimizer, covered and counted as it says.

How far each gets in 300 steps, against AdamW, is `benchmarks/zoo.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.support import oracle
from tests.support.zoo import ZOO, Batch, Make, Member, drawn, train
from torch import Tensor, nn

import natgrad

LAYERS = (nn.Linear, nn.Embedding, *oracle.CONVOLUTIONS)
ELSEWHERE = ("ConvTranspose2d", "NonDynamicallyQuantizableLinear")
"""Types whose brute force is in `layers/test_transposed.py` and `test_many.py`."""


def made(name: str) -> tuple[Member, nn.Module, Batch]:
    """A member in float64, with a small batch."""
    member, source = ZOO[name], torch.Generator().manual_seed(0)
    data = drawn(member.data(source), member.batch and 6, source)
    torch.manual_seed(0)
    data = {n: x.double() if x.is_floating_point() else x for n, x in data.items()}
    return member, member.build().double(), data


@pytest.fixture(autouse=True)
def _guesses_are_right() -> Iterator[None]:
    """That forwards of equally many examples are of the same ones is warned about."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*forwards")
        yield


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def optimizers(member: Member, model: nn.Module) -> Iterator[tuple[Any, Any]]:
    """One line of natgrad each: what has the report, and what steps."""
    for host in (torch.optim.SGD, torch.optim.AdamW):
        optimizer: Any = host(trained(model), lr=1e-3)
        with natgrad.KFAC(
            model, optimizer, damping=1e-2, loss=member.reduction
        ) as kfac:
            yield kfac, optimizer
    with natgrad.SPNGD(model, lr=1e-3, loss=member.reduction) as optimizer:
        yield optimizer, optimizer
    with natgrad.Polar(model, loss=member.reduction) as optimizer:
        yield optimizer, optimizer


@pytest.mark.parametrize("name", ZOO)
def test_a_member_trains_and_is_covered_as_it_says(name: str) -> None:
    member, model, batch = made(name)
    for owner, optimizer in optimizers(member, model):
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        for _ in range(2):
            optimizer.zero_grad()
            member.loss(model, batch).backward()
            optimizer.step()
        report = {line.split()[0]: line for line in owner.report().splitlines() if line}
        for key, p in model.named_parameters():
            # the bias of a key has a gradient of rounding errors
            still = p.grad is None or p.grad.abs().max() < 1e-12
            assert p.isfinite().all(), key
            assert still or not torch.equal(p, before[key]), key
            is_other = not p.requires_grad or key.startswith(member.others)
            if type(owner) is natgrad.KFAC:
                assert (report[key].split()[1] == "-") == is_other, report[key]


def uses_of(
    member: Member, model: nn.Module, batch: Batch
) -> dict[nn.Module, list[tuple[Tensor, Tensor]]]:
    """Inputs of each layer's calls, and the gradients at their outputs."""
    calls: list[tuple[nn.Module, Any, Any]] = []
    layers = [m for m in model.modules() if type(m) in LAYERS]
    handles = [
        m.register_forward_hook(lambda m, args, out: calls.append((m, args[0], out)))
        for m in layers
    ]
    torch.manual_seed(1)
    loss = member.loss(model, batch)
    for handle in handles:
        handle.remove()
    calls = [call for call in calls if call[2].requires_grad]
    grads = torch.autograd.grad(loss, [out for _, _, out in calls])
    found: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {}
    for (module, x, _), g in zip(calls, grads, strict=True):
        found.setdefault(module, []).append((x.detach(), g))
    return found


def expected(
    module: nn.Module, uses: list[tuple[Tensor, Tensor]], scale: float
) -> tuple[Tensor, Tensor]:
    """A and G by the oracle, an example and a position at a time."""
    rows = [
        oracle.use_of(module, x[i : i + 1], g[i : i + 1])
        for x, g in uses
        for i in range(len(x))
    ]
    inputs, outputs = (torch.cat(part, 1) for part in zip(*rows, strict=True))
    a = torch.stack([oracle.outer(x) for x in inputs.unbind(1)]).mean(0)
    g = torch.stack([oracle.outer(x) for x in outputs.unbind(1)]).sum(0)
    return a, scale * g


@pytest.mark.parametrize("name", ZOO)
def test_its_counts_are_those_of_brute_force(name: str) -> None:
    member, model, batch = made(name)
    uses = uses_of(member, model, batch)
    terms = member.terms * len(batch.get("x", batch["y" if "y" in batch else "x"]))
    scale = 1 / terms if member.reduction == "sum" else float(terms)
    optimizer = torch.optim.SGD(trained(model), lr=1e-3)
    with natgrad.KFAC(model, optimizer, loss=member.reduction) as kfac:
        torch.manual_seed(1)
        member.loss(model, batch).backward()
        optimizer.step()
        known = {
            key.removesuffix(".weight")
            for key, p in model.named_parameters()
            if p.requires_grad and not key.startswith(member.others or ("-",))
            if key.endswith(".weight")
        }
        names = {model.get_submodule(key): key for key in known}
        names = {m: k for m, k in names.items() if type(m).__name__ not in ELSEWHERE}
        assert names.keys() <= uses.keys()
        for module, key in names.items():
            a, g = expected(module, uses[module], scale)
            if isinstance(module, nn.Embedding):
                a = a.diagonal(dim1=1, dim2=2)
            found_a, found_g = (kfac.statistic(f"{key}/{side}") for side in "AG")
            torch.testing.assert_close(found_a, a, rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(found_g, g, rtol=1e-9, atol=1e-12)


def adamw(rate: float) -> Make:
    return lambda model, _: torch.optim.AdamW(trained(model), lr=rate)


def kfac(model: nn.Module, _: Member) -> Any:
    optimizer = torch.optim.SGD(trained(model), lr=0.1, momentum=0.9)
    natgrad.KFAC(model, optimizer, damping=1e-2)
    return optimizer


@pytest.mark.parametrize("name", ["several forwards", "autoencoder"])
def test_at_a_constant_rate_it_gets_as_far_as_adamw(name: str) -> None:
    """With steps at the norm of now, or a clip of 1e-3, one of these fails."""
    member, steps = ZOO[name], 150
    start = train(member, adamw(1e-3), seed=0, steps=0)
    reached = min(train(member, adamw(r), 0, steps) for r in (1e-3, 3e-3, 1e-2))
    for make in (lambda model, _: natgrad.Polar(model), kfac):
        assert train(member, make, 0, steps) <= 1.1 * reached + 0.01 * start
