"""Which part of an image is seen, and at which size.

Images of a folder differ in size, so each is cut where it is decoded, one at a time: a
window takes an image's height and width and its own uniform numbers in [0, 1), and says
how to cut. Like a `Transform`, it needs as many numbers for every image.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Cut(NamedTuple):
    """How to cut one image.

    Rows ``top`` to ``top + height`` and columns ``left`` to ``left + width`` are
    resized to ``tall`` x ``wide`` pixels, of which the window at row ``y`` and column
    ``x`` is kept, mirrored left to right or not.
    """

    top: int
    left: int
    height: int
    width: int
    tall: int
    wide: int
    y: int = 0
    x: int = 0
    mirror: bool = False


class Window(Protocol):
    """A cut for an image of any size."""

    @property
    def size(self) -> int:
        """Side of what is seen, in pixels."""
        ...

    @property
    def randoms(self) -> int:
        """Uniform numbers it needs for each image."""
        ...

    def cut(self, height: int, width: int, uniforms: Sequence[float]) -> Cut:
        """The cut of an image of that size."""
        ...


class StretchedCrop:
    """A random window of the image stretched to a square (SP-NGD, section 6.1).

    Args:
        size: side of the window.
        stored: side of the square, whatever the image's aspect.
    """

    randoms = 3  # top, left, mirrored

    def __init__(self, size: int = 224, stored: int = 256) -> None:
        self.size, self.stored = size, _at_least(size, stored)

    def cut(self, height: int, width: int, uniforms: Sequence[float]) -> Cut:
        top, left, mirror = uniforms
        places = self.stored - self.size + 1
        y, x = int(top * places), int(left * places)
        side = self.stored
        return Cut(0, 0, height, width, side, side, y, x, mirror < 0.5)


class ResizedCrop:
    """A random part of random area and aspect, resized (torchvision's default crop).

    Ten areas and aspects are drawn; the first part that lies inside of the image is
    taken. If none does, it is the middle, as large as the aspects allow.

    Args:
        size: side of what is seen.
        area: smallest and largest share of the image's area.
        aspect: smallest and largest width / height; log-uniform between.
    """

    TRIES = 10
    randoms = 2 * TRIES + 3  # areas and aspects, top, left, mirrored

    def __init__(
        self,
        size: int = 224,
        *,
        area: tuple[float, float] = (0.08, 1.0),
        aspect: tuple[float, float] = (3 / 4, 4 / 3),
    ) -> None:
        if not 0 < area[0] <= area[1] <= 1:
            raise ValueError(f"Invalid {area=}. Must be 0 < low <= high <= 1.")
        if not 0 < aspect[0] <= aspect[1]:
            raise ValueError(f"Invalid {aspect=}. Must be 0 < low <= high.")
        self.size, self.area, self.aspect = size, area, aspect

    def cut(self, height: int, width: int, uniforms: Sequence[float]) -> Cut:
        *tries, top, left, mirror = uniforms
        for i in range(0, 2 * self.TRIES, 2):
            tall, wide = self._part(height * width, tries[i], tries[i + 1])
            if 0 < tall <= height and 0 < wide <= width:
                y, x = int(top * (height - tall + 1)), int(left * (width - wide + 1))
                return Cut(y, x, tall, wide, self.size, self.size, mirror=mirror < 0.5)
        tall, wide = self._largest(height, width)
        y, x = (height - tall) // 2, (width - wide) // 2
        return Cut(y, x, tall, wide, self.size, self.size, mirror=mirror < 0.5)

    def _part(self, pixels: int, area: float, aspect: float) -> tuple[int, int]:
        target = pixels * _between(self.area, area)
        ratio = math.exp(_between([math.log(each) for each in self.aspect], aspect))
        return round(math.sqrt(target / ratio)), round(math.sqrt(target * ratio))

    def _largest(self, height: int, width: int) -> tuple[int, int]:
        low, high = self.aspect
        if width < low * height:
            return round(width / low), width
        if width > high * height:
            return height, round(height * high)
        return height, width


class MiddleCrop:
    """The middle window: for tests.

    Args:
        size: side of the window.
        stored: the image is resized to this side first.
        stretched: to a square of it, whatever the aspect; or else its shorter side.
    """

    randoms = 0

    def __init__(
        self, size: int = 224, stored: int = 256, *, stretched: bool = True
    ) -> None:
        self.size, self.stored = size, _at_least(size, stored)
        self.stretched = stretched

    def cut(self, height: int, width: int, uniforms: Sequence[float] = ()) -> Cut:
        tall = wide = self.stored
        if not self.stretched:
            tall, wide = fitted(height, width, self.stored)
        y, x = (tall - self.size) // 2, (wide - self.size) // 2
        return Cut(0, 0, height, width, tall, wide, y, x)


def fitted(height: int, width: int, side: int) -> tuple[int, int]:
    """The size of an image resized so that its shorter side is ``side``."""
    if height <= width:
        return side, max(side, side * width // height)
    return max(side, side * height // width), side


def _at_least(size: int, stored: int) -> int:
    if not 0 < size <= stored:
        raise ValueError(f"Invalid {size=}. Must be in 1 to {stored=}.")
    return stored


def _between(limits: Sequence[float], uniform: float) -> float:
    low, high = limits
    return low + (high - low) * uniform
