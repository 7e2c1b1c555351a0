"""Crop, flip and normalise whole batches of images, (N, C, H, W)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from natgrad_lab.augment.base import uniforms_for, whole_number


class RandomCropFlip:
    """A random window of each image, mirrored half of the time.

    Args:
        size: side of the window; None keeps the image's own size.
        padding: zero pixels added on every side first.
        flip: mirror left to right with probability 1/2.
    """

    randoms = 3  # top, left, mirrored

    def __init__(
        self, *, size: int | None = None, padding: int = 0, flip: bool = True
    ) -> None:
        if padding < 0:
            raise ValueError(f"Invalid {padding=}. Must be >= 0.")
        self.size, self.padding, self.flip = size, padding, flip

    def __call__(self, inputs: Tensor, uniforms: Tensor | None = None) -> Tensor:
        top, left, mirror = uniforms_for(inputs, self.randoms, uniforms).unbind(1)
        height, width = self._window(inputs)
        padded = F.pad(inputs, (self.padding,) * 4) if self.padding else inputs
        return crop(
            padded,
            whole_number(top, padded.shape[2] - height + 1),
            whole_number(left, padded.shape[3] - width + 1),
            (mirror < 0.5) & self.flip,
            (height, width),
        )

    def _window(self, inputs: Tensor) -> tuple[int, int]:
        height, width = inputs.shape[2:]
        size = self.size
        if size is None:
            return height, width
        if size > min(height, width) + 2 * self.padding:
            raise ValueError(f"Invalid crop {size=} of {height} x {width} images.")
        return size, size


def crop(
    images: Tensor, top: Tensor, left: Tensor, mirror: Tensor, size: tuple[int, int]
) -> Tensor:
    """Cut one window out of each image: one gather for the whole batch.

    Args:
        images: (N, C, H, W).
        top: first row of each window, (N,).
        left: first column of each window, (N,).
        mirror: which windows to flip left to right, (N,), bool.
        size: height and width of the windows.
    """
    count, channels, _, width = images.shape
    rows = top[:, None] + torch.arange(size[0], device=images.device)
    columns = torch.arange(size[1], device=images.device).expand(count, -1)
    columns = torch.where(mirror[:, None], size[1] - 1 - columns, columns)
    columns = left[:, None] + columns
    index = (rows[:, :, None] * width + columns[:, None, :]).flatten(1)
    index = index[:, None, :].expand(-1, channels, -1)
    pixels = images.flatten(2).gather(2, index)
    return pixels.view(count, channels, *size)


class CenterCrop:
    """The middle window of each image.

    Args:
        size: side of the window.
    """

    randoms = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, inputs: Tensor, uniforms: Tensor | None = None) -> Tensor:
        top, left = ((s - self.size) // 2 for s in inputs.shape[2:])
        return inputs[:, :, top : top + self.size, left : left + self.size]


class Normalize:
    """uint8 images to float32: (pixel - mean) / std.

    Args:
        mean: in pixel units (0 to 255), broadcast against (C, H, W): a channel's mean
            is (C, 1, 1), a mean image is (C, H, W).
        std: likewise.
        channels_last: lay the result out in channels_last, at no further cost.
    """

    randoms = 0

    def __init__(
        self, mean: Tensor, std: Tensor, *, channels_last: bool = False
    ) -> None:
        self.scale = 1 / std.float()
        self.shift = -mean.float() * self.scale
        self.layout = torch.channels_last if channels_last else torch.contiguous_format

    def __call__(self, inputs: Tensor, uniforms: Tensor | None = None) -> Tensor:
        out = inputs.to(torch.float32, memory_format=self.layout)
        # float images come back from .to() as themselves: leave the caller's alone
        out = out.clone() if out is inputs else out
        return out.mul_(self.scale).add_(self.shift)
