"""Optuna's storage: opening it, saying clearly why it cannot be, and one lock.

Note [One claim at a time]
    Workers take trials under a lock that dies with its holder: `flock` on a file beside
    an SQLite database, an advisory lock of the session in PostgreSQL. So whatever a
    worker does between two states of a trial, nobody sees the middle, and a worker that
    is killed there leaves the trial to be taken again.
"""

import contextlib
import hashlib
import os
import time
import warnings
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, TypeVar

import optuna
import sqlalchemy as sa
from optuna.exceptions import ExperimentalWarning, StorageInternalError
from optuna.storages import RDBStorage
from sqlalchemy import event, exc
from sqlalchemy.engine import URL, make_url

from natgrad_lab.errors import UserError
from natgrad_lab.locks import try_flock

T = TypeVar("T")
LEGAL = "sqlite:///FILE or postgresql://USER:PASSWORD@HOST/DATABASE"
HEARTBEAT_SECONDS = 15
GRACE_SECONDS = 90
LOCK_SECONDS = 300.0

optuna.logging.set_verbosity(optuna.logging.ERROR)


class StorageError(UserError):
    """The storage cannot be reached or refuses; the message says which and why."""


def parse_url(text: str) -> URL:
    """A storage's address, with the driver that natgrad installs."""
    try:
        url = make_url(text)
    except exc.ArgumentError:
        raise UserError(f"Invalid storage {text!r}. Must be {LEGAL}.") from None
    backend = url.get_backend_name()
    if backend in ("postgresql", "postgres"):
        return url.set(drivername="postgresql+psycopg")
    if backend != "sqlite" or not url.database:
        raise UserError(f"Invalid storage {masked(url)!r}. Must be {LEGAL}.")
    return url


def masked(url: URL) -> str:
    """The address without its password."""
    shown = url.set(drivername=url.get_backend_name())
    return shown.render_as_string(hide_password=True)


class Storage:
    """An open storage.

    Args:
        text: its address.
        create: make an SQLite file that is not there; otherwise it is an error.
        grace: seconds without heartbeat after which a trial's worker counts as dead.
    """

    def __init__(
        self, text: str, *, create: bool = False, grace: int = GRACE_SECONDS
    ) -> None:
        self.url = parse_url(text)
        self.grace = grace
        if self.url.get_backend_name() == "sqlite":
            self._prepare_file(create)
        with self.errors():
            self.rdb = self._open()

    @property
    def address(self) -> str:
        """The whole address, password included: for workers, not for people."""
        return self.url.render_as_string(hide_password=False)

    @property
    def file(self) -> Path | None:
        """The SQLite file; None with a server."""
        if self.url.get_backend_name() != "sqlite":
            return None
        assert self.url.database
        return Path(self.url.database)

    @contextlib.contextmanager
    def errors(self) -> Generator[None]:
        """Turn whatever the storage raises into a `StorageError`."""
        try:
            yield
        except (StorageInternalError, exc.SQLAlchemyError) as error:
            raise StorageError(self._explain(error)) from error

    def patiently(self, call: Callable[[], T], seconds: float = 60.0) -> T:
        """Call until it works: a server may restart, a file may be locked for a while.

        After ``seconds`` of failures the last `StorageError` is raised.
        """
        deadline, pause = time.monotonic() + seconds, 0.2
        while True:
            try:
                with self.errors():
                    return call()
            except StorageError:
                if time.monotonic() + pause > deadline:
                    raise
            time.sleep(pause)
            pause = min(5.0, 2 * pause)

    @contextlib.contextmanager
    def lock(self, name: str) -> Generator[None]:
        """Hold the study's lock. See Note [One claim at a time]."""
        held = self._file_lock() if self.file else self._server_lock(name)
        with self.errors(), held:
            yield

    def close(self) -> None:
        """Give connections back."""
        self.rdb.remove_session()
        self.rdb.engine.dispose()

    def _open(self) -> RDBStorage:
        options: dict[str, Any] = {"connect_args": {"timeout": 60}}
        if self.file is None:
            options = {"connect_args": {"connect_timeout": 10}, "pool_pre_ping": True}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            rdb = RDBStorage(
                self.address,
                engine_kwargs=options,
                heartbeat_interval=HEARTBEAT_SECONDS,
                grace_period=self.grace,
            )
        if self.file is None:
            event.listen(rdb.engine, "connect", _use_utc)
            rdb.engine.dispose()
        return rdb

    def _prepare_file(self, create: bool) -> None:
        path = self.file
        assert path is not None
        if create:
            with _opening(path.parent):
                path.parent.mkdir(parents=True, exist_ok=True)
        elif not path.is_file():
            raise StorageError(
                f"There is no storage {path}. Start the study with "
                "`natgrad study run FILE`."
            )

    def _explain(self, error: BaseException) -> str:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        lines = str(getattr(cause, "orig", None) or cause).strip().splitlines()
        reason = next(iter(lines), type(cause).__name__)
        return (
            f"The storage {masked(self.url)} cannot be used: {reason.rstrip('.')}. "
            "Nothing is lost: finished trials are recorded, the others go on from "
            "their checkpoints when it is back."
        )

    @contextlib.contextmanager
    def _file_lock(self) -> Generator[None]:
        assert self.file is not None
        with lock_file(self.file.with_name(f"{self.file.name}.lock"), LOCK_SECONDS):
            yield

    @contextlib.contextmanager
    def _server_lock(self, name: str) -> Generator[None]:
        digest = hashlib.sha256(f"natgrad study {name}".encode()).digest()
        number = {"number": int.from_bytes(digest[:8], "big", signed=True)}
        take = sa.text("select pg_try_advisory_lock(:number)")
        give = sa.text("select pg_advisory_unlock(:number)")
        engine = self.rdb.engine.execution_options(isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            _wait(lambda: bool(connection.scalar(take, number)), f"study {name}")
            try:
                yield
            finally:
                with contextlib.suppress(exc.SQLAlchemyError):
                    connection.execute(give, number)


def _use_utc(connection: Any, _: object) -> None:
    # heartbeats are compared as times without zone: one zone for everybody
    with connection.cursor() as cursor:
        cursor.execute("set time zone 'UTC'")
    connection.commit()


@contextlib.contextmanager
def lock_file(path: Path, seconds: float) -> Generator[None]:
    """Hold `flock` on a file, waiting up to ``seconds``."""
    with _opening(path):
        handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
    try:
        _wait(lambda: try_flock(handle), str(path), seconds)
        yield
    finally:
        os.close(handle)  # gives the lock back as well


@contextlib.contextmanager
def _opening(path: Path) -> Generator[None]:
    """A folder or file beside the storage that cannot be made is said like it."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path} cannot be made: {error.strerror}.") from error


def _wait(take: Callable[[], bool], what: str, seconds: float = LOCK_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not take():
        if time.monotonic() > deadline:
            raise StorageError(
                f"The lock of {what} was held for more than {seconds:g} s: a worker "
                "that holds it must have been stopped. End it and run again."
            )
        time.sleep(0.05)
