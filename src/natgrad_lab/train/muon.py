"""Muon for networks with convolutions: a thin cover over `torch.optim.Muon`."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Muon, Optimizer


class FlatMuon(Optimizer):
    """`torch.optim.Muon` on matrices and flattened convolutions, SGD on the rest.

    Muon takes 2-D parameters only. A convolution's weight (out, in, *kernel) is
    handed to it as the matrix (out, in * kernel) that shares its memory.

    Args:
        matrices: parameters with at least 2 dims.
        rest: the others (biases, norms, and what should not be orthogonalised).
        lr: Muon's learning rate, with torch's "match_rms_adamw" off.
        rest_lr: SGD's learning rate.
        momentum: of both.
        weight_decay: of both.
    """

    def __init__(
        self,
        matrices: Iterable[nn.Parameter],
        rest: Iterable[nn.Parameter],
        *,
        lr: float = 0.02,
        rest_lr: float = 0.1,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
    ) -> None:
        matrices, rest = list(matrices), list(rest)
        shared: dict[str, Any] = {"momentum": momentum, "weight_decay": weight_decay}
        groups: list[dict[str, Any]] = [
            {"params": matrices, "lr": lr},
            {"params": rest, "lr": rest_lr},
        ]
        super().__init__([group for group in groups if group["params"]], shared)
        self._flat = [nn.Parameter(flat_view(p.detach())) for p in matrices]
        self._matrices = matrices
        self._parts: list[Optimizer] = []
        if matrices:
            self._parts.append(Muon(self._flat, lr=lr, **shared))
        if rest:
            self._parts.append(SGD(rest, lr=rest_lr, **shared))

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        loss = closure() if closure is not None else None
        for flat, matrix in zip(self._flat, self._matrices, strict=True):
            flat.grad = None if matrix.grad is None else _as(matrix, matrix.grad)
        for part, group in zip(self._parts, self.param_groups, strict=True):
            for name in ("lr", "momentum", "weight_decay"):
                part.param_groups[0][name] = group[name]
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Own groups (for schedulers) and the state of both parts."""
        parts = [part.state_dict() for part in self._parts]
        return {**super().state_dict(), "parts": parts}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Undo `state_dict`."""
        own = {key: state_dict[key] for key in ("state", "param_groups")}
        super().load_state_dict(own)
        for part, state in zip(self._parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)


def flat_view(weight: Tensor) -> Tensor:
    """(out, rest) sharing memory with a weight of any layout.

    The order of the columns follows memory; an orthogonalised update does not
    depend on it.
    """
    if weight.is_contiguous():
        return weight.view(weight.size(0), -1)
    inner = weight.movedim(1, -1)  # channels_last is contiguous this way
    return inner.view(weight.size(0), -1)


def _as(weight: Tensor, grad: Tensor) -> Tensor:
    """The gradient as a matrix with the columns of ``flat_view(weight)``."""
    inner = grad if weight.is_contiguous() else grad.movedim(1, -1)
    return inner.reshape(grad.size(0), -1)
