"""What a run leaves behind: memory, threads, files, processes and hooks."""

import os
import resource
import subprocess
import threading
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

SLOPE = 2.0
"""MB of resident memory in 10,000 steps that count as flat."""
_MODULE = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_TENSOR = ("_backward_hooks", "_post_accumulate_grad_hooks")
_OPTIMIZER = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


def _count(owner: Any, names: tuple[str, ...]) -> int:
    return sum(len(getattr(owner, name, None) or ()) for name in names)


def all_hooks(model: nn.Module, optimizer: Optimizer | None = None) -> int:
    """Hooks of every kind on a model's modules and parameters, and on an optimizer."""
    found = sum(_count(module, _MODULE) for module in model.modules())
    found += sum(_count(p, _TENSOR) for p in model.parameters())
    return found + (0 if optimizer is None else _count(optimizer, _OPTIMIZER))


def rss() -> float:
    """Resident memory of this process in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def slope(points: list[tuple[int, float]]) -> float:
    """MB in 10,000 steps, by least squares."""
    x = torch.tensor([float(s) for s, _ in points], dtype=torch.float64)
    y = torch.tensor([r for _, r in points], dtype=torch.float64)
    x, y = x - x.mean(), y - y.mean()
    return float((x * y).sum() / x.square().sum()) * 10_000


def left_behind() -> dict[str, int]:
    """Threads, open files and child processes of this process."""
    children = subprocess.run(
        ["ps", "--no-headers", "--ppid", str(os.getpid()), "-o", "comm"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.split()
    return {
        "threads": threading.active_count(),
        "files": len(os.listdir("/proc/self/fd")),
        "processes": len([c for c in children if c != "ps"]),
    }


def is_flat(rate: float, before: dict[str, int], after: dict[str, int]) -> bool:
    """Whether nothing has grown: memory beyond `SLOPE`, nor anything counted."""
    return rate <= SLOPE and all(after[name] <= before[name] for name in before)
