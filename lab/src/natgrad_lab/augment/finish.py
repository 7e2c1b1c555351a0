"""Normalise and erase one image at a time, in whichever thread has decoded it."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from natgrad_lab.augment.erasing import RandomErasing
from natgrad_lab.augment.images import Normalize

Box = tuple[int, int, int, int]
NOTHING: Box = (0, 0, 0, 0)


class Finish:
    """The same as a chain of `Normalize` and `RandomErasing`, for an image (H, W, C).

    It is numpy: torch would start threads of its own in every thread that decodes.

    Args:
        normalize: what turns pixels into numbers.
        erasing: what is erased afterwards, if anything.
    """

    def __init__(
        self, normalize: Normalize, erasing: RandomErasing | None = None
    ) -> None:
        self._scale = _rows(normalize.scale)
        self._shift = _rows(normalize.shift)
        self._erasing = erasing

    @property
    def randoms(self) -> int:
        """Uniform numbers it needs for each image."""
        return 0 if self._erasing is None else self._erasing.randoms

    def boxes(self, uniforms: Tensor, size: int) -> list[Box]:
        """What is erased of each image: (top, left, height, width)."""
        if self._erasing is None:
            return [NOTHING] * len(uniforms)
        boxes = self._erasing.boxes(uniforms, size, size)
        top, left, tall, wide = torch.stack(boxes).tolist()
        return list(zip(top, left, tall, wide, strict=True))

    def __call__(
        self, pixels: NDArray[np.uint8], box: Box, out: NDArray[np.float32]
    ) -> None:
        """Write an image's numbers into ``out``."""
        np.multiply(pixels, self._scale, out=out, casting="unsafe")
        out += self._shift
        top, left, tall, wide = box
        out[top : top + tall, left : left + wide] = 0


def _rows(x: Tensor) -> NDArray[np.float32]:
    """(C, H, W) or a number, as (H, W, C) or a number."""
    x = x.cpu()
    return (x.permute(1, 2, 0) if x.dim() == 3 else x).contiguous().numpy()
