"""A rank that raises in `step()`: the others end at once, with its message."""

from __future__ import annotations

import logging
import os
import time
from typing import Any

import pytest
import torch
from tests.support.fleet import (
    METHODS,
    Damping,
    Fleet,
    Fragile,
    host_store_on_rank_0,
    outcome,
    quick,
    store_of_test,
)
from tests.support.world import run_world

import natgrad

pytestmark = pytest.mark.processes
PROMPT = 2.0
"""Seconds within which a rank hears that another has raised."""


def raise_alone(rank: int, method: str, late: bool, ends: bool) -> Any:
    """A good step; then rank 1 raises in its own, and lives on or dies."""
    fleet = Fleet(method, rank, refresh=Fragile(), damping=Damping())
    fleet.step()
    (Fragile if late else Damping).fails = rank == 1
    raised = outcome(fleet.step)
    if rank and ends:
        os._exit(3)
    Fragile.fails = Damping.fails = False
    return raised, outcome(fleet.step)


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_the_others_end_with_the_message(method: str, late: bool, ends: bool) -> None:
    results = run_world(2, raise_alone, method, late, ends, may_die=[1])
    (kind, message, seconds), again = results[0]
    assert (kind, seconds < PROMPT) == ("CommError", True), (kind, message, seconds)
    assert "Rank 1 failed: KeyError: 'lost'\nStart the processes again." in message
    assert again[:2] == ("CommError", again[1])
    assert "Rank 1 failed: KeyError: 'lost'" in again[1]
    if not ends:
        (kind, message, seconds), again = results[1]
        assert (kind, message, seconds < PROMPT) == ("KeyError", "'lost'", True)
        assert again[0] == "CommError"
        assert "This rank failed before: KeyError: 'lost'" in again[1]


def freeze_a_bias(rank: int) -> Any:
    """In a step that estimates it, too; the process lives on, as in a notebook."""
    fleet = Fleet("spngd", rank)
    fleet.step()
    if rank:
        fleet.plain[3].bias.requires_grad_(False)
    fleet.backward()
    return outcome(fleet.optimizer.step)


def test_a_bias_that_was_frozen_on_one_rank() -> None:
    (kind, message, seconds), raised = run_world(2, freeze_a_bias, checked=False)
    assert raised[0] == "RuntimeError"
    assert raised[1].startswith("The bias of 3 was frozen or unfrozen")
    assert (kind, seconds < PROMPT) == ("CommError", True), (kind, message, seconds)
    assert f"Rank 1 failed: RuntimeError: {raised[1]}" in message


def raise_together(rank: int, method: str) -> Any:
    quick()
    fleet = Fleet(method, rank, refresh=Fragile())
    fleet.step()
    Fragile.fails = True
    raised = outcome(fleet.step)
    if rank:
        time.sleep(0.3)
    raised = [raised, outcome(fleet.step)]
    Fragile.fails = False
    fleet.step(2)
    return raised, fleet.weights()


@pytest.mark.parametrize("method", ["spngd", "kfac ddp"])
def test_ranks_that_raise_the_same_may_go_on(method: str) -> None:
    (raised, weights), other = run_world(2, raise_together, method, checked=False)
    assert [r[:2] for r in raised] == [("KeyError", "'lost'")] * 2
    assert [r[:2] for r in other[0]] == [("KeyError", "'lost'")] * 2
    assert torch.equal(weights, other[1])


def raise_with_the_store(rank: int) -> Any:
    outside = store_of_test()
    host_store_on_rank_0(rank, 3)
    fleet = Fleet("spngd", rank, refresh=natgrad.Every(10, 10))
    fleet.step()
    if rank == 0:
        fleet.plain[3].bias.requires_grad_(False)
    elif rank == 2:
        outside.wait(["gone"])  # as in a long backward
    raised = outcome(fleet.step)
    if rank == 0:
        outside.set("gone", "")
        os._exit(3)
    return raised


def test_the_message_is_known_also_if_the_store_went_with_the_rank() -> None:
    _, *others = run_world(3, raise_with_the_store, may_die=[0])
    for kind, message, seconds in others:
        assert (kind, seconds < PROMPT) == ("CommError", True), (kind, message, seconds)
        assert "Rank 0 failed: RuntimeError: The bias of 3 was frozen" in message


def leave_first(rank: int) -> Any:
    quick()
    outside = store_of_test()
    host_store_on_rank_0(rank, 3)
    fleet = Fleet("spngd", rank)
    fleet.step()
    if rank == 1:
        os._exit(3)
    if rank == 2:
        outside.wait(["gone"])
    found = outcome(fleet.step)
    if rank == 0:
        outside.set("gone", "")
        os._exit(3)
    return found


def test_the_rank_that_was_lost_is_named_although_rank_0_leaves_first() -> None:
    kind, message, _ = run_world(3, leave_first, may_die=[0, 1])[2]
    assert kind == "CommError"
    assert "Rank 1 is gone" in message


def raise_outside(rank: int, where: str) -> Any:
    """In a forward or backward, which natgrad has no part in; and live on."""
    quick()
    fleet = Fleet("spngd", rank, timeout=1.5)
    fleet.step()

    def fail(*_: Any) -> None:
        raise KeyError("lost")

    if rank and where == "forward":
        fleet.plain[2].register_forward_hook(fail)
    elif rank:
        fleet.plain[2].register_full_backward_hook(fail)
    found = outcome(fleet.step)
    if rank:
        store_of_test().wait(["told"])
    else:
        store_of_test().set("told", "")
    return found


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_rank_that_raises_before_its_step_is_named_after_the_timeout(
    where: str,
) -> None:
    (kind, message, _), raised = run_world(2, raise_outside, where, checked=False)
    assert raised[:2] == ("KeyError", "'lost'")
    assert kind == "CommError"
    assert "All ranks live, but rank 1 is stuck" in message


def raise_after_all_was_exchanged(rank: int) -> Any:
    """Under DDP, in whose own exchanges a rank then waits."""
    quick()
    fleet = Fleet(
        "kfac ddp", rank, refresh=natgrad.Every(10, 10), length=natgrad.Free()
    )
    fleet.step()
    said: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())
            store_of_test().set("told", "")

    logging.getLogger("natgrad").addHandler(Kept())
    if rank:

        def fail(*_: Any) -> None:
            raise MemoryError("lost")

        fleet.natural.write = fail
        outcome(fleet.step)
        store_of_test().wait(["told"])
        os._exit(3)
    outcome(lambda: fleet.step(2))
    return said


def test_a_rank_that_waits_in_ddp_is_told_too() -> None:
    (said,) = run_world(2, raise_after_all_was_exchanged, may_die=[1])[0]
    assert said.startswith("Rank 1 failed: MemoryError: lost (told to rank 0")
