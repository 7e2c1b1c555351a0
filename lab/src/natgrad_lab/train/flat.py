"""Convolutions as matrices, for optimizers that are made for matrices."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Make = Callable[[list[nn.Parameter]], Optimizer]
SCHEDULED = ("lr", "momentum", "weight_decay")


class Flat(Optimizer):
    """An optimizer that sees weights of more than two dims as matrices.

    A convolution's weight (out, in, *kernel) is handed to it as the matrix
    (out, in * kernel) that shares its memory. `torch.optim.Muon` takes nothing else.

    Args:
        params: what is trained.
        make: makes the optimizer of what it is to see.
    """

    def __init__(self, params: Iterable[nn.Parameter], make: Make) -> None:
        self._params = list(params)
        self._seen = [_seen(p) for p in self._params]
        self._inner = make(self._seen)
        (group,) = self._inner.param_groups
        options = {name: group[name] for name in SCHEDULED if name in group}
        super().__init__(self._params, options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        loss = closure() if closure is not None else None
        for seen, p in zip(self._seen, self._params, strict=True):
            if seen is not p:
                seen.grad = None if p.grad is None else _as(p, p.grad)
        (inner,), (own,) = self._inner.param_groups, self.param_groups
        inner.update({name: own[name] for name in SCHEDULED if name in own})
        self._inner.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The group (for schedulers) and the state of the optimizer inside."""
        return {**super().state_dict(), "inner": self._inner.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Undo `state_dict`."""
        super().load_state_dict({k: state_dict[k] for k in ("state", "param_groups")})
        self._inner.load_state_dict(state_dict["inner"])


def flat_view(weight: Tensor) -> Tensor:
    """(out, rest) sharing memory with a weight of any layout.

    The order of the columns follows memory; neither an orthogonalised update nor one
    in an eigenbasis depends on it.
    """
    if weight.is_contiguous():
        return weight.view(weight.size(0), -1)
    inner = weight.movedim(1, -1)  # channels_last is contiguous this way
    return inner.view(weight.size(0), -1)


def _seen(p: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(flat_view(p.detach())) if p.dim() > 2 else p


def _as(weight: Tensor, grad: Tensor) -> Tensor:
    """The gradient as a matrix with the columns of ``flat_view(weight)``."""
    inner = grad if weight.is_contiguous() else grad.movedim(1, -1)
    return inner.reshape(grad.size(0), -1)
