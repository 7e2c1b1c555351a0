"""Files that are there entirely or not at all, whenever a process ends."""

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a file so that after a crash it is there entirely, or not at all."""
    fresh = path.with_name(f"{path.name}.partial")
    with fresh.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder last."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
