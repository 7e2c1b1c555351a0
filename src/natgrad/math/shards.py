"""What this rank has of a tensor that ranks share: the one place that looks inside.

A `DTensor` is of torch.distributed, which only `natgrad.distributed` imports. All that
others must know of one is the tensor that this rank has of it.
"""

from typing import Any

from torch import Tensor


def is_shard(x: Tensor) -> bool:
    """Whether ranks have a tensor in parts, as `fully_shard` leaves parameters."""
    return hasattr(x, "_local_tensor")


def whole(x: Tensor) -> Tensor:
    """All of it, gathered if ranks have parts: collective then."""
    found: Any = x
    return found.full_tensor() if is_shard(x) else x


def local(x: Tensor) -> Tensor:
    """The part that this rank has, the very memory; a whole tensor itself."""
    found: Any = getattr(x, "_local_tensor", None)
    return x if found is None else found
