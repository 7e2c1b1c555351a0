"""A real PostgreSQL server on loopback, for as long as somebody looks at it."""

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Generator, Sequence
from pathlib import Path


class MissingError(Exception):
    """Why there can be no server here."""


class Server:
    """A server that can be stopped and started again; its data stay.

    Args:
        base: an empty folder of its own.
        programs: where initdb and pg_ctl are.
        prefix: what makes commands run as a user that PostgreSQL accepts.
    """

    def __init__(self, base: Path, programs: Path, prefix: Sequence[str]) -> None:
        self._base, self._prefix, self._port = base, prefix, free_port()
        self._control = [str(programs / "pg_ctl"), "-D", str(base / "data")]
        options = ["-U", "natgrad", "-A", "trust", "--no-sync"]
        self._run(str(programs / "initdb"), "-D", str(base / "data"), *options)

    @property
    def address(self) -> str:
        """Of its only database."""
        return f"postgresql://natgrad@127.0.0.1:{self._port}/postgres"

    def start(self) -> None:
        """Returns when it takes connections."""
        options = f"-p {self._port} -c listen_addresses=127.0.0.1 -k {self._base}"
        log = ["-l", str(self._base / "log"), "-o", f"{options} -c fsync=off"]
        self._run(*self._control, *log, "-w", "start")

    def stop(self) -> None:
        """At once: whoever is connected is cut off."""
        self._run(*self._control, "-m", "immediate", "stop")

    def _run(self, *command: str) -> None:
        done = subprocess.run(
            [*self._prefix, *command],
            cwd=self._base,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(done.stdout + done.stderr)


@contextlib.contextmanager
def postgres() -> Generator[Server]:
    """A new server that runs; it and its data are gone afterwards."""
    where = programs()
    if where is None:
        raise MissingError("PostgreSQL is not installed (Debian: postgresql)")
    prefix: list[str] = []
    if os.getuid() == 0:  # PostgreSQL refuses to run as root
        if not shutil.which("runuser"):
            raise MissingError("PostgreSQL needs a user that is not root")
        prefix = ["runuser", "-u", "postgres", "--"]
    base = Path(tempfile.mkdtemp(prefix="natgrad-postgres-"))
    try:
        if prefix:
            shutil.chown(base, "postgres")
        server = Server(base, where, prefix)
        server.start()
        try:
            yield server
        finally:
            with contextlib.suppress(RuntimeError):  # it may be stopped already
                server.stop()
    finally:
        shutil.rmtree(base)


def programs() -> Path | None:
    """The folder of initdb and pg_ctl: on the path, or where Debian puts it."""
    found = shutil.which("initdb")
    if found:
        return Path(found).resolve().parent
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return versions[-1].parent if versions else None


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
