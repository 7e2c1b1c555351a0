"""What a dataset is: examples fetched by number, and facts about them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from natgrad_lab.augment.windows import Window


class Split(Protocol):
    """Examples that can be fetched by number, many at a time."""

    def __len__(self) -> int: ...

    def fetch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs (N, ...) and labels (N, ...) int64 of the examples `indices` (N,)."""
        ...


@dataclass(frozen=True)
class TensorSplit:
    """Examples in memory: images (N, C, H, W) uint8, labels (N,) int64; or values."""

    inputs: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.labels):
            raise ValueError(f"{len(self.inputs)} inputs, {len(self.labels)} labels.")

    def __len__(self) -> int:
        return len(self.labels)

    def fetch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return self.inputs[indices], self.labels[indices]


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Examples to train and test on.

    Args:
        name: the name `load` knows it by.
        train: examples to train on.
        test: examples to test on.
        classes: name of each class; for text, each character; none of values.
        shape: one example as the model sees it: (C, H, W), or (T,) for text.
        values: how many a label has, if labels are values (N, values) and no classes.
        note: what the data really are, to print beside a result.
        mean: what is subtracted from images, in pixel units: (C, 1, 1) or (C, H, W).
        std: what they are divided by, (C, 1, 1) or ().
        padding: pixels around an image before a random crop of its own size.
        flip: whether a mirrored image is still of its class.
        window: for images that are decoded when they are asked for: what is seen of
            one in training.
        middle: likewise, in a test.
    """

    name: str
    train: Split
    test: Split
    classes: tuple[str, ...]
    shape: tuple[int, ...]
    note: str
    values: int = 0
    mean: Tensor | None = None
    std: Tensor | None = None
    padding: int = 0
    flip: bool = False
    window: Window | None = None
    middle: Window | None = None

    def normalised(self, indices: Sequence[int]) -> Tensor:
        """Training images as a model sees them, neither cut nor mirrored."""
        images, _ = self.train.fetch(torch.tensor(indices))
        mean = 0.0 if self.mean is None else self.mean
        std = 1.0 if self.std is None else self.std
        return (images.float() - mean) / std

    @property
    def is_text(self) -> bool:
        """Whether examples are sequences of characters."""
        return len(self.shape) == 1 and not self.values


def in_memory(
    name: str,
    train: TensorSplit,
    test: TensorSplit,
    classes: Sequence[str],
    *,
    note: str,
    padding: int,
    flip: bool,
) -> Dataset:
    """A dataset of images in memory, normalised by its training images' moments."""
    mean, std = channel_moments(train.inputs)
    shape = tuple(train.inputs.shape[1:])
    return Dataset(
        name=name,
        train=train,
        test=test,
        classes=tuple(classes),
        shape=shape,
        note=note,
        mean=mean,
        std=std,
        padding=padding,
        flip=flip,
    )


def channel_moments(images: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel of uint8 images, (C, 1, 1) each."""
    # a histogram holds all there is to know of 8-bit pixels: exact, one pass
    channels = (c.flatten() for c in images.unbind(1))
    counts = torch.stack([torch.bincount(c, minlength=256) for c in channels])
    share = counts.double() / counts.sum(1, keepdim=True)
    values = torch.arange(256, dtype=torch.float64)
    mean = share @ values
    variance = share @ values.square() - mean.square()
    std = variance.clamp(min=1e-6).sqrt()
    return mean.float().view(-1, 1, 1), std.float().view(-1, 1, 1)
