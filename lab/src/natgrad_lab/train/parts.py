"""Several optimizers as one, and the trust ratio for those that do not have it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from natgrad.math import foreach
from natgrad.math.rules import trust_ratio


class Parts(Optimizer):
    """Several optimizers over different parameters as one.

    Args:
        parts: each with whether its changes get a trust ratio. With it, a step moves
            every parameter in the direction its optimizer says, by the group's learning
            rate times the parameter's norm (as `natgrad.LayerTrust` does).
    """

    def __init__(self, parts: Sequence[tuple[Optimizer, bool]]) -> None:
        self._parts = list(parts)
        groups = [g for part, _ in self._parts for g in part.param_groups]
        super().__init__([{"params": list(g["params"])} for g in groups], {})
        self._link()

    def _link(self) -> None:
        """Schedulers write into these groups, which are the parts' own."""
        self.param_groups = [g for part, _ in self._parts for g in part.param_groups]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        loss = closure() if closure is not None else None
        for part, trusted in self._parts:
            before = [_copies(g["params"]) for g in part.param_groups if trusted]
            part.step()
            for group, old in zip(part.param_groups, before, strict=False):
                _rescale(group["params"], old, group["lr"])
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The groups (for schedulers) and the states of all parts."""
        parts = [part.state_dict() for part, _ in self._parts]
        return {**super().state_dict(), "parts": parts}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Undo `state_dict`."""
        for (part, _), state in zip(self._parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self._link()


def _copies(params: Sequence[Tensor]) -> list[Tensor]:
    return [p.detach().clone() for p in params]


def _rescale(params: Sequence[Tensor], old: Sequence[Tensor], lr: float) -> None:
    """Bring each change to lr times the norm that the parameter had."""
    changes = foreach.subtract(params, old)
    sizes = zip(foreach.norms(old), foreach.norms(changes), strict=True)
    rows = [len(p) for p in params]
    ratios = [trust_ratio(w, u, n) for (w, u), n in zip(sizes, rows, strict=True)]
    foreach.multiply_(changes, ratios)
    for p, w in zip(params, old, strict=True):
        p.copy_(w)
    foreach.add_(params, changes, lr)
