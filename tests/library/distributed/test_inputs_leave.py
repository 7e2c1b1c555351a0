"""Statistics of inputs leave in the forward, and count only if their backward comes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.fleet import Fleet
from tests.support.world import run_world
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from natgrad.distributed.overlap import HOLD
from natgrad.plan.messages import mine

SMALL = {"bucket_bytes": 1}


class Network(nn.Module):
    """Three layers, the first two of which may be recomputed in the backward."""

    def __init__(self, recompute: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 5)
        self.last, self.recompute = nn.Linear(5, 3), recompute
        self.double()

    def body(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(torch.tanh(self.first(x))))

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute:
            x.requires_grad_()
            reentrant = self.recompute == "reentrant"
            return self.last(checkpoint(self.body, x, use_reentrant=reentrant))
        return self.last(self.body(x))


def batch(fleet: Fleet) -> tuple[Tensor, Tensor]:
    x = torch.randn(8, 4, generator=fleet.generator).double()
    return x, torch.randint(0, 3, (8,), generator=fleet.generator)


def loss_of(fleet: Fleet) -> Tensor:
    x, y = batch(fleet)
    return F.cross_entropy(fleet.model(x), y)


def plain(fleet: Fleet, step: int) -> None:
    loss_of(fleet).backward()


def two_micro_batches(fleet: Fleet, step: int) -> None:
    for _ in range(1 + (step > 0)):  # more of them than in the step before
        (loss_of(fleet) / 2).backward()


def abandoned(fleet: Fleet, step: int) -> None:
    """On one rank, in one step, a forward whose loss is thrown away."""
    if fleet.rank == 1 and step == 1:
        loss_of(fleet)
    loss_of(fleet).backward()


def cleared(fleet: Fleet, step: int) -> None:
    """On all ranks a whole batch is thrown away, between a forward and its backward."""
    if step == 1:
        loss_of(fleet).backward()
        loss = loss_of(fleet)
        fleet.optimizer.zero_grad()
        loss.backward()
    else:
        loss_of(fleet).backward()


def by_name(fleet: Fleet, step: int) -> None:
    """A probe beside the loss, which does not count."""
    loss = loss_of(fleet)
    torch.autograd.grad(loss, [*fleet.plain.parameters()], retain_graph=True)
    loss.backward()


def only_by_name(fleet: Fleet, step: int) -> None:
    params = [*fleet.plain.parameters()]
    grads = torch.autograd.grad(loss_of(fleet), params)
    for p, g in zip(params, grads, strict=True):
        p.grad = g


CASES: dict[str, tuple[Callable[[Fleet, int], None], str]] = {
    "plain": (plain, ""),
    "recomputed": (plain, "not reentrant"),
    "recomputed, reentrant": (plain, "reentrant"),
    "two micro-batches": (two_micro_batches, ""),
    "abandoned": (abandoned, ""),
    "cleared": (cleared, ""),
    "by name": (by_name, ""),
    "only by name": (only_by_name, ""),
}


def trained(rank: int, case: str, overlap: bool, method: str) -> tuple[Any, Fleet]:
    work, recompute = CASES[case]
    comm = {**SMALL, "overlap": overlap}
    fleet = Fleet(method, rank, model=Network(recompute), comm=comm)
    for step in range(3):
        fleet.optimizer.zero_grad()
        work(fleet, step)
        fleet.optimizer.step()
    states = fleet.natural.engine.statistics.states
    sums = {n: s.average for n, s in states.items() if s.average is not None}
    return (sums, fleet.weights()), fleet


def every_case(rank: int) -> dict[str, int]:
    held: dict[str, int] = {}
    for case in CASES:
        # DDP's own hooks do not take a reentrant checkpoint, nor gradients by name
        for method in ("spngd", "spngd ddp")[: 1 if "name" in case else 2]:
            if "reentrant" in case and "ddp" in method:
                continue
            (sums, weights), fleet = trained(rank, case, True, method)
            held[f"{case}, {method}"] = fleet.natural.engine._outbox._sums._held
            fleet.natural.close()
            (wanted, same), fleet = trained(rank, case, False, method)
            fleet.natural.close()
            assert sums.keys() == wanted.keys()
            for name, x in wanted.items():
                torch.testing.assert_close(sums[name], x, rtol=1e-12, atol=1e-14)
            torch.testing.assert_close(weights, same, rtol=1e-11, atol=1e-13)
    return held


@pytest.mark.processes
def test_sums_are_the_same_as_without_overlap_whatever_backwards_come() -> None:
    first, *others = run_world(2, every_case)
    assert all(held == first for held in others)  # void on one rank is void on all
    assert {case for case, held in first.items() if held} == {
        "abandoned, spngd",
        "abandoned, spngd ddp",
        "only by name, spngd",
    }


def traced(rank: int, method: str) -> list[Any]:
    fleet = Fleet(method, rank, model=Network(), comm=SMALL)
    log: list[Any] = []
    for _ in range(2):
        fleet.optimizer.zero_grad()
        fleet.natural.engine.comm.log = log
        loss = loss_of(fleet)
        loss.register_hook(lambda g: log.append("backward"))
        loss.backward()
        fleet.optimizer.step()
    return log


@pytest.mark.processes
@pytest.mark.parametrize("method", ["spngd", "kfac ddp"])
def test_every_bucket_of_inputs_has_left_before_the_first_backward_hook(
    method: str,
) -> None:
    for log in run_world(2, traced, method):
        first = log.index("backward")
        second = first + 1 + log[first + 1 :].index("backward")
        for start, hook in ((0, first), (first, second)):
            before = [m for m in log[start:hook] if m != "backward"]
            early = [m for m in before if m.after[0] == "forward"]
            assert len(early) == 3, "one bucket a layer"
        late = [m for m in log[first:second] if m != "backward"]
        rest = [m for m in late if m.after[0] == "backward"]
        assert len(rest) >= 3
        assert all(m.after[0] != "backward" for m in log[:first])


def held(rank: int) -> None:
    """After a void the next steps send inputs with the others, on all ranks."""
    fleet = Fleet("spngd", rank, model=Network(), comm=SMALL)
    engine = fleet.natural.engine
    due: tuple[str, ...] = ()
    for step in range(3):
        fleet.optimizer.zero_grad()
        if step == 2:
            engine.comm.log = []
        abandoned(fleet, step)
        due = engine.capture.armed.due
        fleet.optimizer.step()
    wiring = engine.comm.wiring(torch.float64)
    inverted = engine.statistics.last.inverted
    wanted = engine.plan.sequence(
        wiring, statistics=due, inverses=inverted, early=False
    )
    assert engine.comm.log is not None
    assert engine.comm.log[:-1] == mine(wanted, rank)[1:]
    assert engine._outbox._sums._held == HOLD - 1


@pytest.mark.processes
def test_inputs_wait_for_their_backward_after_one_did_not_come() -> None:
    run_world(2, held)
