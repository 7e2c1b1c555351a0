"""What is minimised and what a test says: of classes, or of values."""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Objective(Protocol):
    """A loss, and ``size`` sums over a test set that its result is made of."""

    size: int

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """The mean over a batch."""
        ...

    def totals(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Of a part of the test set; to be added up, also over ranks."""
        ...

    def result(self, totals: Tensor) -> tuple[float, float]:
        """Mean loss, and a percentage."""
        ...


class Classes:
    """Cross-entropy over examples and, for text, positions; accuracy."""

    def __init__(self, smoothing: float = 0.0) -> None:
        self._smoothing, self.size = smoothing, 3

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        rows = outputs.flatten(0, -2)
        if labels.is_floating_point():  # probabilities, already smoothed
            return F.cross_entropy(rows, labels)
        return F.cross_entropy(rows, labels.flatten(), label_smoothing=self._smoothing)

    def totals(self, outputs: Tensor, labels: Tensor) -> Tensor:
        rows, flat = outputs.flatten(0, -2), labels.flatten()
        loss = F.cross_entropy(rows, flat, reduction="sum").double()
        right = (rows.argmax(-1) == flat).sum()
        return torch.stack([loss, right, torch.full_like(loss, flat.numel())]).cpu()

    def result(self, totals: Tensor) -> tuple[float, float]:
        loss, right, count = totals.tolist()
        return loss / count, 100.0 * right / count


class Values:
    """Squared error of an example; the part of the variance that is explained.

    Args:
        values: how many a label has.
    """

    def __init__(self, values: int) -> None:
        self.size = 3 + values

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return (outputs - labels).square().flatten(1).sum(1).mean()

    def totals(self, outputs: Tensor, labels: Tensor) -> Tensor:
        wrong, y = (outputs - labels).double().flatten(1), labels.double().flatten(1)
        count = torch.full_like(wrong[:1, 0], len(y))
        square = torch.stack([wrong.square().sum(), y.square().sum()])
        return torch.cat([count, square, y.sum(0)]).cpu()

    def result(self, totals: Tensor) -> tuple[float, float]:
        count, wrong, square = totals[:3].tolist()
        spread = square - float(totals[3:].square().sum()) / count
        return wrong / count, 100.0 * (1 - wrong / spread)
