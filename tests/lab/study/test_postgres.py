"""The same study on a real PostgreSQL server, started here on loopback."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.study_kills import differences, run_study
from tests.lab.study.made import tiny
from tests.lab.study.postgres import MissingError, Server, postgres

from natgrad_lab.study.ledger import Ledger
from natgrad_lab.study.points import make_plan
from natgrad_lab.study.status import read_status
from natgrad_lab.study.storage import Storage, StorageError


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    """A server of its own for this file."""
    try:
        with postgres() as found:
            yield found
    except MissingError as missing:
        pytest.skip(str(missing))


@pytest.fixture
def server(running: Server) -> str:
    """The address of its database."""
    return running.address


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(900)
def test_two_workers_one_killed_and_the_numbers_are_sqlite_s(
    server: str, trained: tuple[Ledger, Path], tmp_path: Path
) -> None:
    hit = run_study(
        tiny(), server, tmp_path, kills=2, pause=(0.0, 0.1), seconds=200, saved=True
    )
    calm = {x.user_attrs["key"]: x.user_attrs["curve"] for x in trained[0].trials()}
    assert (hit.rows, hit.kills, hit.astray) == (6, 2, ())
    assert hit.resumed >= 1
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
