"""Checkpoints of sharded optimizers, by parameter name, in worlds of other sizes."""

from contextlib import closing
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from tests.library.distributed.test_sharded import (
    Case,
    Net,
    build,
    make,
    shard,
    train,
    whole,
)
from tests.support.world import run_world
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

RESUMED = ("polar", "spngd", "kfac")
HALF = 3
"""Steps before a checkpoint: in the middle of the intervals of refreshes."""


def built() -> Net:
    """All that is trained runs: torch asks a checkpoint for the state of all of it."""
    model = build()
    model.idle.requires_grad_(False)
    return model


def one_process(case: Case) -> dict[str, Tensor]:
    model = built()
    stepper, own = make(case.make, model)
    with closing(own):
        train(model, stepper, case)
        return whole(model)


def _away(x: Tensor, want: Tensor) -> float:
    return float((x - want).abs().max())


def state_of(model: nn.Module, stepper: Any) -> dict[str, Any]:
    options = get_optimizer_state_dict(model, stepper)
    return {"model": get_model_state_dict(model), "optimizer": options}


def save(model: nn.Module, stepper: Any, path: str) -> None:
    dcp.save(state_of(model, stepper), checkpoint_id=path)


def resume(model: nn.Module, stepper: Any, path: str) -> None:
    state = state_of(model, stepper)
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, stepper, state["optimizer"])


def begin_and_save(rank: int, world: int, path: str) -> None:
    for name in RESUMED:
        model = shard(built(), "blocks")
        stepper, own = make(name, model)
        with closing(own):
            train(model, stepper, Case(name, steps=HALF), rank, world)
            save(model, stepper, f"{path}/{name}")


def go_on(rank: int, world: int, path: str) -> list[dict[str, Tensor]]:
    """Sharded, under DDP, and sharded again from what DDP has saved."""
    found: list[dict[str, Tensor]] = []
    for name in RESUMED:
        case = Case(name, steps=2 * HALF)
        for wrapped, source in ((False, ""), (True, ""), (False, " of DDP")):
            model: Any = built()
            if wrapped:
                model = DistributedDataParallel(model, find_unused_parameters=True)
            else:
                shard(model, "whole")
            stepper, own = make(name, model)
            with closing(own):
                resume(model, stepper, f"{path}/{name}{source}")
                if wrapped:
                    save(model, stepper, f"{path}/{name} of DDP")
                train(model, stepper, case, rank, world, first=HALF)
                found.append(whole(model.module if wrapped else model))
    return found


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_goes_on_in_any_world(tmp_path: Any) -> None:
    pytest.importorskip("numpy", reason="torch's DCP gathers objects by NumPy")
    run_world(3, begin_and_save, 3, str(tmp_path), timeout=200)
    found = run_world(2, go_on, 2, str(tmp_path), timeout=300)
    for i, name in enumerate(RESUMED):
        case = Case(name, steps=2 * HALF)
        want = one_process(case)
        for results in found:
            for way, parameters in enumerate(results[3 * i : 3 * i + 3]):
                away = {n: _away(x, want[n]) for n, x in parameters.items()}
                assert max(away.values()) < 1e-10, (name, way, away)
        model = built()
        stepper, own = make(name, model)
        with closing(own):
            resume(model, stepper, str(tmp_path / name))
            train(model, stepper, case, first=HALF)
            alone = whole(model)
        assert max(_away(x, want[n]) for n, x in alone.items()) < 1e-10, name
