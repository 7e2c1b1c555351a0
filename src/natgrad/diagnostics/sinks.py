"""Where the records of `watch` can go, besides any function of a dict.

Neither sink ends a run: what a full disk does not take is kept or left out, and one
warning says so.
"""

import errno
import json
import os
import warnings
from collections import deque
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

KEPT_BYTES = 64 * 2**20
"""How much a `JsonlSink` keeps in memory while its file cannot be written."""
FULL = (errno.ENOSPC, errno.EDQUOT)


class JsonlSink:
    """Appends records to a file, one JSON object a line, each at once.

    What a full disk does not take is kept, up to 64 MiB with the oldest dropped first,
    and written with a later record or by `close`.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._kept: deque[bytes] = deque()
        self._dropped = 0
        self._warned = False
        self._file: FileIO | None = None
        try:
            self._open()
        except OSError as error:
            if error.errno not in FULL:  # a wrong path is better known at once
                raise
            self._warn(error)

    def __call__(self, record: dict[str, Any]) -> None:
        self._kept.append(json.dumps(record).encode() + b"\n")
        self._flush()

    def close(self) -> None:
        """Write what is kept, if that is possible now, and close the file."""
        self._flush()
        lost = self._dropped + sum(line.strip() != b"" for line in self._kept)
        if lost:
            text = f"{lost} records are missing in {self._path}."
            warnings.warn(text, stacklevel=2)
        self._kept.clear()
        self._dropped = 0
        try:
            if self._file is not None:
                self._file.close()
        except OSError as error:  # networked disks may only now say that they are full
            self._warn(error)

    def _open(self) -> FileIO:
        if self._file is None:
            self._file = FileIO(self._path, "a+")
            # a crash may have cut the last line short: the next must not join it
            if not _ends_a_line(self._file):
                self._kept.appendleft(b"\n")
        return self._file

    def _flush(self) -> None:
        try:
            file = self._open()
            while self._kept:
                self._kept[0] = self._kept[0][file.write(self._kept[0]) :]
                if not self._kept[0]:
                    self._kept.popleft()
        except OSError as error:
            self._warn(error)
            self._trim()

    def _trim(self) -> None:
        size = sum(map(len, self._kept))
        while size > KEPT_BYTES and len(self._kept) > 1:
            # not the first, half of which may be in the file already
            size -= len(self._kept[1])
            del self._kept[1]
            self._dropped += 1

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            text = f"{self._path} cannot be written ({error.strerror}): records are "
            warnings.warn(text + "kept until it can.", stacklevel=4)


def _ends_a_line(file: FileIO) -> bool:
    if os.fstat(file.fileno()).st_size == 0:  # also what cannot be sought in
        return True
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"


class _ScalarWriter(Protocol):
    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any: ...


class TensorBoardSink:
    """Writes a scalar for each block and quantity: ``diagnostics/<quantity>/<block>``.

    ``writer`` is a ``torch.utils.tensorboard.SummaryWriter`` or has its ``add_scalar``.
    After an ``OSError`` of the writer, which then takes nothing any more, scalars are
    left out.
    """

    def __init__(self, writer: _ScalarWriter) -> None:
        self._writer: _ScalarWriter | None = writer

    def __call__(self, record: dict[str, Any]) -> None:
        if self._writer is None:
            return
        try:
            _add_scalars(self._writer, record)
        except OSError as error:
            self._writer = None
            text = f"TensorBoard's events cannot be written ({error}): "
            warnings.warn(text + "diagnostics are left out from here on.", stacklevel=2)


def _add_scalars(writer: _ScalarWriter, record: dict[str, Any]) -> None:
    for kind in ("blocks", "statistics"):
        for name, values in record[kind].items():
            for quantity, value in values.items():
                if isinstance(value, int | float):
                    tag = f"diagnostics/{quantity}/{name}"
                    writer.add_scalar(tag, value, record["step"])
