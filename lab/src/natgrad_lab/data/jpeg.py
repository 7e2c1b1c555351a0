"""Decode, cut and resize an image; encode one.

libjpeg-turbo (simplejpeg) decodes without holding Python's lock, and can shrink while
it decodes. Resizing is torch's, with antialiasing, straight into rows of pixels.
"""

import io
import math
from typing import Any

import numpy as np
import simplejpeg
import torch
from numpy.typing import NDArray
from PIL import Image

from natgrad_lab.augment.windows import Cut, Window

Pixels = NDArray[np.uint8]
SMALLER = (8, 4, 2, 1)
"""By what libjpeg shrinks: it could by other numbers, but is slow at them."""
WORST = 10
"""JPEG quality below which an image is not encoded, however large it is."""


class ImageError(ValueError):
    """What is no image, or a damaged one."""


def read_window(
    data: bytes, window: Window, uniforms: tuple[float, ...], out: Pixels
) -> None:
    """Decode an image and write what a window sees of it into ``out``.

    Args:
        data: a JPEG, or whatever Pillow reads.
        window: says how to cut.
        uniforms: the window's own numbers.
        out: (size, size, 3).
    """
    whole: Pixels | None = None
    try:
        height, width = _size(data)
    except ValueError:
        whole = _by_pillow(data)
        height, width = whole.shape[:2]
    cut = window.cut(height, width, uniforms)
    if whole is None:
        whole = _decode(data, cut, height, width)
    pixels = _resized(_part(whole, cut, height, width), cut.tall, cut.wide)
    seen = pixels[cut.y : cut.y + window.size, cut.x : cut.x + window.size]
    if not cut.mirror:
        out[:] = seen
        return
    for channel in range(3):  # much faster than all three at once
        out[..., channel] = seen[:, ::-1, channel]


def read_resized(data: bytes, tall: int, wide: int) -> Pixels:
    """An image at another size, (tall, wide, 3)."""
    try:
        height, width = _size(data)
    except ValueError:
        return _resized(_by_pillow(data), tall, wide)
    whole = Cut(0, 0, height, width, tall, wide)
    return _resized(_decode(data, whole, height, width), tall, wide)


def size_of(data: bytes) -> tuple[int, int]:
    """Height and width of an image."""
    try:
        return _size(data)
    except ValueError:
        height, width, _ = _by_pillow(data).shape
        return height, width


def encode(pixels: Pixels, quality: int, most: int) -> bytes:
    """A JPEG of at most so many bytes, of lower quality if that takes it."""
    rows = np.ascontiguousarray(pixels)
    while True:
        data = simplejpeg.encode_jpeg(rows, quality=quality, colorsubsampling="420")
        if len(data) <= most or quality <= WORST:
            return data
        quality -= 5


def _size(data: bytes) -> tuple[int, int]:
    height, width, _, _ = simplejpeg.decode_jpeg_header(data)
    return int(height), int(width)


def _decode(data: bytes, cut: Cut, height: int, width: int) -> Pixels:
    """The whole image, at least as large as the cut needs it."""
    most = min(cut.height / cut.tall, cut.width / cut.wide)
    by = next((n for n in SMALLER if n <= most), 1)
    try:
        return simplejpeg.decode_jpeg(
            data, min_height=math.ceil(height / by), min_width=math.ceil(width / by)
        )
    except ValueError:
        # strict about what decoders get over; Pillow says whether pixels are missing
        return _by_pillow(data)


def _by_pillow(data: bytes) -> Pixels:
    try:
        with Image.open(io.BytesIO(data)) as image:
            return np.asarray(image.convert("RGB"))
    except (OSError, ValueError, SyntaxError) as error:
        raise ImageError(str(error) or type(error).__name__) from error


def _part(whole: Pixels, cut: Cut, height: int, width: int) -> Pixels:
    """The rows and columns to cut, of an image that may be decoded smaller."""
    if cut.height == height and cut.width == width:
        return whole
    tall, wide = whole.shape[:2]
    rows = _shrunk(cut.top, cut.height, tall / height)
    columns = _shrunk(cut.left, cut.width, wide / width)
    return whole[rows, columns]


def _shrunk(start: int, length: int, ratio: float) -> slice:
    first = round(start * ratio)
    return slice(first, max(first + 1, round((start + length) * ratio)))


def _resized(pixels: Pixels, tall: int, wide: int) -> Pixels:
    if pixels.shape[:2] == (tall, wide):
        return pixels
    rows = torch.from_numpy(np.require(pixels, requirements=["C", "W"]))
    out = torch.empty(1, tall, wide, 3, dtype=torch.uint8)
    # F.interpolate(antialias=True), but into rows of pixels instead of planes
    resize: Any = torch.ops.aten._upsample_bilinear2d_aa.out
    planes = out.permute(0, 3, 1, 2)
    resize(rows.permute(2, 0, 1)[None], [tall, wide], False, None, out=planes)
    return out[0].numpy()
