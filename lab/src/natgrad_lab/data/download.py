"""Download a file: progress, resume, and a check of what arrived."""

import hashlib
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from urllib.parse import urlsplit

from natgrad_lab.data.folders import DataError

Progress = Callable[[str, int, int], None]
"""Told a file's name, the bytes that have arrived and the bytes there are."""

CHUNK = 2**18
TIMEOUT = 60.0


@dataclass(frozen=True, kw_only=True)
class RemoteFile:
    """A file to download.

    Args:
        url: where it is, http or https.
        sha256: its published hash, 64 hexadecimal digits.
        size: its size in bytes.
        unpack: whether it is an archive to unpack beside it.
        folder: where in the data folder it goes.
    """

    url: str
    sha256: str
    size: int
    unpack: bool = False
    folder: str = ""

    def __post_init__(self) -> None:
        if urlsplit(self.url).scheme not in ("http", "https"):
            raise ValueError(f"Invalid url={self.url!r}. Must be http or https.")
        if len(self.sha256) != 64:
            raise ValueError(f"Invalid sha256={self.sha256!r}. Must have 64 digits.")

    @property
    def name(self) -> str:
        """The file's own name."""
        return urlsplit(self.url).path.rsplit("/", 1)[-1]


def download(file: RemoteFile, folder: Path, progress: Progress | None = None) -> Path:
    """Bring a file into a folder, unless it is there and right already.

    What has arrived is kept in NAME.part; the next call asks only for the rest.

    Raises:
        DataError: it could not be had, is not all there, or has another hash.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file.name
    if path.is_file() and sha256(path) == file.sha256:
        return path
    part = path.with_name(path.name + ".part")
    if not part.is_file() or part.stat().st_size < file.size:
        _receive(file, part, progress)
    _check(file, part)
    part.replace(path)
    return path


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _receive(file: RemoteFile, part: Path, progress: Progress | None) -> None:
    have = part.stat().st_size if part.is_file() else 0
    request = urllib.request.Request(file.url, headers={"User-Agent": "natgrad"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
            # 206: the rest, as asked; 200: the server sends it all over again
            start = have if response.status == 206 else 0
            _write(response, part, start, file, progress)
    except urllib.error.HTTPError as error:
        if error.code == 416:  # the server's file ends before ours: ours is another
            part.unlink(missing_ok=True)
        raise DataError(_failure(file, f"the server says {error.code}")) from error
    except (OSError, HTTPException) as error:
        raise DataError(_failure(file, str(error))) from error


def _write(
    response: HTTPResponse,
    part: Path,
    start: int,
    file: RemoteFile,
    progress: Progress | None,
) -> None:
    done = start
    with part.open("ab" if start else "wb") as out:
        while chunk := response.read(CHUNK):
            out.write(chunk)
            done += len(chunk)
            if progress:
                progress(file.name, done, file.size)
            if done > file.size:
                return


def _check(file: RemoteFile, part: Path) -> None:
    size = part.stat().st_size
    if size < file.size:
        detail = f"{size:,} of {file.size:,} bytes arrived"
        raise DataError(_failure(file, detail))
    actual = sha256(part)
    if actual != file.sha256:
        part.unlink()
        raise DataError(
            f"{file.url} is not the file expected: its SHA-256 is {actual}, not "
            f"{file.sha256}. It was deleted. Try again, or from another network."
        )


def _failure(file: RemoteFile, detail: str) -> str:
    return (
        f"{file.name} could not be downloaded from {file.url}: {detail}. "
        "Run the same command again to go on from there."
    )
