"""ImageNet, or any folder of images with one folder a class, streamed from disk."""

import contextlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from natgrad_lab.data.dataset import Dataset
from natgrad_lab.data.folders import IMAGENET_ADVICE as ADVICE
from natgrad_lab.data.folders import DataError

FOLDER = "imagenet"
STORED, SEEN = 256, 224
SUFFIXES = {".jpeg", ".jpg", ".png"}


class FolderSplit:
    """Image files, read by background threads when they are asked for.

    Args:
        paths: the files.
        labels: class of each, (N,) int64.
        size: side every image is resized to, ignoring its aspect.
        threads: how many read at once; None: one a processor.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        labels: Tensor,
        *,
        size: int = STORED,
        threads: int | None = None,
    ) -> None:
        self.paths, self.labels, self.size = list(paths), labels, size
        self.threads = threads or os.cpu_count() or 1

    def __len__(self) -> int:
        return len(self.paths)

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self.threads, thread_name_prefix="natgrad-images")

    def fetch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Images (N, 3, size, size) uint8 and labels (N,)."""
        images = torch.empty(len(indices), self.size, self.size, 3, dtype=torch.uint8)
        paths = [self.paths[i] for i in indices.tolist()]
        reads = self._pool.map(lambda p: read_image(p, self.size), paths)
        for row, pixels in zip(images.unbind(), reads, strict=True):
            row.copy_(torch.from_numpy(pixels))
        return images.permute(0, 3, 1, 2), self.labels[indices]


def read_image(path: Path, size: int) -> np.ndarray:
    """An image resized to size x size ignoring its aspect, (size, size, 3) uint8."""
    try:
        with Image.open(path) as image:
            # lets the JPEG decoder shrink by a power of two on the way: less work
            image.draft("RGB", (size, size))
            resized = image.convert("RGB").resize((size, size), _BILINEAR)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error}). {ADVICE}") from error
    return np.array(resized)


_BILINEAR = Image.Resampling.BILINEAR


def load(
    root: Path,
    *,
    threads: int | None = None,
    mean_images: int = 10_000,
    progress: Callable[[int, int], None] | None = None,
) -> Dataset:
    """Images resized to 256 x 256, for crops of 224 (SP-NGD, section 6.1).

    The mean image is that of the upper left 224 x 224 pixels. It is estimated once,
    from evenly spaced training images, and kept beside them if that can be written.

    Args:
        root: holds imagenet/train and imagenet/val, one folder a class in each.
        threads: how many read at once; None: one a processor.
        mean_images: how many images the mean is estimated from.
        progress: told (images read, images to read) while the mean is estimated.
    """
    folder = root / FOLDER
    classes = _classes(folder / "train")
    train = _split(folder / "train", classes, threads)
    test = _split(folder / "val", classes, threads)
    return Dataset(
        name="imagenet",
        train=train,
        test=test,
        classes=classes,
        shape=(3, SEEN, SEEN),
        note="ImageNet" if len(classes) == 1000 else f"{len(classes)} image folders",
        mean=_mean(folder, train, mean_images, progress),
        std=torch.tensor(255.0),
        flip=True,
    )


def _classes(folder: Path) -> tuple[str, ...]:
    if not folder.is_dir():
        raise DataError(f"The folder {folder} is missing. {ADVICE}")
    classes = tuple(sorted(e.name for e in os.scandir(folder) if e.is_dir()))
    if not classes:
        raise DataError(f"The folder {folder} has no class folders. {ADVICE}")
    return classes


def _split(folder: Path, classes: tuple[str, ...], threads: int | None) -> FolderSplit:
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
    return FolderSplit(paths, torch.tensor(labels), threads=threads)


def _images(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    files = (Path(entry.path) for entry in os.scandir(folder))
    return sorted(p for p in files if p.suffix.lower() in SUFFIXES)


def _mean(
    folder: Path,
    train: FolderSplit,
    images: int,
    progress: Callable[[int, int], None] | None,
) -> Tensor:
    images = min(images, len(train))
    path = folder / f"mean-{images}-of-{len(train)}.npy"
    if path.is_file():
        return torch.from_numpy(np.load(path, allow_pickle=False))
    mean = mean_image(train, images, progress)
    # another process may be doing the same: each writes its own, one wins
    own = path.with_name(f"{path.stem}.{os.getpid()}.npy")
    with contextlib.suppress(OSError):
        np.save(own, mean.numpy())
        own.replace(path)
    return mean


def mean_image(
    split: FolderSplit,
    images: int,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """Mean upper left 224 x 224 pixels of evenly spaced images, (3, 224, 224)."""
    chosen = torch.linspace(0, len(split) - 1, images, dtype=torch.float64).long()
    total = torch.zeros(3, SEEN, SEEN, dtype=torch.float64)
    done = 0
    for part in chosen.split(64):
        total += split.fetch(part)[0][:, :, :SEEN, :SEEN].double().sum(0)
        done += len(part)
        if progress:
            progress(done, images)
    return (total / images).float()
