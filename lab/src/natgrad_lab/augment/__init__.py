"""Augmentation of whole batches by tensor operations; each piece is usable alone."""

from natgrad_lab.augment.base import Chain, Transform
from natgrad_lab.augment.erasing import RandomErasing
from natgrad_lab.augment.finish import Finish
from natgrad_lab.augment.images import CenterCrop, Normalize, RandomCropFlip, crop
from natgrad_lab.augment.mixup import ImageMixup, RunningMixup
from natgrad_lab.augment.targets import soft_targets
from natgrad_lab.augment.windows import (
    Cut,
    MiddleCrop,
    ResizedCrop,
    StretchedCrop,
    Window,
)

__all__ = [
    "CenterCrop",
    "Chain",
    "Cut",
    "Finish",
    "ImageMixup",
    "MiddleCrop",
    "Normalize",
    "RandomCropFlip",
    "RandomErasing",
    "ResizedCrop",
    "RunningMixup",
    "StretchedCrop",
    "Transform",
    "Window",
    "crop",
    "soft_targets",
]
