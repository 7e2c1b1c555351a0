"""Random erasing with zero (Osawa et al. 2019, section 4.1; SP-NGD, section 6.1)."""

import torch
from torch import Tensor

from natgrad_lab.augment.base import uniforms_for, whole_number


class RandomErasing:
    """Set a random rectangle of some images to zero.

    The rectangle is He = sqrt(S r) by We = sqrt(S / r) pixels, S a share of the image's
    area and r the aspect; half of the time the two are switched. It lies
    wholly inside the image, every place being equally likely. Images should be
    normalised first, so that zero is the mean.

    Args:
        probability: of erasing anything in an image.
        area: smallest and largest share of the image's area.
        aspect: smallest and largest He / We.
    """

    randoms = 6  # erased, area, aspect, switched, top, left

    def __init__(
        self,
        *,
        probability: float = 0.5,
        area: tuple[float, float] = (0.02, 0.25),
        aspect: tuple[float, float] = (0.3, 1.0),
    ) -> None:
        if not 0 <= probability <= 1:
            raise ValueError(f"Invalid {probability=}. Must be in [0, 1].")
        if not 0 < area[0] <= area[1] <= 1:
            raise ValueError(f"Invalid {area=}. Must be 0 < low <= high <= 1.")
        if not 0 < aspect[0] <= aspect[1]:
            raise ValueError(f"Invalid {aspect=}. Must be 0 < low <= high.")
        self.probability, self.area, self.aspect = probability, area, aspect

    def __call__(self, inputs: Tensor, uniforms: Tensor | None = None) -> Tensor:
        height, width = inputs.shape[2:]
        uniforms = uniforms_for(inputs, self.randoms, uniforms)
        top, left, tall, wide = self.boxes(uniforms, height, width)
        rows = _within(top, tall, height)
        columns = _within(left, wide, width)
        mask = rows[:, None, :, None] & columns[:, None, None, :]
        # masked_fill would not keep a batch in channels_last
        return inputs.clone().masked_fill_(mask, 0)

    def boxes(
        self, uniforms: Tensor, height: int, width: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Each image's (top, left, height, width), (N,) each; 0 where not erased."""
        erased, area, aspect, switched, top, left = uniforms.unbind(1)
        area = torch.lerp(*_ends(self.area, area), area) * height * width
        aspect = torch.lerp(*_ends(self.aspect, aspect), aspect)
        short, long = (area * aspect).sqrt(), (area / aspect).sqrt()
        tall = _pixels(torch.where(switched < 0.5, short, long), height)
        wide = _pixels(torch.where(switched < 0.5, long, short), width)
        top = whole_number(top, height - tall + 1)
        left = whole_number(left, width - wide + 1)
        keep = erased < self.probability
        return top * keep, left * keep, tall * keep, wide * keep


def _ends(limits: tuple[float, float], like: Tensor) -> tuple[Tensor, Tensor]:
    low, high = limits
    return torch.full_like(like, low), torch.full_like(like, high)


def _pixels(length: Tensor, limit: int) -> Tensor:
    return length.round().long().clamp(1, limit)


def _within(start: Tensor, length: Tensor, size: int) -> Tensor:
    place = torch.arange(size, device=start.device)
    return (place >= start[:, None]) & (place < (start + length)[:, None])
