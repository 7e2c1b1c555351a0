"""The same study on a real PostgreSQL server, started here on loopback."""

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.study_kills import differences, run_study
from tests.lab.study.made import tiny

from natgrad_lab.study.ledger import Ledger
from natgrad_lab.study.points import make_plan
from natgrad_lab.study.status import read_status
from natgrad_lab.study.storage import Storage, StorageError


def programs() -> Path | None:
    """The folder of initdb and pg_ctl: on the path, or where Debian puts it."""
    found = shutil.which("initdb")
    if found:
        return Path(found).resolve().parent
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return versions[-1].parent if versions else None


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of a database on a new server."""
    where = programs()
    if where is None:
        pytest.skip("PostgreSQL is not installed (Debian: postgresql)")
    prefix = []
    if os.getuid() == 0:  # PostgreSQL refuses to run as root
        if not shutil.which("runuser"):
            pytest.skip("PostgreSQL needs a user that is not root")
        prefix = ["runuser", "-u", "postgres", "--"]
    base = Path(tempfile.mkdtemp(prefix="natgrad-postgres-"))
    if prefix:
        shutil.chown(base, "postgres")
    port, log = free_port(), base / "log"

    def run(*command: str) -> None:
        done = subprocess.run(
            [*prefix, *command], cwd=base, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr

    initdb, control = str(where / "initdb"), str(where / "pg_ctl")
    data = ["-D", str(base / "data")]
    run(initdb, *data, "-U", "natgrad", "-A", "trust", "--no-sync")
    options = f"-p {port} -c listen_addresses=127.0.0.1 -c fsync=off -k {base}"
    run(control, *data, "-l", str(log), "-o", options, "-w", "start")
    try:
        yield f"postgresql://natgrad@127.0.0.1:{port}/postgres"
    finally:
        run(control, *data, "-m", "immediate", "stop")
        shutil.rmtree(base)


@pytest.mark.slow
@pytest.mark.processes
def test_two_workers_one_killed_and_the_numbers_are_sqlite_s(
    server: str, trained: tuple[Ledger, Path], tmp_path: Path
) -> None:
    hit = run_study(tiny(), server, tmp_path, kills=1, pause=(0.0, 0.2), seconds=200)
    calm = {x.user_attrs["key"]: x.user_attrs["curve"] for x in trained[0].trials()}
    assert (hit.rows, hit.kills, hit.from_start) == (6, 1, 0)
    assert differences(calm, hit.curves) == []
    status = read_status(Ledger(Storage(server), "tiny"))
    assert (status.ended, status.total) == (6, 6)


def test_the_lock_of_a_study_is_exclusive_and_dies_with_its_session(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = Storage(server), Storage(server)
    monkeypatch.setattr("natgrad_lab.study.storage._wait.__defaults__", (0.3,))
    with one.lock("a"):
        with pytest.raises(StorageError, match="study a"), two.lock("a"):
            pass
        with two.lock("b"):
            pass
    with two.lock("a"):
        two.rdb.engine.dispose()
    with one.lock("a"):
        pass


def test_heartbeats_are_compared_in_one_time_zone(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = tiny(name="zones")
    plan = make_plan(spec)
    monkeypatch.setenv("PGTZ", "Asia/Tokyo")
    ledger = Ledger.plan(Storage(server), spec, plan)
    claim = ledger.claim(plan, tmp_path / "here")
    monkeypatch.setenv("PGTZ", "America/New_York")
    other = Ledger(Storage(server, grace=60), "zones")
    assert claim is not None
    assert claim.trial_id not in other.storage.rdb._get_stale_trial_ids(other.id)
    soon = Ledger(Storage(server, grace=1), "zones")
    with soon.storage.rdb.engine.begin() as connection:
        old = "update trial_heartbeats set heartbeat = heartbeat - interval '1 minute'"
        connection.exec_driver_sql(old)
    assert claim.trial_id in soon.storage.rdb._get_stale_trial_ids(soon.id)


def test_a_wrong_database_is_said(server: str) -> None:
    with pytest.raises(StorageError, match='database "nothing" does not exist'):
        Storage(server.replace("/postgres", "/nothing"))
