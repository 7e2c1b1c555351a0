"""Faults of ranks in every way to train: a part of the soak.

A *cell* is an optimizer, a rule, a strategy, and who averages gradients (natgrad, DDP,
or `fully_shard`, whose ranks have a part of each parameter). In each, a run of a few
steps meets several faults. Some are *told*: all ranks raise one error, put it right and
go on. Others are *fatal*: the survivors end, and all ranks start again from the last
checkpoint. Some are in the *data*: the run goes on, and the undisturbed run has them
too. In the end the weights must be those of the undisturbed run, to the last bit.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import tempfile
import time
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.support.fleet import (
    RULES,
    Damping,
    Fleet,
    Fragile,
    outcome,
    store_of_test,
)
from tests.support.world import run_world
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from natgrad.distributed import watchdog
from natgrad.distributed.loads import Load

Result = dict[str, Any]
STEPS, TIMEOUT, FAULTS = 8, 4.0, 6
PROMPT = 2.0
"""Seconds within which others end if a rank has raised in its step."""
LATEST = PROMPT + 2 * TIMEOUT
"""Seconds within which they end if it was killed or stands still."""
DATA = ("empty batch on one rank", "NaN on one rank")
TOLD = ("lr", "momentum", "weight_decay", "damping", "weights", "gradient")
FATAL = (
    "raised before agreeing, lives",
    "raised before agreeing, dies",
    "raised after agreeing, lives",
    "raised after agreeing, dies",
    "raised in forward, lives",
    "killed in forward",
    "killed in backward",
    "killed in an exchange",
    "killed before its step",
    "stopped in backward",
)
EXCHANGES: tuple[tuple[Any, str], ...] = ((Load, "_close"),)
"""What a rank calls to send."""


@dataclass(frozen=True)
class Cell:
    """One way to train."""

    method: str
    rule: str
    strategy: str

    @property
    def is_ddp(self) -> bool:
        return self.method.endswith("ddp")

    @property
    def is_sharded(self) -> bool:
        return self.method.endswith("sharded")

    def kinds(self) -> list[str]:
        """The faults that can be met in this cell."""
        found = [*DATA, *TOLD, *FATAL]
        if self.is_sharded:  # nobody else has what a rank has
            return [k for k in found if k not in ("weights", "gradient")]
        # without DDP a rank without a gradient counts for zero
        return [kind for kind in found if self.is_ddp or kind != "gradient"]


@dataclass(frozen=True)
class Fault:
    """What happens to a rank in a step."""

    kind: str
    step: int
    rank: int


def _cells() -> list[Cell]:
    strategies = ("spngd", "layer_wise", "factor_wise", "hybrid(0.5)")
    ways = [("kfac", r) for r in RULES if r != "factored"]
    ways += [("spngd", r) for r in RULES if r != "eigen"]
    ways += [("polar", "")]
    gradients = ("", " ddp")
    return [Cell(m + g, r, s) for s in strategies for m, r in ways for g in gradients]


CELLS = _cells()
WAYS = (
    ("kfac", "eigen"),
    ("kfac", "corrected"),
    ("spngd", "factored"),
    ("spngd", "orthogonal"),
    ("polar", ""),
)
SHARDED = [Cell(f"{method} sharded", rule, "spngd") for method, rule in WAYS]


def run_sharded(number: int, faults: list[Fault] | None = None) -> Result:
    """The same in a cell whose model is sharded."""
    return run_cell(number, faults, SHARDED)


def run_cell(
    number: int, faults: list[Fault] | None = None, cells: list[Cell] = CELLS
) -> Result:
    """Several faults in one cell, against a run without; random ones unless given."""
    cell, source = cells[number % len(cells)], random.Random(number)
    # after a restart DDP has other buckets, and rounds three ranks' sums differently
    world = 2 if cell.is_ddp else source.choice([2, 2, 3])
    faults = _drawn(source, cell, world) if faults is None else faults
    data = [f for f in faults if f.kind in DATA]
    lost: list[str] = []
    slowest: dict[str, float] = {}
    unnamed, ended = 0, list[Any]()
    with tempfile.TemporaryDirectory() as folder:
        calm = run_world(world, train, cell, Path(folder) / "calm", data)
        left = sorted(faults, key=lambda f: f.step)
        for _ in range(len(faults) + 1):
            fatal = next((f for f in left if f.kind in FATAL), None)
            ended = _start(world, cell, Path(folder) / "run", left, fatal)
            before = STEPS if fatal is None else fatal.step
            done = [f for f in left if f.kind in TOLD and f.step < before]
            lost += [f.kind for f in done if not _all_told(ended, f)]
            if fatal is None:
                break
            told, seconds, named = _judge(fatal, cell, ended)
            lost += [] if told else [fatal.kind]
            slowest[fatal.kind] = max(seconds, slowest.get(fatal.kind, 0.0))
            unnamed += not named
            left = [f for f in left if f is not fatal and f not in done]
    digests = {str(r.get("digest")) if r else "" for r in ended}
    same = digests == {str(r["digest"]) for r in calm}
    return {
        "cell": [cell.method, cell.rule, cell.strategy, world],
        "faults": len(faults),
        "lost": len(lost),
        "diverged": int(not same),
        "kinds": [f.kind for f in faults],
        "lost kinds": lost,
        "slowest": slowest,
        "unnamed": unnamed,
    }


def _drawn(source: random.Random, cell: Cell, world: int) -> list[Fault]:
    """Different kinds, in different steps after the first."""
    kinds = source.sample(cell.kinds(), FAULTS)
    steps = source.sample(range(1, STEPS), FAULTS)
    return [
        Fault(kind, step, source.randrange(world))
        for kind, step in zip(kinds, steps, strict=True)
    ]


def _start(
    world: int, cell: Cell, folder: Path, left: list[Fault], fatal: Fault | None
) -> list[Any]:
    may_die = [] if fatal is None else [fatal.rank]
    # a survivor may begin the next step before it is told: one fatal fault at a time
    now = [f for f in left if f is fatal or f.kind not in FATAL]
    return run_world(world, train, cell, folder, now, may_die=may_die, timeout=90)


def _all_told(ended: list[Any], fault: Fault) -> bool:
    """Whether all ranks have raised the same, and it names what was wrong.

    A rank that was killed later has said nothing.
    """
    said = {r["told"].get(fault.kind) for r in ended if r is not None}
    (message, *more) = said
    word = {"weights": "Weights differ", "gradient": "None on ranks"}
    return bool(message) and not more and word.get(fault.kind, fault.kind) in message


def _judge(fault: Fault, cell: Cell, ended: list[Any]) -> tuple[bool, float, bool]:
    """Whether survivors ended as they must, after how long, and knew who it was."""
    survivors = [r for rank, r in enumerate(ended) if rank != fault.rank]
    if any(r is None or "error" not in r for r in survivors):
        return False, 0.0, False
    seconds = max(r["error"][2] for r in survivors)
    raised = "agreeing" in fault.kind
    word = {"raised in forward, lives": f"rank {fault.rank} is stuck"}
    gone = f"Rank {fault.rank} is gone"
    word = (
        f"Rank {fault.rank} failed: KeyError" if raised else word.get(fault.kind, gone)
    )
    named = all(word in r["error"][1] for r in survivors)
    # the exchanges of DDP and fully_shard end with torch's own error: it names nobody
    by_torch = (cell.is_ddp or cell.is_sharded) and not raised
    good = named or (by_torch and all(r["error"][0] for r in survivors))
    return good and seconds <= (PROMPT if raised else LATEST), seconds, named


# -- what a rank does ------------------------------------------------------------------


def train(rank: int, cell: Cell, folder: Path, faults: list[Fault]) -> Result:
    """From the last checkpoint to the end, or to a fault."""
    warnings.simplefilter("ignore")
    watchdog.PATIENCE_SECONDS = 1.5
    options = RULES.get(cell.rule, {})
    fleet = Fleet(
        cell.method,
        rank,
        timeout=TIMEOUT,
        strategy=cell.strategy,
        refresh=Fragile(),
        damping=Damping(),
        comm={"check_weights": 1},
        **options,
    )
    told: dict[str, str] = {}
    for step in range(_load(fleet, folder), STEPS):
        mine = {f.kind: f.rank == rank for f in faults if f.step == step}
        found = outcome(partial(_go_on, fleet, folder, step, mine, told))
        if found[0]:
            fatal = next((f for f in faults if f.kind in FATAL), None)
            _part(rank, dist.get_world_size(), fatal)
            return {"error": found, "told": told}
    fleet.natural.close()
    bits = fleet.weights().numpy().tobytes()
    return {"digest": hashlib.sha256(bits).hexdigest(), "told": told}


def _go_on(
    fleet: Fleet, folder: Path, step: int, mine: dict[str, bool], told: dict[str, str]
) -> None:
    """A step; ``mine``: the kinds of its faults, and whether they are this rank's."""
    for kind in (k for k in mine if k in TOLD):
        _backward(fleet, step, mine)
        undo = _spoil(fleet, kind) if mine[kind] else None
        told[kind] = outcome(fleet.optimizer.step)[1]
        if undo is not None:
            undo()
    _backward(fleet, step, mine)
    for kind in (k for k in mine if mine[k] and k in FATAL):
        Damping.fails = kind.startswith("raised before")
        Fragile.fails = kind.startswith("raised after")
        if kind == "killed before its step":
            _end()
        if kind == "killed in an exchange":
            for owner, name in EXCHANGES:
                getattr(owner, name)  # an error if it has moved: nobody would die
                setattr(owner, name, _end)
    try:
        fleet.optimizer.step()
    except KeyError:
        if any(kind.endswith("dies") for kind in mine):
            os._exit(3)
        raise
    _save(fleet, folder, step + 1)


