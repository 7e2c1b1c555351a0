"""What must be known of a torch optimizer whose steps damping learns from."""

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


def require_host(optimizer: Optimizer | None) -> None:
    """Raise unless an optimizer takes one step for one run of a closure."""
    if optimizer is None or isinstance(optimizer, torch.optim.LBFGS):
        given = "None" if optimizer is None else type(optimizer).__name__
        raise ValueError(
            f"Invalid optimizer: {given}, with damping='auto'. Must be one that runs "
            "its closure once in a step, as SGD or AdamW: damping learns from the step."
        )


def coupled_decay(optimizer: Optimizer, model: nn.Module) -> dict[str, float]:
    """The weight decay of each parameter by name, where it is part of the objective."""
    names = {id(p): name for name, p in model.named_parameters()}
    found: dict[str, float] = {}
    for group in optimizer.param_groups:
        decay: Any = group.get("weight_decay", 0.0)
        decoupled = group.get("decoupled_weight_decay", False)
        if isinstance(optimizer, torch.optim.AdamW) or decoupled or not decay:
            continue
        known = (names[id(p)] for p in group["params"] if id(p) in names)
        found |= dict.fromkeys(known, float(decay))
    return found
