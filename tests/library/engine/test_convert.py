"""A model that is converted after its optimizer was made: the optimizer follows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.fleet import METHODS, Fleet, network, outcome, quick
from tests.support.world import run_world
from torch import Tensor

import natgrad

KINDS = [m for m in METHODS if not m.endswith("ddp")]
RULES: dict[str, dict[str, Any]] = {
    "K-FAC": {},
    "EKFAC": {"rule": natgrad.EKFAC()},
    "adaptive": {"rule": natgrad.EigenAdam()},
    "norms": {"norm": "full"},
}


def weights(fleet: Fleet) -> list[Tensor]:
    return [p.detach().clone() for p in fleet.plain.parameters()]


@pytest.mark.parametrize("kind", KINDS)
def test_converted_at_once_it_is_as_if_it_was_made_so(kind: str) -> None:
    before, after = Fleet(kind, 0, model=network().double()), Fleet(kind, 0)
    after.plain.double()
    before.step(3)
    after.step(3)
    for left, right in zip(weights(before), weights(after), strict=True):
        assert right.dtype == torch.float64
        assert torch.equal(left, right)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("to", [torch.float64, torch.bfloat16])
def test_converted_later_it_goes_on(rule: str, to: torch.dtype) -> None:
    """As one of such a model that has loaded the state."""
    dtype = torch.float32 if to == torch.float64 else torch.float64
    wide = torch.float64 if to == torch.float64 else torch.float32
    fleet, fresh = (
        Fleet("kfac", 0, model=network().to(each), momentum=0.0, **RULES[rule])
        for each in (dtype, to)
    )
    fleet.step(3)
    fresh.plain.load_state_dict(fleet.plain.state_dict())
    fresh.optimizer.load_state_dict(fleet.optimizer.state_dict())
    fresh.generator.set_state(fleet.generator.get_state())
    fleet.plain.to(to)
    for each in (fleet, fresh):
        each.step(2)
        kept = each.natural.engine.statistics.states.values()
        held = [x for s in kept for x in (*(s.inverse or ()), *s.history)]
        assert {x.dtype for x in held} == {wide}
    for left, right in zip(weights(fleet), weights(fresh), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("kind", KINDS)
def test_momentum_is_converted_too(kind: str) -> None:
    fleet = Fleet(kind, 0)
    fleet.step(2)
    fleet.plain.double()
    fleet.step(2)
    assert all(bool(p.isfinite().all()) for p in weights(fleet))
    if kind != "kfac":
        for entry in fleet.optimizer.state.values():
            assert entry["velocity"].dtype == torch.float64


def convert(rank: int, method: str, everywhere: bool) -> Any:
    quick()
    fleet = Fleet(method, rank, timeout=1.5)
    fleet.step(2)
    if everywhere or rank:
        fleet.plain.double()
    found = outcome(lambda: fleet.step(2))
    return found, fleet.weights()


@pytest.mark.processes
@pytest.mark.parametrize("method", ["spngd", "kfac"])
def test_all_ranks_may_convert(method: str) -> None:
    (found, flat), (_, other) = run_world(2, convert, method, True)
    assert found[0] == ""
    assert flat.dtype == torch.float64
    assert torch.equal(flat, other)


@pytest.mark.processes
@pytest.mark.parametrize("method", ["spngd", "kfac"])
def test_one_rank_alone_may_not(method: str) -> None:
    found = [each for each, _ in run_world(2, convert, method, False)]
    for kind, message, _ in found:
        assert kind == "CommError"
        assert "rank 1 in model.to(torch.float64, cpu) in step 2" in message
