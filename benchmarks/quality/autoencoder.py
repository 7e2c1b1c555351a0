"""P4: a deep tanh autoencoder on the digits of scikit-learn, the ground of K-FAC.

64-256-128-32-8-32-128-256-64 with tanh, squared error summed over pixels and averaged
over images, batch 256, rate linear to zero. The value is the loss on 360 held-out
images at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

WIDTHS = (64, 256, 128, 32, 8, 32, 128, 256, 64)


class Autoencoder(nn.Sequential):
    """Linear layers with tanh between them, sparse at first as Martens has them."""

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        for i, (n, m) in enumerate(pairwise(WIDTHS)):
            linear = nn.Linear(n, m)
            nn.init.xavier_normal_(linear.weight)
            nn.init.zeros_(linear.bias)
            layers.append(linear)
            if i + 2 < len(WIDTHS):
                layers.append(nn.Tanh())
        super().__init__(*layers)

    def is_hidden(self, name: str) -> bool:
        """Every weight; biases are the rest."""
        return name.endswith("weight")


def images() -> tuple[Tensor, Tensor]:
    """Training and held-out images, in [0, 1]."""
    pixels, _ = load_digits(return_X_y=True)
    data = torch.tensor(pixels, dtype=torch.float32) / 16
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))
    return data[order[360:]], data[order[:360]]


def batches(data: Tensor, size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Random batches, forever."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        for part in torch.randperm(len(data), generator=generator).split(size):
            if len(part) == size:
                yield data[part], data[part]


def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Squared error of an image."""
    return (model(x) - y).square().sum(1).mean()


@torch.no_grad()
def value(model: nn.Module, held_out: Tensor) -> float:
    """The loss on the held-out images."""
    return loss(model, held_out, held_out).item()
