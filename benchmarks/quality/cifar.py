"""P3 and P5: a ResNet-8 of width 8 and a small vision transformer on CIFAR-10.

Images are cropped after a border of 4 zeros and flipped at random; cross-entropy, rates
linear to zero. Hidden matrices are the convolutions inside the stages, or the matrices
of the blocks; all else follows Adam. The value is the error on the 10,000 test images
in percent.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.quality.airbench import Data, normalised
from benchmarks.quality.airbench import images as images
from benchmarks.quality.airbench import value as value
from natgrad_lab import models

BORDER = 4


class ResNet(models.CifarResNet):
    """P3: three blocks of two convolutions."""

    def __init__(self) -> None:
        super().__init__(8, width=8)

    def is_hidden(self, name: str) -> bool:
        """Convolutions of the stages."""
        return name.startswith("layer")


class Transformer(models.ViT):
    """P5: four blocks of width 64 on patches of 4 x 4 pixels."""

    def __init__(self) -> None:
        super().__init__(width=64, depth=4)

    def is_hidden(self, name: str) -> bool:
        """Matrices of the blocks."""
        return name.startswith("blocks.")


def batches(data: Data, size: int, seed: int) -> Iterator[Data]:
    """Epochs of augmented batches, forever; what does not fill a batch is left out."""
    generator = torch.Generator().manual_seed(seed)
    pixels, labels = data
    while True:
        for part in torch.randperm(len(pixels), generator=generator).split(size):
            if len(part) == size:
                x = _cropped(normalised(pixels[part]), generator)
                flipped = torch.rand(size, generator=generator) < 0.5
                yield (
                    torch.where(flipped.view(-1, 1, 1, 1), x.flip(-1), x),
                    labels[part],
                )


def _cropped(x: Tensor, generator: torch.Generator) -> Tensor:
    """A window of each image, at a random place of the image with its border."""
    n, _, height, width = x.shape
    shift = torch.randint(2 * BORDER + 1, (2, n, 1), generator=generator)
    rows, columns = torch.arange(height) + shift[0], torch.arange(width) + shift[1]
    wide = F.pad(x, (BORDER,) * 4).movedim(1, -1)
    cut = wide[torch.arange(n).view(-1, 1, 1), rows[:, :, None], columns[:, None, :]]
    return cut.movedim(-1, 1)


def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Mean over images."""
    x = x.contiguous(memory_format=torch.channels_last)
    return F.cross_entropy(model(x), y)
