"""What this rank has of a tensor that ranks share: the one place that looks inside.

A `DTensor` is of torch.distributed, which only `natgrad.distributed` imports. All that
others must know of one is the tensor that this rank has of it.
"""

from math import prod
from typing import Any

from torch import Tensor


def is_shard(x: Tensor) -> bool:
    """Whether ranks have a tensor in parts, as `fully_shard` leaves parameters."""
    return hasattr(x, "_local_tensor")


def whole(x: Tensor) -> Tensor:
    """All of it, gathered if ranks have parts: collective then."""
    found: Any = x
    return found.full_tensor() if is_shard(x) else x


def width(x: Tensor, dim: int) -> int:
    """How much of a dim each rank has at most, if ranks cut it; else 0."""
    found: Any = x
    if not is_shard(x):
        return 0
    cuts = zip(found.device_mesh.shape, found.placements, strict=True)
    ranks = prod(size for size, placed in cuts if placed.is_shard(dim % x.dim()))
    return 0 if ranks == 1 else -(-x.shape[dim] // ranks)


def first(x: Tensor, dim: int) -> int:
    """Where in a dim that one mesh axis cuts this rank's part begins."""
    found: Any = x
    axis = [placed.is_shard(dim % x.dim()) for placed in found.placements].index(True)
    return found.device_mesh.get_local_rank(axis) * width(x, dim)


def local(x: Tensor) -> Tensor:
    """The part that this rank has, the very memory; a whole tensor itself."""
    found: Any = getattr(x, "_local_tensor", None)
    return x if found is None else found
