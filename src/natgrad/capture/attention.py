"""The projections of `torch.nn.MultiheadAttention`, which no module computes.

Note [Projections of attention]
The forward of `nn.MultiheadAttention` is one call of a function of torch that is given
all weights: no hook of a layer sees what the projections are given and return. In a
step in which something is due, that function runs as torch has written it, but with
another `linear`, which calls back. Torch offers the place for it: a function mode is
asked before the function is called. Should a torch not call `linear` any more, nothing
is seen, and the first step's warning names the layers.
"""

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Seen = Callable[[nn.Module, Tensor, Tensor], None]
"""Of a projection: the module that has its weight, the input and the output."""
IN_WEIGHT, IN_BIAS = "in_proj_weight", "in_proj_bias"


class Projections(TorchFunctionMode):
    """While open, tells of the projections of one module; batches come first."""

    def __init__(self, module: nn.MultiheadAttention, seen: Seen) -> None:
        super().__init__()
        self._module, self._seen, self._examples = module, seen, 1

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is F.multi_head_attention_forward:
            func = _with_linear(self._linear)
        return func(*args, **(kwargs or {}))

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """``F.linear``, and what it was given is told."""
        out = self._module.out_proj
        if weight is out.weight:
            each = x.unflatten(0, (-1, self._examples)).transpose(0, 1)
            return self._told(out, each, weight, bias).transpose(0, 1).flatten(0, 1)
        self._examples = x.shape[1]
        whole = getattr(self._module, IN_WEIGHT)
        if whole is None:  # of other widths for keys or values
            return F.linear(x, weight, bias)
        # Rows that this input is not for have no gradient from it.
        every = getattr(self._module, IN_BIAS)
        y = self._told(self._module, x.transpose(0, 1), whole, every)
        start = (weight.storage_offset() - whole.storage_offset()) // whole.shape[1]
        return y.transpose(0, 1).narrow(-1, start, len(weight)).contiguous()

    def _told(
        self, owner: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        y = F.linear(x, weight, bias)
        self._seen(owner, x, y)
        return y


def _never(_: Any) -> bool:
    return False


def _with_linear(linear: Callable[..., Tensor]) -> Callable[..., Any]:
    """Torch's function of attention, and the helpers it calls, with another linear."""
    names = {**vars(F), "linear": linear, "has_torch_function": _never}
    for name, function in vars(F).items():
        if name.startswith("_in_projection"):
            names[name] = FunctionType(
                function.__code__, names, name, function.__defaults__
            )
    whole = F.multi_head_attention_forward
    return FunctionType(whole.__code__, names, whole.__name__, whole.__defaults__)
