"""What a rank saves of its own, and goes on from, on as many ranks as before."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from tests.library.distributed.test_own_gradients import backward, flat, net
from tests.support.construct import construct
from tests.support.world import run_world
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import natgrad
from natgrad import Every

pytestmark = pytest.mark.processes


def make(kind: str, wrap: str) -> tuple[Any, Any, Any]:
    """The model to call, the optimizer, and who preconditions."""
    model: Any = net()
    options: dict[str, Any] = {
        "placement": kind,
        "refresh": Every(2, 2),
        "damping": 0.1,
    }
    if wrap == "spngd":
        whole = construct(natgrad.SPNGD, model, lr=0.1, **options)
        return model, whole, whole
    model = DistributedDataParallel(model) if wrap == "before" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    kfac = construct(natgrad.KFAC, model, optimizer, **options)
    return DistributedDataParallel(model) if wrap == "after" else model, optimizer, kfac


def steps(made: tuple[Any, Any, Any], rank: int, numbers: range) -> None:
    model, optimizer, _ = made
    for batch in numbers:
        optimizer.zero_grad()
        backward(model, rank, batch)
        optimizer.step()


def part(made: tuple[Any, Any, Any]) -> Any:
    model, optimizer, _ = made
    plain = getattr(model, "module", model)
    return copy.deepcopy((plain.state_dict(), optimizer.state_dict()))


def resume(rank: int, kind: str, wrap: str) -> tuple[Tensor, Tensor]:
    first = make(kind, wrap)
    steps(first, rank, range(3))
    saved = part(first)
    steps(first, rank, range(3, 6))
    second = make(kind, wrap)
    plain = getattr(second[0], "module", second[0])
    plain.load_state_dict(saved[0])
    second[1].load_state_dict(saved[1])
    steps(second, rank, range(3, 6))
    for _, _, natural in (first, second):
        natural.close()
    return flat(first[0]), flat(second[0])


KINDS = [
    ("longest_first", "after"),
    ("measured", "before"),
    ("measured", "after"),
    ("measured", "spngd"),
]


def resume_all(rank: int) -> list[tuple[Tensor, Tensor]]:
    return [resume(rank, *kind) for kind in KINDS]


def test_ranks_go_on_from_their_own_parts() -> None:
    """Also where DDP or measured owners come only after construction."""
    for result in run_world(2, resume_all):
        for kind, (whole, again) in zip(KINDS, result, strict=True):
            assert torch.equal(whole, again), kind


def said(rank: int) -> dict[str, list[str]]:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model, optimizer, kfac = made = make("longest_first", "before")
    heard: dict[str, list[str]] = {}

    def listen(when: str, act: Any) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            act()
        heard[when] = [str(w.message) for w in caught if "gather()" in str(w.message)]

    listen("new", optimizer.state_dict)
    steps(made, rank, range(2))
    listen("torch", lambda: get_optimizer_state_dict(model, optimizer))
    kfac.gather()
    listen("gathered", optimizer.state_dict)
    steps(made, rank, range(2))
    listen("part", optimizer.state_dict)
    listen("again", optimizer.state_dict)
    kfac.close()
    return heard


def test_a_part_that_may_be_saved_alone_is_warned_of_once() -> None:
    first, second = run_world(2, said)
    message = first.pop("part")[0]
    assert "rank 0's part of the natgrad state of 2 ranks" in message
    assert set(first) == {"new", "torch", "gathered", "again"}
    assert not any(first.values())
    assert not any(second.values())


def replan(rank: int) -> tuple[list[int], list[dict[str, float]], list[int]]:
    from torch.distributed import distributed_c10d

    groups = [len(distributed_c10d._world.pg_map)]
    looks: list[dict[str, float]] = []
    totals: list[int] = []
    for wrap in ("before", "spngd", "after"):
        made = make("measured", wrap)
        made[2].watch(1)
        steps(made, rank, range(1))
        at_first = len(distributed_c10d._world.pg_map)
        for batch in range(1, 4):
            steps(made, rank, range(batch, batch + 1))
            looks.append(made[2].diagnostics()["traffic"])
            totals.append(made[2].traffic()["total"]["agree"]["sent"])
        assert len(distributed_c10d._world.pg_map) <= at_first
        made[2].close()
        groups.append(len(distributed_c10d._world.pg_map))
    return groups, looks, totals


def test_a_new_plan_keeps_the_counts_and_leaves_no_group() -> None:
    for groups, looks, totals in run_world(2, replan, checked=False):
        assert len(set(groups)) == 1
        assert min(sent for look in looks for sent in look.values()) >= 0
        for i in (0, 3, 6):
            assert 0 < totals[i] < totals[i + 1] < totals[i + 2]
