"""Labels as probabilities."""

import torch
import torch.nn.functional as F
from torch import Tensor


def soft_targets(labels: Tensor, classes: int, smoothing: float = 0.0) -> Tensor:
    """One-hot labels, smoothed: (1 - smoothing) one_hot + smoothing / classes.

    `torch.nn.functional.cross_entropy` takes the result as its target.

    Args:
        labels: class numbers, (...,).
        classes: how many there are.
        smoothing: share of the probability spread over all classes, in [0, 1).

    Returns:
        Probabilities, (..., classes), float32.
    """
    if not 0 <= smoothing < 1:
        raise ValueError(f"Invalid {smoothing=}. Must be in [0, 1).")
    one_hot = F.one_hot(labels, classes).to(torch.float32)
    return one_hot.mul_(1 - smoothing).add_(smoothing / classes)
