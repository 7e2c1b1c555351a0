"""One process at a time in a folder.

Note [Locks]
    `flock` on the file ``lock`` ends with the process that holds it: on one machine, a
    lock that can be taken was given back, or left by a process that is gone. Some
    network disks keep flock to each machine. So the file says which process of which
    machine holds it, and the holder touches it every few seconds; one of another
    machine that was touched lately counts as held, an older one as left behind.
"""

import contextlib
import fcntl
import json
import os
import socket
import threading
import time
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from natgrad_lab.errors import UserError
from natgrad_lab.schema import SchemaError, build

NAME = "lock"
TOUCH_SECONDS = 10.0
SILENT_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Owner:
    """Who holds a lock. ``launch`` is the same in all restarts by one launcher."""

    host: str
    process: int
    since: str
    launch: str = ""

    def __str__(self) -> str:
        return f"process {self.process} on {self.host} (since {self.since})"


class Lock:
    """A folder's lock, taken on construction; `release` gives it back.

    Args:
        folder: made, if it is not there; removed again if it is empty on release.
        launch: a lock of an earlier start of the same launch is taken over.

    Raises:
        UserError: somebody has it. The message names host and process.
    """

    def __init__(self, folder: Path, launch: str = "") -> None:
        self._folder, self._path = folder, folder / NAME
        self._made = _absent(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._handle = self._take(launch)
        sign(self._handle, launch)
        self._released = threading.Event()
        threading.Thread(target=self._touch, name="lock", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def release(self) -> None:
        """Let others in; a folder that was made for the lock and is empty goes too."""
        self._released.set()
        with contextlib.suppress(OSError):
            self._path.unlink()
        os.close(self._handle)
        with contextlib.suppress(OSError):  # not empty
            for each in self._made:
                each.rmdir()

    def _take(self, launch: str) -> int:
        while True:
            handle = os.open(self._path, os.O_CREAT | os.O_RDWR, 0o644)
            try:
                self._refuse(handle, launch)
                if _same(handle, self._path):
                    return handle
            except BaseException:
                os.close(handle)
                raise
            os.close(handle)  # its last holder has just removed the file: once more

    def _refuse(self, handle: int, launch: str) -> None:
        """Raise if somebody is in the folder."""
        free, owner = _flock(handle), _read(handle)
        if not _is_free(handle, free, owner, launch):
            raise UserError(
                f"{self._folder} is in use by {owner or 'another process'}. Wait until "
                "it has ended, or stop it."
            )

    def _touch(self) -> None:
        while not self._released.wait(TOUCH_SECONDS):
            with contextlib.suppress(OSError):
                os.utime(self._path)


def try_flock(handle: int) -> bool:
    """Take the lock of an open file if nobody has it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _flock(handle: int) -> bool | None:
    """`try_flock`; None on disks that have no such locks."""
    try:
        return try_flock(handle)
    except OSError:
        return None


def _is_free(handle: int, free: bool | None, owner: Owner | None, launch: str) -> bool:
    """Whether nobody has a lock, or only who is gone; ``free`` is what flock says."""
    if free is False:
        return False
    if owner is None or (launch and owner.launch == launch):
        return True
    if owner.host == socket.gethostname():
        return bool(free) or not _lives(owner.process)
    return time.time() - os.fstat(handle).st_mtime > SILENT_SECONDS


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        pass
    return True


def sign(handle: int, launch: str = "") -> None:
    """Write into a lock's file who holds it."""
    now = datetime.now().isoformat(" ", "seconds")
    owner = Owner(
        host=socket.gethostname(), process=os.getpid(), since=now, launch=launch
    )
    with contextlib.suppress(OSError):  # a full disk: others are then told no name
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps(asdict(owner)).encode(), 0)


def _read(handle: int) -> Owner | None:
    try:
        return build(Owner, json.loads(os.pread(handle, 10_000, 0)))
    except (ValueError, RecursionError, SchemaError):
        return None


def _same(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _absent(folder: Path) -> list[Path]:
    """The folder and those above it that are not there, innermost first."""
    return [each for each in (folder, *folder.parents) if not each.exists()]
