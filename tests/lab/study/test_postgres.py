"""The same study on a real PostgreSQL server, started here on loopback."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.study_kills import differences, run_study
from tests.lab.study.made import tiny
from tests.lab.study.postgres import MissingError, Server, postgres

from natgrad_lab.cli import main
from natgrad_lab.study import worker as workers
from natgrad_lab.study.ledger import Ledger
from natgrad_lab.study.points import make_plan
from natgrad_lab.study.status import read_status
from natgrad_lab.study.storage import Storage, StorageError
from natgrad_lab.study.worker import work


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


def test_joining_by_command(
    server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = tiny(name="joined", batches=(256,))
    Ledger.plan(Storage(server), spec, make_plan(spec))
    options = ["--name", "joined", "--folder", str(tmp_path)]
    assert main(["study", "work", server, *options]) == 0
    assert "3 of 3 ended, 1 diverged" in capsys.readouterr().out
    assert main(["study", "status", server, *options]) == 0
    assert "every trial has ended" in capsys.readouterr().out


class Outage:
    """Stops the server when a trial has been trained, before it is recorded.

    Args:
        running: the server.
        seconds: how long it stays away; None: until somebody starts it.
    """

    def __init__(self, running: Server, seconds: float | None) -> None:
        self._running, self._seconds, self._train = running, seconds, workers.train
        self.happened = False

    def train(self, *arguments: Any) -> Any:
        """In the place of `worker.train`."""
        outcome = self._train(*arguments)
        if not self.happened:
            self.happened = True
            self._running.stop()
            if self._seconds is not None:
                threading.Timer(self._seconds, self._running.start).start()
            time.sleep(0.5)  # heartbeats fail meanwhile
        return outcome


def outage(
    running: Server, patch: pytest.MonkeyPatch, seconds: float | None
) -> tuple[Ledger, Outage]:
    """A study whose server goes away in the middle."""
    spec = tiny(name=f"outage-{seconds}", batches=(256,))
    ledger = Ledger.plan(Storage(running.address), spec, make_plan(spec))
    found = Outage(running, seconds)
    patch.setattr(workers, "train", found.train)
    patch.setattr(workers, "HEARTBEAT_SECONDS", 0.1)
    return ledger, found


def test_a_server_that_restarts_is_waited_for(
    running: Server,
    trained: tuple[Ledger, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ledger, away = outage(running, monkeypatch, seconds=2.0)
    tally = work(ledger, tmp_path, say=lambda line: None)
    assert away.happened
    assert (tally.done, tally.diverged) == (2, 1)
    rows = {x.user_attrs["key"]: x.user_attrs for x in ledger.trials()}
    assert [each["starts"] for each in rows.values()] == [[0]] * 3
    calm = {x.user_attrs["key"]: x.user_attrs["curve"] for x in trained[0].trials()}
    same = {key: calm[key] for key in rows}
    assert differences(same, {key: x["curve"] for key, x in rows.items()}) == []


def test_a_server_that_stays_away_is_said_and_nothing_is_lost(
    running: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, _away = outage(running, monkeypatch, seconds=None)
    monkeypatch.setattr(workers, "PATIENCE_SECONDS", 1.0)
    try:
        with pytest.raises(StorageError, match=r"cannot be used.*Nothing is lost"):
            work(ledger, tmp_path, say=lambda line: None)
    finally:
        running.start()
    tally = work(ledger, tmp_path, say=lambda line: None)
    assert tally.done + tally.diverged == 3
    rows = [each.user_attrs for each in ledger.trials()]
    # one was trained, but not recorded: only that was left to do
    assert sorted(each["starts"] for each in rows) == [[0], [0], [0, 12]]
