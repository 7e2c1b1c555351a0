"""Generated photographs: ImageNet's sizes, a photograph's spectrum, JPEG's bytes."""

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Size = tuple[int, int]
SIZES: Sequence[Size] = (
    (375, 500),
    (333, 500),
    (500, 375),
    (500, 333),
    (400, 400),
    (480, 640),
)
"""Common heights and widths of ImageNet's images."""
QUALITY = 92
"""Gives 375 x 500 pixels about the 110 kB that ImageNet's images have on average."""


def picture(rng: np.random.Generator, height: int, width: int) -> NDArray[np.uint8]:
    """Noise whose amplitude falls as 1 / frequency^1.1, as that of photographs does."""
    down, across = np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None]
    frequency = np.maximum(np.hypot(down, across), 1 / max(height, width))

    def plane(power: float) -> NDArray[np.float64]:
        phases = np.exp(2j * np.pi * rng.random(frequency.shape))
        waves = np.fft.irfft2(frequency**-power * phases, (height, width))
        return waves / waves.std()

    grey = 45 * plane(1.1)
    planes = [118 + 20 * rng.normal() + grey + 25 * plane(1.4) for _ in range(3)]
    return np.clip(np.stack(planes, -1), 0, 255).astype(np.uint8)


def jpeg(pixels: NDArray[np.uint8], quality: int = QUALITY) -> bytes:
    """As most of ImageNet's files are: by libjpeg, chroma at half the resolution."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=quality)
    return file.getvalue()


def write_imagenet(
    root: Path, *, train: int, val: int, classes: int = 2, sizes: Sequence[Size] = SIZES
) -> None:
    """A folder laid out as ImageNet's, with so many images a class."""
    rng = np.random.default_rng(0)
    for part, count in (("train", train), ("val", val)):
        for label in range(classes):
            folder = root / "imagenet" / part / f"n{label}"
            folder.mkdir(parents=True)
            for i in range(count):
                height, width = sizes[(i + label) % len(sizes)]
                data = jpeg(picture(rng, height, width))
                (folder / f"{part}_{i}.JPEG").write_bytes(data)
