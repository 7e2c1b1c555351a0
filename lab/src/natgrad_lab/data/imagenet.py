"""ImageNet, or any folder of images with one folder a class, streamed from disk."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from natgrad_lab.augment.windows import MiddleCrop, ResizedCrop, StretchedCrop, Window
from natgrad_lab.data.cache import Cache, Crop, Splits, open_cache
from natgrad_lab.data.dataset import Dataset
from natgrad_lab.data.folders import IMAGENET_ADVICE as ADVICE
from natgrad_lab.data.folders import DataError
from natgrad_lab.data.images import SEEN, STORED, Files, ImageSplit

FOLDER = "imagenet"
SUFFIXES = {".jpeg", ".jpg", ".png"}
# of torchvision's models, and of everyone who trains with its crop; pixels are 0 to 1
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

Progress = Callable[[int, int], None]


class Ranks(Protocol):
    """The processes that load the same data."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks, in place, on all of them."""
        ...


def load(
    root: Path,
    *,
    crop: Crop = "stretched",
    size: int = SEEN,
    cache: Path | None = None,
    threads: int | None = None,
    ranks: Ranks | None = None,
    progress: Progress | None = None,
) -> Dataset:
    """Images for a model that sees 224 x 224 pixels, or another size.

    Args:
        root: holds imagenet/train and imagenet/val, one folder a class in each.
        crop: "stretched": images are stretched to 256 x 256, of which a random window
            is seen, and their mean image is subtracted (SP-NGD, section 6.1).
            "resized": a random part of random area and aspect is resized, and
            torchvision's mean and deviation of each channel are used.
        size: side of what the model sees; 256 scales with it.
        cache: a folder that `natgrad data cache` has written; without, originals are
            read.
        threads: how many decode at once; None: this process's share of the cores.
        ranks: share the work of estimating the mean image, which is done once, over
            the whole training set, and kept beside it.
        progress: told (images read, images to read) while the mean is estimated.
    """
    stored = size * STORED // SEEN
    kept = None if cache is None else _kept(cache, crop, threads)
    if kept is None:
        splits, classes = originals(root, threads=threads)
    else:
        splits, classes = kept.splits, kept.classes
    mean, std = torch.tensor(MEAN) * 255, torch.tensor(STD) * 255
    mean, std = mean.view(3, 1, 1), std.view(3, 1, 1)
    if crop == "stretched":
        mean = _mean(root, splits, kept, stored, ranks, progress)
        mean, std = mean[:, :size, :size].contiguous(), torch.tensor(255.0)
    return Dataset(
        name="imagenet",
        train=splits["train"],
        test=splits["val"],
        classes=classes,
        shape=(3, size, size),
        note=_note(classes, kept),
        mean=mean,
        std=std,
        flip=True,
        window=_window(crop, size, stored),
        middle=MiddleCrop(size, stored, stretched=crop == "stretched"),
    )


def _window(crop: Crop, size: int, stored: int) -> Window:
    return StretchedCrop(size, stored) if crop == "stretched" else ResizedCrop(size)


def _kept(folder: Path, crop: Crop, threads: int | None) -> Cache:
    cache = open_cache(folder, threads=threads)
    if cache.form.crop != crop:
        raise DataError(
            f"{folder} has images for crop={cache.form.crop!r}, not {crop!r}. Write "
            f"another with `natgrad data cache imagenet --crop {crop}`."
        )
    return cache


def _note(classes: tuple[str, ...], kept: Cache | None) -> str:
    what = "ImageNet" if len(classes) == 1000 else f"{len(classes)} image folders"
    if kept is None:
        return what
    return f"{what} (cached at {kept.form.side} pixels, quality {kept.form.quality})"


def originals(
    root: Path, *, threads: int | None = None
) -> tuple[Splits, tuple[str, ...]]:
    """The images as they are on disk, and the names of their classes."""
    folder = root / FOLDER
    classes = _classes(folder / "train")
    names = ("train", "val")
    return {each: _split(folder / each, classes, threads) for each in names}, classes


def _classes(folder: Path) -> tuple[str, ...]:
    if not folder.is_dir():
        raise DataError(f"The folder {folder} is missing. {ADVICE}")
    classes = tuple(sorted(e.name for e in os.scandir(folder) if e.is_dir()))
    if not classes:
        raise DataError(f"The folder {folder} has no class folders. {ADVICE}")
    return classes


def _split(folder: Path, classes: tuple[str, ...], threads: int | None) -> ImageSplit:
    found = _classes(folder)
    if extra := set(found) - set(classes):
        raise DataError(f"{folder} has classes unknown to train: {sorted(extra)[:3]}.")
    paths: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        files = _images(folder / name)
        paths += files
        labels += [label] * len(files)
    if not paths:
        raise DataError(f"The folder {folder} has no images. {ADVICE}")
    return ImageSplit(Files(paths), torch.tensor(labels), threads=threads)


def _images(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    files = (Path(entry.path) for entry in os.scandir(folder))
    return sorted(p for p in files if p.suffix.lower() in SUFFIXES)


def _mean(
    root: Path,
    splits: Splits,
    kept: Cache | None,
    stored: int,
    ranks: Ranks | None,
    progress: Progress | None,
) -> Tensor:
    """The mean of all training images, stretched, (3, stored, stored)."""
    if kept is not None and kept.mean is not None:
        mean = kept.mean
    else:
        mean = _kept_mean(root / FOLDER, splits["train"], ranks, progress)
    if mean.shape[-1] == stored:
        return mean
    size = (stored, stored)
    return F.interpolate(mean[None], size, mode="bilinear", antialias=True)[0]


def _kept_mean(
    folder: Path, train: ImageSplit, ranks: Ranks | None, progress: Progress | None
) -> Tensor:
    path = folder / f"mean-{len(train)}.npy"
    missing = torch.tensor(int(not path.is_file()))
    # all ranks must take part or none
    if not (missing if ranks is None else ranks.sum(missing)):
        return torch.from_numpy(np.load(path, allow_pickle=False))
    mean = mean_image(train, ranks, progress)
    # another run may be doing the same: each writes its own, one wins
    own = path.with_name(f"{path.stem}.{os.getpid()}.npy")
    if ranks is None or ranks.rank == 0:
        with contextlib.suppress(OSError):
            np.save(own, mean.numpy())
            own.replace(path)
    return mean


def mean_image(
    split: ImageSplit, ranks: Ranks | None = None, progress: Progress | None = None
) -> Tensor:
    """Mean of all images, stretched to (3, 256, 256); each rank reads its share."""
    rank, size = (0, 1) if ranks is None else (ranks.rank, ranks.size)
    mine = torch.arange(rank, len(split), size)
    total = torch.zeros(3, STORED, STORED, dtype=torch.float64)
    done = 0
    for part in mine.split(64):
        total += split.fetch(part)[0].double().sum(0)
        done += len(part)
        if progress:
            progress(done, len(mine))
    return ((total if ranks is None else ranks.sum(total)) / len(split)).float()
