"""Images that are decoded and cut by many threads when they are asked for."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from natgrad_lab.augment.finish import Box, Finish
from natgrad_lab.augment.windows import MiddleCrop, Window
from natgrad_lab.data.folders import IMAGENET_ADVICE as ADVICE
from natgrad_lab.data.folders import DataError
from natgrad_lab.data.jpeg import ImageError, read_window

STORED, SEEN = 256, 224


class Source(Protocol):
    """Encoded images by number."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> bytes:
        """An image's bytes."""
        ...

    def name(self, index: int) -> str:
        """What to call it in an error."""
        ...


@dataclass(frozen=True)
class Files:
    """One file an image."""

    paths: Sequence[Path]

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, index: int) -> bytes:
        try:
            return self.paths[index].read_bytes()
        except OSError as error:
            raise DataError(f"{self.name(index)} cannot be read ({error}).") from error

    def name(self, index: int) -> str:
        return str(self.paths[index])


@dataclass(frozen=True, kw_only=True)
class View:
    """What is made of each image.

    Args:
        window: which part is seen.
        finish: makes numbers of it, (N, 3, size, size) float32; without, pixels remain.
        channels_last: the layout of those numbers. Pixels always are in channels_last.
        pin: put batches into memory that a device can copy from by itself.
    """

    window: Window
    finish: Finish | None = None
    channels_last: bool = True
    pin: bool = False

    @property
    def randoms(self) -> int:
        """Uniform numbers it needs for each image."""
        finish = 0 if self.finish is None else self.finish.randoms
        return self.window.randoms + finish


class ImageSplit:
    """Encoded images and their classes.

    Args:
        source: the images.
        labels: class of each, (N,) int64.
        threads: how many decode at once; None: this process's share of the cores.
    """

    def __init__(
        self, source: Source, labels: Tensor, *, threads: int | None = None
    ) -> None:
        if len(source) != len(labels):
            raise ValueError(f"{len(source)} images, {len(labels)} labels.")
        self.source, self.labels = source, labels
        self.threads = threads or cores()

    def __len__(self) -> int:
        return len(self.source)

    def fetch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Whole images stretched to (N, 3, 256, 256) uint8, and labels (N,)."""
        whole = View(window=MiddleCrop(STORED, STORED))
        return self.view(indices, whole, torch.empty(len(indices), 0))

    def view(
        self, indices: Tensor, view: View, uniforms: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What a view makes of images, and labels (N,).

        ``uniforms`` (N, view.randoms) are the view's numbers, the window's first.
        """
        finish, size = view.finish, view.window.size
        kind = torch.uint8 if finish is None else torch.float32
        shape = (len(indices), size, size, 3)
        batch = torch.empty(shape, dtype=kind, pin_memory=view.pin)
        early, late = uniforms.tensor_split([view.window.randoms], dim=1)
        boxes = None if finish is None else finish.boxes(late, size)
        self._make(indices.tolist(), view, early.tolist(), boxes, batch.numpy())
        images = batch.permute(0, 3, 1, 2)
        if finish is not None and not view.channels_last:
            images = images.contiguous()
        return images, self.labels[indices]

    def _make(
        self,
        indices: Sequence[int],
        view: View,
        uniforms: Sequence[Sequence[float]],
        boxes: Sequence[Box] | None,
        batch: NDArray[np.uint8] | NDArray[np.float32],
    ) -> None:
        def one(row: int, pixels: NDArray[np.uint8]) -> None:
            index = indices[row]
            try:
                data = self.source.read(index)
                read_window(data, view.window, tuple(uniforms[row]), pixels)
            except ImageError as error:
                name = self.source.name(index)
                raise DataError(f"{name} cannot be read ({error}). {ADVICE}") from error
            if view.finish is not None and boxes is not None:
                view.finish(pixels, boxes[row], batch[row])

        def some(rows: range) -> None:
            size = view.window.size
            scratch = np.empty((size, size, 3), np.uint8)
            for row in rows:
                one(row, scratch if view.finish is not None else batch[row])

        self.run(some, len(indices))

    def run(self, work: Callable[[range], None], count: int) -> None:
        """Do ``work`` on all of 0 .. count - 1, in pieces, by all threads."""
        # several pieces a thread, so that none waits long for the others
        piece = max(1, min(16, count // (4 * self.threads)))
        pieces = [range(i, min(i + piece, count)) for i in range(0, count, piece)]
        for _ in self._pool.map(work, pieces):
            pass

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self.threads, thread_name_prefix="natgrad-images")


def cores() -> int:
    """The processors that this process may use, shared with its local ranks."""
    if hasattr(os, "sched_getaffinity"):
        usable = len(os.sched_getaffinity(0))
    else:
        usable = os.cpu_count() or 1
    return max(1, usable // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
