"""`natgrad doctor` on four ranks: well, broken, slow and dead."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
from tests.support.fleet import quick
from tests.support.world import run_world

from natgrad.distributed.links import Links
from natgrad_lab.doctor import examine as doctor
from natgrad_lab.doctor.command import table
from natgrad_lab.doctor.examine import Finding
from natgrad_lab.train.processes import World


def spoil() -> None:
    """Rank 1 adds to what it shares of inverses."""
    plain = Links.call

    def call(self: Links, lane: str, message: Any, buffer: Any, rank: int) -> Any:
        if rank == 1 and message.exchange == "share_inverses":
            buffer.add_(1.0)
        return plain(self, lane, message, buffer, rank)

    Links.call = call
    doctor.STRATEGIES = ("spngd", "factor_wise")


def slow_down(rank: int) -> None:
    plain = torch.mm

    def mm(*args: Any) -> Any:
        time.sleep(0.02 * (rank == 2))
        return plain(*args)

    torch.mm = mm


def examined(rank: int) -> list[list[Finding]]:
    """Well, with an exchange that is broken, and with a rank that is slow."""
    quick()
    doctor.PATIENCE = 1.0
    world = World(rank=rank, size=4)
    plain = Links.call, torch.mm, doctor.STRATEGIES
    spoil()
    broken = doctor.exchanges(world)
    Links.call = plain[0]
    slow_down(rank)
    slow = doctor.speed(world)
    torch.mm, doctor.STRATEGIES = plain[1], ("spngd", "hybrid(0.5)")
    doctor.SLOW = 1000.0  # this machine may be busy
    return [broken, slow, list(doctor.examine(world))]


@pytest.mark.processes
def test_four_ranks_are_fit_and_what_is_not_is_named() -> None:
    results = run_world(4, examined, may_die=[3])
    for broken, slow, well in results[:3]:
        first, second = broken
        assert first.good
        assert not second.good
        assert "share_inverses (rooted) is wrong on ranks" in second.detail
        assert "share_inverses (padded)" in second.detail
        assert not slow[0].good
        assert "rank 2 is" in slow[0].detail
        assert [each.check for each in well if not each.good] == []
        names = [each.check for each in well]
        assert names[:2] == ["spngd", "hybrid(0.5)"]
        assert names[-2:] == ["timeout", "death"]
        assert "rank 3 was ended and was named" in well[-1].detail
        assert table(well).row_count == len(well)


def lost(rank: int) -> list[Finding]:
    quick()
    if rank == 1:
        doctor.order = lambda world: os._exit(0)
    doctor.STRATEGIES = ("spngd",)
    return list(doctor.examine(World(rank=rank, size=4)))


@pytest.mark.processes
def test_a_rank_that_dies_unasked_is_named_and_ends_the_examination() -> None:
    results = run_world(4, lost, may_die=[1])
    for found in (results[0], results[2], results[3]):
        assert not found[-1].good
        assert "Rank 1 is gone" in found[-1].detail
        assert found[-1].check == "order"
