"""Where data is kept, and what to say when it is not there."""

import os
import sys
from collections.abc import Iterable
from pathlib import Path

from natgrad_lab.errors import UserError

IMAGENET_ADVICE = (
    "ImageNet comes from https://image-net.org under its own terms; lay it out as "
    "imagenet/train/CLASS/*.JPEG and imagenet/val/CLASS/*.JPEG in the data folder."
)


class DataError(UserError):
    """A file is missing, wrong or unsafe; the message says which and what to do."""


def data_root(root: str | Path | None = None) -> Path:
    """The folder of all datasets.

    The argument, else the environment variable NATGRAD_DATA, else `natgrad` in the
    user's cache folder (~/.cache or XDG_CACHE_HOME on Linux, ~/Library/Caches on macOS,
    %LOCALAPPDATA% on Windows).
    """
    chosen = root or os.environ.get("NATGRAD_DATA")
    return Path(chosen).expanduser() if chosen else _cache() / "natgrad"


def _cache() -> Path:
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return Path(local) if local else Path.home() / "AppData" / "Local"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def find_folder(candidates: Iterable[Path], marker: str, advice: str) -> Path:
    """The first folder that holds a file whose name starts with `marker`.

    Raises:
        DataError: none does; it lists the folders and gives the advice.
    """
    folders = list(candidates)
    for folder in folders:
        if folder.is_dir() and next(folder.glob(f"{marker}*"), None) is not None:
            return folder
    searched = "".join(f"\n  {f}" for f in folders)
    raise DataError(f"No file {marker} in any of these folders:{searched}\n{advice}")
