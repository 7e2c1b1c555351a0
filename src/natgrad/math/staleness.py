"""Is a statistic stale? SP-NGD, Algorithm 2."""

from torch import Tensor


def is_similar(new: Tensor, old: Tensor, tolerance: float) -> bool:
    """Whether ``||new - old||_F / ||old||_F < tolerance``."""
    return bool((new - old).norm() < tolerance * old.norm())


def next_interval(
    *, similar_to_last: bool, similar_to_before: bool, last: int, before: int
) -> int:
    """Steps until the next refresh, from the last interval and the one before it."""
    if not similar_to_last:
        return max(1, last // 2)
    if not similar_to_before:
        return last
    return last + before
