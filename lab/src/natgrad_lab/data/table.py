"""Every dataset by name."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from natgrad_lab.data.dataset import Dataset
from natgrad_lab.data.download import Progress
from natgrad_lab.data.folders import DataError, data_root

NAMES = (
    *("digits", "cifar10", "fashion_mnist", "imagenet", "text"),
    *("autoencoder", "picture", "poisson"),
)


def load(
    name: str = "digits",
    root: str | Path | None = None,
    *,
    ranks: Any = None,
    progress: Progress | None = None,
    **options: Any,
) -> Dataset:
    """Read a dataset.

    Args:
        name: one of `NAMES`.
        root: the folder of all datasets; see `data_root`.
        ranks: the processes that load it together; see `imagenet.load`.
        progress: told ("mean image", images read, images to read) where the mean of
            a data set is not known yet.
        **options: the dataset's own: `folder`, `block` for text; `crop`, `size`,
            `cache`, `threads` for imagenet.

    Raises:
        DataError: a file is missing or wrong.
    """
    if name not in NAMES:
        raise DataError(f"Invalid data {name=}. Must be one of {', '.join(NAMES)}.")
    # imported on demand: few need scikit-learn or pillow
    read: Callable[..., Dataset] = import_module(f"natgrad_lab.data.{name}").load
    if name == "imagenet":
        told = None if progress is None else partial(progress, "mean image")
        options |= {"ranks": ranks, "progress": told}
    return read(data_root(root), **options)
