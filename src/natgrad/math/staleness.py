"""Is a statistic stale? SP-NGD, Algorithm 2."""

import torch
from torch import Tensor


def is_similar(new: Tensor, old: Tensor, tolerance: float) -> Tensor:
    """Whether ``||new - old||_F / ||old||_F < tolerance``; a bool on the device."""
    distance = torch.linalg.vector_norm(new - old)
    return distance < tolerance * torch.linalg.vector_norm(old)


def next_interval(
    *, similar_to_last: bool, similar_to_before: bool, last: int, before: int
) -> int:
    """Steps until the next refresh, from the last interval and the one before it."""
    if not similar_to_last:
        return max(1, last // 2)
    if not similar_to_before:
        return last
    return last + before
