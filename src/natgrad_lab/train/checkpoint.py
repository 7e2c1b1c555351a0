"""Checkpoints: a folder a step, a file a rank, never half written.

A checkpoint is written under a temporary name and renamed when every rank has
finished, so what has a final name is whole. Files load with ``weights_only=True``.
"""

import random
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch

from natgrad_lab.errors import UserError
from natgrad_lab.train.processes import World

FORMAT = 1
KEEP = 2
_NAME = re.compile(r"step-(\d{8})")


def save(folder: Path, step: int, state: dict[str, Any], world: World) -> Path:
    """Write this rank's state of a step; collective over the ranks."""
    final = folder / f"step-{step:08d}"
    partial = folder / f"{final.name}.partial"
    if world.main:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    world.barrier()
    content = {"format": FORMAT, "step": step, "world": world.size, **state}
    torch.save(content, partial / _file(world.rank))
    world.barrier()
    if world.main:
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        for old in _found(folder)[:-KEEP]:
            shutil.rmtree(old, ignore_errors=True)
    world.barrier()
    return final


def load_latest(folder: Path, world: World) -> dict[str, Any]:
    """The newest state that every rank can read; older ones are a fallback."""
    for path in reversed(_found(folder)):
        state, problem = _read(path / _file(world.rank), world)
        if not world.any(state is None):
            assert state is not None
            return state
        reason = problem or "unreadable on another rank"
        warnings.warn(f"Skipped the checkpoint {path}: {reason}", stacklevel=2)
    raise UserError(f"No usable checkpoint in {folder}. Start the run anew.")


def random_state() -> dict[str, Any]:
    """Torch's and Python's random states, in plain types."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, list(words), gauss],
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Undo `random_state`."""
    torch.set_rng_state(state["torch"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _file(rank: int) -> str:
    return f"rank-{rank}.pt"


def _found(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))


def _read(path: Path, world: World) -> tuple[dict[str, Any] | None, str]:
    try:
        state = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # a damaged file raises almost anything
        return None, f"{path.name}: {str(error).splitlines()[0]}"
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        return None, f"{path.name} is not a natgrad checkpoint of format {FORMAT}"
    if state["world"] != world.size:
        raise UserError(
            f"{path} was written by {state['world']} processes, not {world.size}. "
            f"Resume with torchrun --nproc-per-node {state['world']}."
        )
    return state, ""