def _backward(fleet: Fleet, step: int, mine: dict[str, bool]) -> None:
    """The batch of a step is the same whenever it comes."""
    here = {kind for kind in mine if mine[kind]}
    fleet.generator.manual_seed(1000 * step + fleet.rank)
    hook = None
    if here & {"raised in forward, lives", "killed in forward"}:
        hook = fleet.plain[2].register_forward_hook(lambda *_: _fall(here))
    elif here & {"killed in backward", "stopped in backward"}:
        hook = fleet.plain[2].register_full_backward_hook(lambda *_: _fall(here))
    try:
        fleet.backward(
            0 if DATA[0] in here else 8, float("nan") if DATA[1] in here else None
        )
    finally:
        if hook is not None:
            hook.remove()


def _fall(here: set[str]) -> None:
    if "raised in forward, lives" in here:
        raise KeyError("lost")
    if "stopped in backward" in here:
        store_of_test().set("stopped", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    _end()


def _end(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _part(rank: int, world: int, fault: Fault | None) -> None:
    """Let nobody end too early, nor live for ever, once a fault was met."""
    store = store_of_test()
    if fault is None:
        return
    if rank != fault.rank:
        store.add("ended", 1)
        if fault.kind.startswith("stopped"):
            os.kill(int(store.get("stopped")), signal.SIGKILL)
    while rank == fault.rank and store.add("ended", 0) < world - 1:
        time.sleep(0.05)  # as a notebook does


def _spoil(fleet: Fleet, kind: str) -> Any:
    """Change something on this rank alone; returns how to put it right."""
    group = fleet.optimizer.param_groups[0]
    if kind in ("lr", "momentum", "weight_decay"):
        old = group[kind]
        group[kind] = old / 2 + 0.01
        return lambda: group.update({kind: old})
    if kind == "damping":
        Damping.value = 0.2
        return lambda: setattr(Damping, "value", 0.1)
    p = fleet.plain[3].weight
    if kind == "gradient":
        p.grad = None
        return None
    kept = p.detach().clone()
    p.data[0, 0] += 1.0
    return lambda: p.data.copy_(kept)


def _save(fleet: Fleet, folder: Path, step: int) -> None:
    if step % 2:
        return
    folder.mkdir(exist_ok=True)
    if fleet.is_sharded:
        dcp.save(_state(fleet), checkpoint_id=folder / f"step-{step}")
    else:
        fleet.natural.gather()
    if fleet.rank == 0:
        state: dict[str, Any] = {"step": step}
        if not fleet.is_sharded:
            state["model"] = fleet.plain.state_dict()
            state["optimizer"] = fleet.optimizer.state_dict()
        torch.save(state, folder / "partial")
        (folder / "partial").replace(folder / "last")


def _state(fleet: Fleet) -> dict[str, Any]:
    """By parameter name: each rank's part."""
    optimizer = get_optimizer_state_dict(fleet.plain, fleet.optimizer)
    return {"model": get_model_state_dict(fleet.plain), "optimizer": optimizer}


def _load(fleet: Fleet, folder: Path) -> int:
    if not (folder / "last").is_file():
        return 0
    last = torch.load(folder / "last", weights_only=True)
    if fleet.is_sharded:
        state = _state(fleet)
        dcp.load(state, checkpoint_id=folder / f"step-{last['step']}")
        set_model_state_dict(fleet.plain, state["model"])
        set_optimizer_state_dict(fleet.plain, fleet.optimizer, state["optimizer"])
    else:
        fleet.plain.load_state_dict(last["model"])
        fleet.optimizer.load_state_dict(last["optimizer"])
    return last["step"]
