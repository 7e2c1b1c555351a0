"""What runs is what was planned: logs of collectives against the plan's one list."""

from __future__ import annotations

import random
import socket
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.fleet import Fleet
from tests.support.world import run_world
from torch import Tensor, nn

from natgrad.distributed.communicator import world_of
from natgrad.plan.messages import Message, mine

STRATEGIES = ("spngd", "layer_wise", "factor_wise", "hybrid(0.5)")
METHODS = ("kfac", "kfac ddp", "spngd")
SMALL = {"bucket_bytes": 200}


def planned(fleet: Fleet, due: tuple[str, ...], layers: int) -> list[Message]:
    """This rank's part of the sequence of the step that was just done."""
    engine = fleet.natural.engine
    clipped = "KLClip" in repr(next(iter(engine.parts.values())).length)
    found = engine.plan.sequence(
        engine.comm.wiring(engine.like.dtype),
        statistics=due,
        inverses=engine.statistics.last.inverted,
        totals=(2 * layers,) if clipped else (),
    )
    return mine(found, engine.comm.rank)


def logged(fleet: Fleet, steps: int) -> tuple[list[Message], list[Message]]:
    """What ran in some steps, and what was planned."""
    engine = fleet.natural.engine
    layers = sum(b.kind is not None for b in engine.blocks)
    engine.comm.log = ran = []
    wanted: list[Message] = []
    for _ in range(steps):
        due = engine.capture.armed.due
        fleet.step()
        wanted += planned(fleet, due, layers)
    # the first message of a step is sent at the end of the one before
    return [wanted[0], *ran[:-1]], wanted


def same_as_planned(fleet: Fleet) -> list[Message]:
    """Two steps; what ran and what traffic counts are those of the plan."""
    ran, wanted = logged(fleet, 2)
    assert ran == wanted
    last = wanted[len(wanted) // 2 :]
    for exchange, counts in fleet.natural.traffic()["step"].items():
        sent = [m for m in last if m.exchange == exchange]
        assert counts["calls"] == len(sent), exchange
        assert counts["padding"] == sum(m.padding for m in sent)
    return ran


def sharded(rank: int) -> None:
    for method in ("kfac sharded", "spngd sharded"):
        fleet = Fleet(method, rank, comm={"bucket_bytes": 20})
        fleet.step()  # in the first, ranks add up the norms of weights in pieces
        ran = same_as_planned(fleet)
        for exchange in ("reduce_gradients", "share_updates"):
            mine = [m for m in ran if m.exchange == exchange]
            assert {m.kind for m in mine} == {"all_to_all"}
            assert len(mine) > 2, "pieces are to leave in several all-to-alls"
            # of the plan: all pieces once, and what of them this rank moves
            volumes = fleet.natural.engine.plan.exchanges[exchange].volumes()
            for side, volume in enumerate(volumes):
                moved = 4 * 2 * volume[rank]
                splits = [m.splits(rank)[side] for m in mine]
                assert 4 * sum(map(sum, splits)) == moved
        fleet.natural.close()


@pytest.mark.processes
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.long), 4])
def test_pieces_of_a_sharded_model_move_as_planned(world: int) -> None:
    run_world(world, sharded)


def every_strategy(rank: int, hosts: int, collectives: str) -> None:
    if hosts:
        socket.gethostname = lambda: f"host {rank // hosts}"
    for strategy in STRATEGIES:
        for method in METHODS:
            fleet = Fleet(
                method,
                rank,
                strategy=strategy,
                comm={**SMALL, "collectives": collectives},
            )
            ran = same_as_planned(fleet)
            assert len(fleet.natural.engine.comm.wiring(torch.float32).nodes) == (
                world_of() // hosts if hosts else 0
            )
            assert any(m.exchange == "reduce_statistics" for m in ran)
            fleet.natural.close()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("world", "hosts", "collectives"),
    [
        (2, 0, "rooted"),
        (3, 0, "padded"),
        (4, 2, "rooted"),
        (4, 2, "padded"),
        pytest.param(5, 0, "rooted", marks=pytest.mark.long),
        pytest.param(6, 3, "padded", marks=pytest.mark.long),
    ],
)
def test_what_runs_is_what_was_planned_call_by_call_and_byte_by_byte(
    world: int, hosts: int, collectives: str
) -> None:
    # a later stage between nodes starts when the one before is complete
    run_world(world, every_strategy, hosts, collectives, checked=not hosts)


class Branches(nn.Module):
    """Two branches, called in either order, and a layer that may be left out."""

    def __init__(self, swapped: bool, skips: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 5), nn.Linear(4, 5)
        self.extra, self.last = nn.Linear(5, 5), nn.Linear(5, 3)
        self.swapped, self.skips = swapped, skips

    def forward(self, x: Tensor) -> Tensor:
        if self.swapped:
            b, a = self.second(x), self.first(x)
        else:
            a, b = self.first(x), self.second(x)
        x = torch.tanh(a) + torch.tanh(b)
        return self.last(x if self.skips else x + self.extra(x))


class Sleepy(torch.autograd.Function):
    """Takes its time in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        time.sleep(random.random() / 200)
        return grads[0]


def out_of_order(rank: int, swaps: bool, skips: bool, sleeps: bool) -> list[Tensor]:
    weights: list[Tensor] = []
    for overlap in (True, False):
        model = Branches(swaps and rank == 1, skips and rank == 1)
        if sleeps:
            random.seed(rank)
            for layer in (model.first, model.second, model.extra):
                layer.register_forward_hook(lambda _, __, y: Sleepy.apply(y))
        comm = {"bucket_bytes": 1, "overlap": overlap, "check_weights": 1}
        fleet = Fleet("spngd", rank, model=model, comm=comm)
        ran, wanted = logged(fleet, 3)
        assert ran == wanted
        weights.append(fleet.weights())
        fleet.natural.close()
    torch.testing.assert_close(*weights, rtol=1e-5, atol=1e-6)
    return weights


@pytest.mark.processes
@pytest.mark.parametrize("trouble", [(True, False, False), (True, True, True)])
def test_all_ranks_start_all_collectives_in_the_plans_order(
    trouble: tuple[bool, bool, bool],
) -> None:
    first, *rest = run_world(3, out_of_order, *trouble)
    for weights in rest:
        assert all(torch.equal(a, b) for a, b in zip(first, weights, strict=True))


def test_the_list_is_the_same_whatever_the_bytes_that_an_element_has() -> None:
    from tests.library.plan.test_plan import layer

    from natgrad.plan import make_plan
    from natgrad.plan.messages import Wiring

    plan = make_plan([layer("a", 4, 9), layer("b", 7, 5)], world=3, strategy="spngd")
    single, double = (plan.sequence(Wiring(element_bytes=n)) for n in (4, 8))
    same = [m if m.exchange in ("agree", "control") else replace(m) for m in single]
    assert [m.parts for m in same] == [m.parts for m in double]
