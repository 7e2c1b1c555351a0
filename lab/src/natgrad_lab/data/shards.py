"""Shards of small images: tar files as webdataset writes them, and where each image is.

``train-00012.tar`` has ``00049152.jpg`` and its class number ``00049152.cls``, and so
on. ``train-00012.npz`` says where in the tar file each image begins, so that any of
them can be read alone; it is written last, so a shard that has it is whole.
"""

import hashlib
import io
import os
import secrets
import tarfile
import threading
import zipfile
import zlib
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from natgrad_lab.data.folders import DataError

RECORD = np.dtype(
    [("offset", "<u8"), ("bytes", "<u4"), ("crc", "<u4"), ("label", "<i4")]
)
_BLOCK = 512


class Encoded(NamedTuple):
    """An image to be written: its bytes and its class."""

    data: bytes
    label: int


@dataclass(frozen=True, kw_only=True)
class Shard:
    """What is known of a whole shard.

    Attributes:
        records: where each image is, `RECORD`.
        size: bytes of the tar file.
        digest: of the names of the images it was made of, and of how it was made.
        total: sum of its images' pixels, or empty.
    """

    records: NDArray[np.void]
    size: int
    digest: str
    total: NDArray[np.uint32]


def path_of(folder: Path, split: str, number: int) -> Path:
    """A shard's tar file."""
    return folder / f"{split}-{number:05d}.tar"


def digest_of(names: Sequence[str], how: str) -> str:
    """Tells whether a shard was made of the same images in the same way."""
    text = "\n".join([how, *names]).encode()
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def write(path: Path, first: int, images: Iterator[Encoded]) -> tuple[Any, int]:
    """Write a tar file; returns its records and its size. `seal` makes it a shard.

    ``first`` is the number of its first image.
    """
    records: list[tuple[int, int, int, int]] = []
    with (
        whole(path) as file,
        tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar,
    ):
        for number, (data, label) in enumerate(images, start=first):
            offset = _add(tar, f"{number:08d}.jpg", data)
            records.append((offset, len(data), zlib.crc32(data), label))
            _add(tar, f"{number:08d}.cls", str(label).encode())
    return np.array(records, RECORD), path.stat().st_size


@contextmanager
def whole(path: Path) -> Generator[BinaryIO]:
    """A file that appears entirely or not at all, even if several processes write."""
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> int:
    """Append a file; where its bytes begin."""
    member = tarfile.TarInfo(name)
    member.size = len(data)
    offset = tar.offset + _BLOCK  # names are short: one block of header
    tar.addfile(member, io.BytesIO(data))
    return offset


def seal(path: Path, shard: Shard) -> None:
    """Say that a tar file is whole."""
    with whole(path.with_suffix(".npz")) as file:
        np.savez(
            file,
            records=shard.records,
            size=np.int64(shard.size),
            digest=np.array(shard.digest),
            total=shard.total,
        )


def known(path: Path) -> Shard | None:
    """What is known of a shard; None if it is not whole."""
    try:
        with np.load(path.with_suffix(".npz"), allow_pickle=False) as file:
            shard = Shard(
                records=file["records"],
                size=int(file["size"]),
                digest=str(file["digest"]),
                total=file["total"],
            )
        found = path.stat().st_size
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    return shard if found == shard.size else None


class Shards:
    """The images of a split, by number.

    Args:
        folder: where the shards are.
        split: the split's name.
        records: of all its images, `RECORD`.
        sizes: bytes of each tar file.
        each: images a shard.

    Raises:
        DataError: a shard is missing or cut short.
    """

    def __init__(
        self,
        folder: Path,
        split: str,
        records: NDArray[np.void],
        sizes: Sequence[int],
        each: int,
    ) -> None:
        self._paths = [path_of(folder, split, i) for i in range(len(sizes))]
        for path, size in zip(self._paths, sizes, strict=True):
            found = path.stat().st_size if path.is_file() else 0
            if found != size:
                raise DataError(
                    f"{path} has {found:,} bytes, not {size:,}. Write the cache again: "
                    "what is whole of it is kept."
                )
        self.records, self._each = records, each
        self._files: dict[int, int] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.records)

    def read(self, index: int) -> bytes:
        """An image's bytes."""
        number = index // self._each
        file = self._files.get(number)
        if file is None:
            file = self._open(number)
        place = self.records[index]
        return os.pread(file, int(place["bytes"]), int(place["offset"]))

    def name(self, index: int) -> str:
        """What to call an image in an error."""
        return f"{index:08d}.jpg in {self._paths[index // self._each]}"

    def is_right(self, index: int) -> bool:
        """Whether an image's bytes are those that were written."""
        return zlib.crc32(self.read(index)) == int(self.records[index]["crc"])

    def _open(self, number: int) -> int:
        with self._lock:
            if number not in self._files:
                self._files[number] = os.open(self._paths[number], os.O_RDONLY)
            return self._files[number]

    def __del__(self) -> None:
        for file in getattr(self, "_files", {}).values():
            os.close(file)
