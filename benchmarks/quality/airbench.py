"""P1: the CIFAR-10 speedrun airbench (Jordan 2024) at a quarter of its width.

A frozen whitening convolution, three groups of two 3 x 3 convolutions with batch norm
and GELU, widths 16, 64 and 64, and a head whose output is divided by its width. Label
smoothing 0.2, summed over images; images are cropped after a reflecting border of 2,
flipped once at random and then every other epoch; rates fall linearly to zero. The six
convolutions are the hidden matrices: their weights are brought to the norm sqrt(out)
before every step. All else follows SGD with Nesterov momentum, as published, its rates
scaled by the fraction of the width and by the batch. The value is the error on the
10,000 test images in percent, without flip averaging.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from natgrad_lab import models
from natgrad_lab.data import Split, TensorSplit
from natgrad_lab.data import load as load_data

FRACTION = 0.25
WIDTH = 16
PUBLISHED_BATCH, IMAGES = 2_000, 50_000
BIAS_LR, HEAD_LR, WEIGHT_DECAY = 0.053, 0.67, 2e-6
# Of the rest's rates at another batch, besides the inverse of the batch, which a summed
# loss asks for.
LARGE_BATCH = 2.0
WHITENING_EPOCHS = 3
Data = tuple[Tensor, Tensor]


class Airbench(models.Airbench):
    """The network at a quarter of its width."""

    def __init__(self) -> None:
        super().__init__(width=WIDTH)
        self.fit(normalised(images()[0][0][:5000]))

    def is_hidden(self, name: str) -> bool:
        """The six convolutions."""
        return name.startswith("layers.")

    @torch.no_grad()
    def before_step(self) -> None:
        """Bring the weights of convolutions to the norm sqrt(out)."""
        for module in self.layers:
            if isinstance(module, nn.Conv2d):
                module.weight.mul_(len(module.weight) ** 0.5 / module.weight.norm())


def rest(model: Airbench, batch: int) -> torch.optim.Optimizer:
    """The published rule for what is no convolution. A group's ``until`` is the step at
    which its rate is zero."""
    scale = FRACTION * PUBLISHED_BATCH / batch
    scale *= LARGE_BATCH if batch > PUBLISHED_BATCH else 1.0
    bias_lr, head_lr, decay = BIAS_LR * scale, HEAD_LR * scale, WEIGHT_DECAY * batch
    biases = [m.bias for m in model.layers if isinstance(m, nn.BatchNorm2d)]
    until = WHITENING_EPOCHS * (IMAGES // batch)
    groups: list[dict[str, Any]] = [
        {"params": [model.whitening.bias], "lr": bias_lr, "until": until},
        {"params": biases, "lr": bias_lr},
        {"params": [model.head.weight], "lr": head_lr},
    ]
    for group in groups:
        group["weight_decay"] = decay / group["lr"]
    return torch.optim.SGD(groups, momentum=0.85, nesterov=True)


def images() -> tuple[Data, Data]:
    """Training and test images, uint8, and their labels."""
    dataset = load_data("cifar10")
    return _tensors(dataset.train), _tensors(dataset.test)


def _tensors(split: Split) -> Data:
    assert isinstance(split, TensorSplit)
    return split.inputs, split.labels


def normalised(pixels: Tensor) -> Tensor:
    """Pixels to numbers of mean about 0 and deviation about 1."""
    mean = torch.tensor((0.4914, 0.4822, 0.4465)).view(3, 1, 1)
    deviation = torch.tensor((0.2470, 0.2435, 0.2616)).view(3, 1, 1)
    return (pixels.float() / 255 - mean) / deviation


def batches(data: Data, size: int, seed: int) -> Iterator[Data]:
    """Epochs of augmented batches, forever; what does not fill a batch is left out."""
    generator = torch.Generator().manual_seed(seed)
    pixels, labels = data
    flipped = torch.rand(len(pixels), generator=generator) < 0.5
    while True:
        order = torch.randperm(len(pixels), generator=generator)
        shifts = torch.randint(5, (len(pixels), 2), generator=generator)
        for part in order.split(size):
            if len(part) == size:
                x = _cropped(normalised(pixels[part]), shifts[part])
                yield torch.where(_mask(flipped[part]), x.flip(-1), x), labels[part]
        flipped = ~flipped


def _mask(x: Tensor) -> Tensor:
    return x.view(-1, 1, 1, 1)


def _cropped(x: Tensor, shifts: Tensor) -> Tensor:
    wide, out = F.pad(x, (2, 2, 2, 2), "reflect"), torch.empty_like(x)
    for i in range(5):
        for j in range(5):
            here = (shifts[:, 0] == i) & (shifts[:, 1] == j)
            out[here] = wide[here, :, i : i + 32, j : j + 32]
    return out


def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Summed over images."""
    # a third less time on a CPU
    x = x.contiguous(memory_format=torch.channels_last)
    return F.cross_entropy(model(x), y, label_smoothing=0.2, reduction="sum")


@torch.no_grad()
def value(model: nn.Module, test: Data) -> float:
    """The error on the test images, in percent."""
    model.eval()
    pixels, labels = test
    right = 0
    for x, y in zip(pixels.split(2000), labels.split(2000), strict=True):
        right += int((model(normalised(x)).argmax(1) == y).sum())
    model.train()
    return 100 * (1 - right / len(labels))
