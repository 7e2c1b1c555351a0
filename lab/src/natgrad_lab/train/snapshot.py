"""The state of a training run: what a checkpoint holds, for any number of ranks.

What is equal on all ranks is saved once, and what one rank owns (statistics, momentum
under SPNGD) by that rank; both by name. What every rank has its own of (batch norm's
running averages, random states, the virtual batch of mixup, the loss since the last
record) is one tensor of all ranks, row by row. On the same number of ranks each takes
its row; on another number averages are averaged, the virtual batch is cut again, and
random states start from the seed, the step and the rank.
"""

import hashlib
import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from natgrad import KFAC, SPNGD
from natgrad_lab.errors import UserError
from natgrad_lab.train.processes import World
from natgrad_lab.train.tree import Path, Rows


def model_state(model: nn.Module) -> dict[str, Any]:
    """Parameters by name, and buffers as rows."""
    state, buffers = model.state_dict(), dict(model.named_buffers())
    return {
        "model": {name: x for name, x in state.items() if name not in buffers},
        "buffers": {
            name: Rows(x[None]) for name, x in buffers.items() if name in state
        },
    }


def load_model(model: nn.Module, state: dict[str, Any], rank: int, same: bool) -> None:
    """Undo `model_state`; on another number of ranks buffers are averaged."""
    own = {name: row_of(x, rank, same) for name, x in state["buffers"].items()}
    model.load_state_dict({**state["model"], **own})


def optimizer_state(optimizer: Optimizer, model: nn.Module) -> dict[str, Any]:
    """An optimizer's state with the names of parameters instead of their numbers."""
    with warnings.catch_warnings():
        # every rank saves its own part
        warnings.filterwarnings("ignore", "This state_dict has rank 0's part")
        state: dict[str, Any] = optimizer.state_dict()
    name = _names(optimizer, model, state["param_groups"])
    groups = [
        {**group, "params": [name[i] for i in group["params"]]}
        for group in state["param_groups"]
    ]
    named = {name[i]: entry for i, entry in state["state"].items()}
    state = {**state, "state": named, "param_groups": groups}
    if "natgrad" in state:
        # counts of blocks that only other ranks work on are known there alone
        moments = {
            block: {**entry, "steps": torch.tensor(entry["steps"])}
            for block, entry in state["natgrad"]["moments"].items()
        }
        state["natgrad"] = {**state["natgrad"], "moments": moments}
    return state


def load_optimizer(
    optimizer: Optimizer, model: nn.Module, saved: dict[str, Any]
) -> None:
    """Undo `optimizer_state`."""
    groups = optimizer.state_dict()["param_groups"]
    name = _names(optimizer, model, groups)
    own = [[name[i] for i in group["params"]] for group in groups]
    found = [group["params"] for group in saved["param_groups"]]
    if own != found:
        raise UserError(
            f"The checkpoint was made with parameters {found}. Must be {own}."
        )
    number = {text: i for i, text in name.items()}
    parameter = dict(model.named_parameters())
    state = {
        number[text]: {key: _like(x, parameter[text]) for key, x in entry.items()}
        for text, entry in saved["state"].items()
    }
    groups = [
        {**group, "params": [number[text] for text in group["params"]]}
        for group in saved["param_groups"]
    ]
    whole: dict[str, Any] = {**saved, "state": state, "param_groups": groups}
    if "natgrad" in whole:  # all ranks' parts are in it
        natgrad: dict[str, Any] = {**whole["natgrad"], "part": None}
        # a list of tensors that this rank does not want has become empty
        natgrad["statistics"] = {
            text: {**entry, "inverse": entry["inverse"] or None}
            for text, entry in natgrad["statistics"].items()
        }
        whole["natgrad"] = natgrad
    optimizer.load_state_dict(whole)


def wanted_by(curved: KFAC | SPNGD | None) -> Callable[[Path], bool]:
    """Which paths of a saved state this rank keeps something of."""
    if curved is None:
        return lambda _: True
    engine = curved.engine
    plan, rank = engine.plan, engine.comm.rank
    name = {id(p): text for text, p in engine.model.named_parameters()}
    idle: set[str] = set()
    if isinstance(curved, SPNGD):
        away = [b for b in engine.blocks if rank not in plan.workers[b.name]]
        idle = {name[id(p)] for block in away for p in block.parameters}

    def wanted(path: Path) -> bool:
        if path[:3] == ("optimizer", "natgrad", "statistics"):
            return path[4] in plan.parts_kept(path[3], rank)
        return path[:2] != ("optimizer", "state") or path[2] not in idle

    return wanted


def random_state() -> dict[str, Any]:
    """Torch's and Python's random states, as rows."""
    version, words, gauss = random.getstate()
    numbers = [version, *words]
    state = {
        "torch": Rows(torch.get_rng_state()[None]),
        "python": Rows(torch.tensor([numbers], dtype=torch.int64)),
        "gauss": Rows(torch.tensor([gauss is not None, gauss or 0.0]).double()[None]),
    }
    if torch.cuda.is_available():
        state["cuda"] = Rows(torch.cuda.get_rng_state()[None])
    return state


def load_random(
    state: dict[str, Tensor], world: World, *, same: bool, seed: int, step: int
) -> None:
    """Undo `random_state`; on another number of ranks, start from step and rank."""
    if not same:
        seed_all(seed, step, world.rank)
        return
    # copied: torch reads a random state from the start of its storage
    row = {name: x[world.rank].clone() for name, x in state.items()}
    torch.set_rng_state(row["torch"])
    version, *words = row["python"].tolist()
    known, gauss = row["gauss"].tolist()
    random.setstate((version, tuple(words), gauss if known else None))
    if "cuda" in row and torch.cuda.is_available():
        torch.cuda.set_rng_state(row["cuda"])


def seed_all(*place: int) -> None:
    """Seed torch and Python by numbers, of which none is like another's."""
    text = "/".join(map(str, place)).encode()
    digest = hashlib.blake2b(text, digest_size=8).digest()
    torch.manual_seed(int.from_bytes(digest, "little") >> 1)
    random.seed(digest)


def row_of(rows: Tensor, rank: int, same: bool) -> Tensor:
    """This rank's row; on another number of ranks the mean of all, or the first."""
    if same:
        return rows[rank]
    return rows.mean(0) if rows.is_floating_point() else rows[0]


def _names(
    optimizer: Optimizer, model: nn.Module, groups: Sequence[dict[str, Any]]
) -> dict[int, str]:
    """From an optimizer's numbers of parameters to their names."""
    name = {id(p): text for text, p in model.named_parameters()}
    pairs = zip(optimizer.param_groups, groups, strict=True)
    return {
        number: name[id(p)]
        for group, saved in pairs
        for p, number in zip(group["params"], saved["params"], strict=True)
    }


def _like(x: Any, parameter: Tensor) -> Any:
    """A tensor of a parameter's shape in its memory layout."""
    if not isinstance(x, Tensor) or x.shape != parameter.shape:
        return x
    return torch.empty_like(parameter, dtype=x.dtype, device=x.device).copy_(x)
