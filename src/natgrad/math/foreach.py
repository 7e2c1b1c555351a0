"""Many tensors at once: torch's foreach functions, which torch.optim is built on.

They are private to torch but stable; this is the one place that names them.
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
from collections.abc import Sequence

import torch
from torch import Tensor


def scale_(xs: Sequence[Tensor], factor: float) -> None:
    """``x <- factor x``, in place."""
    torch._foreach_mul_(list(xs), factor)


def scaled_each(xs: Sequence[Tensor], factors: Sequence[float]) -> list[Tensor]:
    """``factor x``, each with its own."""
    return list(torch._foreach_mul(list(xs), list(factors)))


def lerp_(xs: Sequence[Tensor], ys: Sequence[Tensor], weight: float) -> None:
    """``x <- (1 - weight) x + weight y``, in place: one pass over memory."""
    torch._foreach_lerp_(list(xs), _like(ys, xs), weight)


def lerp(xs: Sequence[Tensor], ys: Sequence[Tensor], weight: float) -> list[Tensor]:
    """``(1 - weight) x + weight y``."""
    return list(torch._foreach_lerp(list(xs), _like(ys, xs), weight))


def _like(ys: Sequence[Tensor], xs: Sequence[Tensor]) -> list[Tensor]:
    return [y.to(x.dtype) for x, y in zip(xs, ys, strict=True)]


def divide_(xs: Sequence[Tensor], numbers: Sequence[float]) -> None:
    """``x <- x / number``, each by its own."""
    torch._foreach_div_(list(xs), list(numbers))


def divided(xs: Sequence[Tensor], numbers: Sequence[float]) -> list[Tensor]:
    """``x / number``, each by its own."""
    return list(torch._foreach_div(list(xs), list(numbers)))


def multiply_(xs: Sequence[Tensor], factors: Sequence[Tensor]) -> None:
    """``x <- x * factor``, each with its own factor."""
    torch._foreach_mul_(list(xs), list(factors))


def multiplied(xs: Sequence[Tensor], factors: Sequence[Tensor]) -> list[Tensor]:
    """``x * factor``, each with its own factor."""
    return list(torch._foreach_mul(list(xs), list(factors)))


def add_(xs: Sequence[Tensor], ys: Sequence[Tensor], alpha: float = 1.0) -> None:
    """``x <- x + alpha y``, in place."""
    torch._foreach_add_(list(xs), list(ys), alpha=alpha)


def subtract(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> list[Tensor]:
    """``x - y``."""
    return list(torch._foreach_sub(list(xs), list(ys)))


def norms(xs: Sequence[Tensor]) -> list[Tensor]:
    """The 2-norm of each."""
    return list(torch._foreach_norm(list(xs)))


def peaks(xs: Sequence[Tensor]) -> list[Tensor]:
    """The largest size of an element of each; no square that could be lost.

    Of an empty one, a rank's piece of fewer rows than ranks, 0.
    """
    some = [x if x.numel() else x.new_zeros(1) for x in xs]
    # on a CPU many times faster than torch's infinite norm
    return list(torch._foreach_max(torch._foreach_abs(some)))
