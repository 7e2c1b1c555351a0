"""Files that are there entirely or not at all, whenever a process ends."""

import contextlib
import errno
import os
from collections.abc import Generator
from pathlib import Path

from natgrad_lab.errors import UserError

FULL = (errno.ENOSPC, errno.EDQUOT)


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


@contextlib.contextmanager
def full_disk_said(folder: Path) -> Generator[None]:
    """A full disk of that folder as an error for people."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise no_space(folder) from error
        raise


def no_space(folder: Path) -> UserError:
    """What to say of a full disk."""
    return UserError(
        f"No space left on the disk of {folder}. Nothing is lost: make room and run "
        "the same command again."
    )
