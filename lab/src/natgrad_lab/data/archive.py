"""Unpack an archive that is not trusted."""

import shutil
import tarfile
import tempfile
from pathlib import Path, PurePosixPath

from natgrad_lab.data.folders import DataError

MAX_BYTES = 2**30
MAX_FILES = 10_000


def extract(
    archive: Path,
    folder: Path,
    *,
    max_bytes: int = MAX_BYTES,
    max_files: int = MAX_FILES,
) -> None:
    """Unpack a tar archive into a folder: plain files and folders only.

    Either everything arrives or nothing does.

    Args:
        archive: the file, compressed or not.
        folder: made if missing; files already in it are replaced.
        max_bytes: most that the files may have together.
        max_files: most members the archive may have.

    Raises:
        DataError: it is damaged or too large, or a member is a link or a device, or
            would land outside of the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".unpacking-") as name:
        _unpack(archive, Path(name), max_bytes, max_files)
        for item in Path(name).iterdir():
            _replace(item, folder / item.name)


def _unpack(archive: Path, folder: Path, max_bytes: int, max_files: int) -> None:
    total = 0
    try:
        with tarfile.open(archive) as tar:
            for number, member in enumerate(tar, start=1):
                total += member.size
                if number > max_files:
                    raise DataError(f"{archive} has more than {max_files:,} members.")
                if total > max_bytes:
                    raise DataError(f"{archive} unpacks to over {max_bytes:,} bytes.")
                _write(tar, member, folder / _inside(archive, member))
    except (tarfile.TarError, EOFError, OSError) as error:
        reason = str(error).split("\n")[0].rstrip(":")
        raise DataError(
            f"{archive} cannot be unpacked ({reason}). Delete it and get it again."
        ) from error


def _inside(archive: Path, member: tarfile.TarInfo) -> PurePosixPath:
    path = PurePosixPath(member.name)
    # a backslash or a drive means another place on Windows
    strange = any(part == ".." or "\\" in part or ":" in part for part in path.parts)
    if path.is_absolute() or strange:
        raise DataError(f"{archive} is unsafe: {member.name!r} is outside the folder.")
    if not (member.isfile() or member.isdir()):
        raise DataError(f"{archive} is unsafe: {member.name!r} is not a plain file.")
    return path


def _write(tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    if member.isdir():
        path.mkdir(parents=True, exist_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    source = tar.extractfile(member)
    assert source is not None
    with source, path.open("wb") as target:
        shutil.copyfileobj(source, target)


def _replace(new: Path, old: Path) -> None:
    if old.is_dir() and not old.is_symlink():
        shutil.rmtree(old)
    new.replace(old)
