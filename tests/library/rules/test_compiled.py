"""A compiled update is the update, and nothing is compiled twice for one shape."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.toys import mlp, same, snapshot
from torch import Tensor
from torch._dynamo.utils import counters

import natgrad
from natgrad import SOAP, SPNGD, Every, Options, Polar

MAKERS: dict[str, tuple[type[SPNGD], dict[str, Any]]] = {
    "polar": (Polar, {}),
    "evened rows": (Polar, {"rule": natgrad.Orthogonal(beta2=0.9)}),
    "soap": (SOAP, {"lr": 0.01}),
    "kfac": (SPNGD, {"length": natgrad.KLClip()}),
    "ekfac": (SPNGD, {"rule": natgrad.EKFAC(style="relative")}),
}
STEPS = 7


def trained(
    maker: str, backend: str | None, look: Callable[[int], None] = lambda step: None
) -> list[Tensor]:
    """Weights and state after steps with another rate and damping each."""
    kind, options = MAKERS[maker]
    chosen = replace(
        kind.defaults,
        refresh=Every(2, 2),
        damping=lambda step: 1.0 / (1 + step),
        compile=backend,
        **options,
    )
    model = mlp()
    # a norm follows: its gradient is nothing but rounding
    model[0].register_parameter("bias", None)
    optimizer = kind(model, lr=0.01, options=chosen)
    torch.manual_seed(1)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (1 + step)
        x = torch.randn(8, next(model.parameters()).shape[1], dtype=torch.float64)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        look(step)
    # averages in bases, which a graph makes again in each step instead
    optimizer.engine.preconditioner.moments.outdate(optimizer.engine.block)
    return snapshot(model, optimizer)


def near(found: list[Tensor], wanted: list[Tensor], error: float) -> None:
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=error, atol=error)


@pytest.mark.parametrize("maker", MAKERS)
def test_it_is_the_update_and_rates_compile_nothing_again(maker: str) -> None:
    torch.compiler.reset()
    counters.clear()
    known: list[int] = []
    found = trained(
        maker, "eager", lambda _: known.append(counters["stats"]["unique_graphs"])
    )
    assert known[0] > 0
    # from the second step on second moments have bases, or factors are known
    assert known[2:] == known[2:3] * (STEPS - 2), known
    near(found, trained(maker, None), 1e-12)


@pytest.mark.long
@pytest.mark.timeout(1200)  # C++ is compiled
@pytest.mark.processes
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize("maker", ["polar", "soap"])
def test_inductor_gives_the_same_within_rounding(maker: str) -> None:
    near(trained(maker, "inductor"), trained(maker, None), 1e-9)


def test_without_a_compiler_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise RuntimeError("No working C++ compiler found\nin torch")

    monkeypatch.setattr(torch, "compile", refused)
    with pytest.raises(RuntimeError, match=r"'eager'.*No working C\+\+.*Must be None"):
        trained("polar", "eager")


def test_only_known_compilers_are_taken() -> None:
    with pytest.raises(ValueError, match=r"compile='other'\. Must be None or in"):
        Options(compile="other")
    assert Options().compile is None
    assert same(trained("polar", None), trained("polar", None))
