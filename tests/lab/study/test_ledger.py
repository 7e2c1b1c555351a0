"""Claims without training: who may take what, and that a trial ends once."""

import os
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from io import StringIO
from pathlib import Path

import optuna
import pytest
from optuna.distributions import CategoricalDistribution
from optuna.exceptions import StorageInternalError
from optuna.trial import TrialState, create_trial
from rich.console import Console
from tests.lab.study.made import curve, one, tiny

from natgrad_lab.errors import UserError
from natgrad_lab.study.curves import thinned
from natgrad_lab.study.ledger import RANGES, Claim, Ledger
from natgrad_lab.study.points import Planned, make_plan
from natgrad_lab.study.reading import costs_to, speedups
from natgrad_lab.study.results import read_results
from natgrad_lab.study.spec import Budget, Method, Schedule, ScheduleName
from natgrad_lab.study.status import (
    duration,
    read_status,
    render,
    seconds_left,
    show_status,
)
from natgrad_lab.study.storage import Storage, StorageError, masked, parse_url

Study = tuple[Ledger, dict[str, Planned], Path]


@pytest.fixture(scope="module")
def plan() -> dict[str, Planned]:
    return make_plan(tiny())


@pytest.fixture
def study(tmp_path: Path, plan: dict[str, Planned]) -> Iterator[Study]:
    storage = Storage(f"sqlite:///{tmp_path}/study.db", create=True)
    yield Ledger.plan(storage, tiny(), plan), plan, tmp_path
    storage.close()


def take(study: Study) -> Claim:
    ledger, plan, folder = study
    claim = ledger.claim(plan, folder)
    assert claim is not None
    return claim


def older(claim: Claim, seconds: float) -> Claim:
    """The claim as if it had been taken so long ago."""
    return replace(claim, began=claim.began - seconds)


def states(ledger: Ledger) -> list[TrialState]:
    return [each.state for each in ledger.trials()]


def test_every_trial_is_taken_once_and_ends_once(study: Study) -> None:
    ledger, plan, folder = study
    claims = [take(study) for _ in plan]
    assert {claim.planned.key for claim in claims} == set(plan)
    assert ledger.claim(plan, folder) is None
    assert ledger.remaining(plan) == 6
    for claim in claims:
        assert ledger.finish(claim, curve([2.0, 1.0]))
        assert not ledger.finish(claim, curve([9.0]))
        claim.drop()
    assert ledger.remaining(plan) == 0
    assert states(ledger) == [TrialState.COMPLETE] * 6
    assert {each.value for each in ledger.trials()} == {90.0}
    assert ledger.trials()[0].intermediate_values == {10: 80.0, 20: 90.0}


def test_a_dead_worker_s_trial_is_taken_first_and_at_once(study: Study) -> None:
    ledger, _plan, _folder = study
    dead = take(study)
    ledger.started(dead, 0)
    alive = take(study)
    dead.drop()  # the kernel does this when a process dies
    again = take(study)
    assert again.planned.key == dead.planned.key
    assert (again.attempt, again.starts) == (2, (0,))
    assert alive.planned.key != dead.planned.key
    assert len(ledger.trials()) == 6


def test_another_machine_s_trial_is_taken_when_its_heart_stops(
    study: Study, tmp_path: Path
) -> None:
    ledger, plan, _folder = study
    first = take(study)
    elsewhere = tmp_path / "elsewhere"  # no common folder: only heartbeats tell
    others = [ledger.claim(plan, elsewhere) for _ in range(6)]
    assert [x.planned.key == first.planned.key for x in others if x] == [False] * 5
    impatient = Storage(ledger.storage.address, grace=1)
    old = "update trial_heartbeats set heartbeat = datetime('now', '-1 minute')"
    with impatient.rdb.engine.begin() as connection:
        connection.exec_driver_sql(f"{old} where trial_id = {first.trial_id}")
    stolen = Ledger(impatient).claim(plan, elsewhere)
    assert stolen is not None
    assert stolen.trial_id == first.trial_id
    assert ledger.finish(stolen, curve([1.0]))
    assert not ledger.finish(first, curve([2.0]))  # it was only slow
    assert len(ledger.trials()) == 6


def test_a_held_lock_is_life_whatever_the_heartbeat_says(study: Study) -> None:
    ledger, _plan, _folder = study
    claim = take(study)
    with ledger.storage.rdb.engine.begin() as connection:
        old = "update trial_heartbeats set heartbeat = datetime('now', '-1 day')"
        connection.exec_driver_sql(old)
    assert take(study).planned.key != claim.planned.key


@pytest.mark.parametrize("end", [True, False])
def test_a_trial_that_changes_between_two_looks(
    study: Study, end: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, plan, _ = study
    mine = take(study)
    rdb = ledger.storage.rdb
    before = rdb.get_all_trials(ledger.id, states=(TrialState.RUNNING,))
    if end:
        ledger.finish(mine, curve([1.0]))
    else:
        ledger.release(mine)
    mine.drop()
    with monkeypatch.context() as patch:
        patch.setattr(rdb, "get_all_trials", lambda *_, **__: list(before))
        claim = ledger.claim(plan, study[2])
    if end:
        assert claim is None
        return
    assert claim is not None
    assert rdb.get_trial(claim.trial_id).state == TrialState.RUNNING


def test_a_storage_that_fails_in_a_claim_leaves_no_lock(
    study: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, plan, folder = study

    def fail(*_: object) -> None:
        raise StorageInternalError("away")

    with monkeypatch.context() as patch:
        patch.setattr(ledger.storage.rdb, "record_heartbeat", fail)
        with pytest.raises(StorageError, match="away"):
            ledger.claim(plan, folder)
    assert [take(study).planned.key for _ in plan] == list(plan)


def test_an_interrupted_trial_goes_back(study: Study) -> None:
    ledger, _plan, _folder = study
    claim = take(study)
    ledger.release(claim)
    claim.drop()
    assert states(ledger) == [TrialState.WAITING] * 6
    assert take(study).planned.key == claim.planned.key


def test_a_diverged_trial_is_a_failure_not_an_error(study: Study) -> None:
    ledger, _, _ = study
    claim = take(study)
    assert ledger.finish(claim, curve([2.0], ending="diverged"))
    ended = [each for each in ledger.trials() if each.state.is_finished()]
    assert [each.state for each in ended] == [TrialState.FAIL]
    assert ended[0].user_attrs["ending"] == "diverged"


def test_new_grid_points_keep_what_is_done(study: Study) -> None:
    ledger, _plan, _folder = study
    claim = take(study)
    ledger.finish(claim, curve([2.0, 1.0]))
    larger = tiny(batches=(64, 128, 256))
    new = make_plan(larger)
    again = Ledger.plan(ledger.storage, larger, new)
    assert len(again.trials()) == 9
    assert again.remaining(new) == 8
    smaller = tiny(batches=(64,))
    Ledger.plan(ledger.storage, smaller, make_plan(smaller))
    assert len(again.trials()) == 9
    assert len(again.planned_trials()) == 3
    assert again.spec() == smaller


EVERY = {
    **tiny().methods,
    "spngd": Method(lr=one(0.1), damping=one(0.1), recipe="digits-spngd"),
    "polar": Method(lr=one(0.1), damping=one(1.0), recipe="digits-polar"),
}


def test_every_method_can_be_planned(tmp_path: Path) -> None:
    spec = tiny(methods=EVERY, schedule=Schedule(kinds=("scaled", "fixed")))
    plan = make_plan(spec)
    storage = Storage(f"sqlite:///{tmp_path}/study.db", create=True)
    ledger = Ledger.plan(storage, spec, plan)
    rows = ledger.planned_trials()
    assert len(rows) == len(plan)
    assert {x.user_attrs["method"] for x in rows} == set(EVERY)
    assert {x.user_attrs["style"] for x in rows if x.params.get("damping") == 1.0} == {
        "relative"
    }
    storage.close()


def test_a_storage_of_an_older_natgrad_grows(
    plan: dict[str, Planned], tmp_path: Path
) -> None:
    """Once method, style and schedule were categories, which Optuna never widens."""
    storage = Storage(f"sqlite:///{tmp_path}/study.db", create=True)
    study = optuna.create_study(study_name="tiny", storage=storage.rdb)
    old = next(each for each in plan.values() if each.point.method == "kfac")
    choices = {"method": ("sgd", "kfac", "spngd"), "style": ("normal", "approximated")}
    study.add_trial(
        create_trial(
            state=TrialState.WAITING,
            params={"method": "kfac", "style": "normal", "lr": old.point.lr},
            distributions={"lr": RANGES["lr"]}
            | {name: CategoricalDistribution(x) for name, x in choices.items()},
            user_attrs={"key": old.key, "point": asdict(old.point)},
        )
    )
    spec = tiny(methods=EVERY)
    ledger = Ledger.plan(storage, spec, make_plan(spec))
    assert len(ledger.planned_trials()) == 10
    row = next(x for x in ledger.trials() if x.user_attrs["key"] == old.key)
    assert row.params["method"] == "kfac"
    assert sum(each.total for each in read_status(ledger).rows) == 10
    storage.close()


def test_a_study_that_could_not_be_planned_says_what_it_is(
    plan: dict[str, Planned], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = Storage(f"sqlite:///{tmp_path}/study.db", create=True)

    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(optuna.Study, "add_trial", stopped)
        with pytest.raises(KeyboardInterrupt):
            Ledger.plan(storage, tiny(), plan)
    assert Ledger(storage).spec() == tiny()
    assert len(Ledger.plan(storage, tiny(), plan).planned_trials()) == 6
    storage.close()


def test_status_counts_and_guesses_the_time_left(study: Study) -> None:
    ledger, _plan, _ = study
    assert read_status(ledger).left is None
    done = take(study)
    ledger.finish(older(done, 1000.0), curve([2.0, 1.0]))
    running = take(study)
    ledger.progress(running, 3, 4, {1: 50.0})
    status = read_status(ledger)
    assert (status.ended, status.total) == (1, 6)
    assert status.running[0].step == 3
    assert status.running[0].worker.endswith(f":{os.getpid()}")
    assert sum(row.waiting for row in status.rows) == 4
    # the one at work has a quarter left, four wait, each taken for 1,000 s; one worker
    assert seconds_left(ledger.trials(), 1) == pytest.approx(250 + 4000, rel=0.1)
    assert max(row.best or 0 for row in status.rows) == 90.0


def test_the_dead_are_not_at_work(study: Study) -> None:
    ledger, _plan, _ = study
    done, dead, _alive = (take(study) for _ in range(3))
    ledger.finish(older(done, 1000.0), curve([2.0, 1.0]))
    ledger.progress(dead, 1, 2, {})
    with ledger.storage.rdb.engine.begin() as connection:
        old = "update trial_heartbeats set heartbeat = datetime('now', '-1 day')"
        connection.exec_driver_sql(f"{old} where trial_id = {dead.trial_id}")
    status = read_status(ledger)
    assert (len(status.running), status.lost) == (1, 1)
    assert sum(row.running for row in status.rows) == 1
    assert sum(row.waiting for row in status.rows) == 4
    # half of the dead one's, one that runs and three that wait: by the one at work
    assert status.left == pytest.approx(4500, rel=0.1)
    shown = Console(width=100, record=True, file=StringIO())
    shown.print(render(status))
    assert "worker is gone, to be taken up again: 1" in shown.export_text()


def test_a_trial_s_wall_time_is_that_of_all_its_attempts(study: Study) -> None:
    ledger, _plan, _ = study
    first = older(take(study), 1000.0)
    ledger.progress(first, 1, 2, {})  # the last that is heard of it
    first.drop()
    second = older(take(study), 200.0)
    ledger.release(second)
    second.drop()
    third = older(take(study), 30.0)
    assert third.attempt == 3
    assert third.planned.key == first.planned.key
    assert seconds_left(ledger.trials(), 1) is None
    ledger.finish(third, curve([2.0, 1.0]))
    row = next(x for x in ledger.trials() if x.state == TrialState.COMPLETE)
    assert row.user_attrs["wall"] == pytest.approx(1230, rel=0.02)


def test_the_live_table_ends_with_the_study(
    study: Study, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger, plan, _ = study
    claims = [take(study) for _ in plan]

    def one_more(seconds: float) -> None:
        ledger.finish(older(claims.pop(), 1000 * seconds), curve([2.0, 1.0]))

    monkeypatch.setattr("natgrad_lab.study.status.time.sleep", one_more)
    forced = partial(Console, force_terminal=True, width=100)
    monkeypatch.setattr("natgrad_lab.study.status.Console", forced)
    show_status(ledger, every=7.0, once=False)
    assert claims == []
    printed = capsys.readouterr().out
    assert "1 of 6 trials" in printed
    assert "6 of 6 trials" in printed
    assert "117 min (with 5 at work)" in printed


def test_durations_are_said_as_people_do() -> None:
    assert duration(45) == "45 s"
    assert duration(720) == "12 min"
    assert duration(12_000) == "3 h 20 min"


def test_a_curve_is_thinned_from_its_end() -> None:
    made = curve([1.0] * 50)
    found = thinned(made, 20)
    assert len(found) <= 20
    assert max(found) == 500


def test_nothing_to_report_is_said(study: Study) -> None:
    with pytest.raises(UserError, match="nothing to report"):
        read_results(study[0])


@pytest.mark.parametrize("kinds", [("scaled", "fixed"), ("fixed", "scaled")])
def test_a_trial_of_both_schedules_is_read_as_both(
    tmp_path: Path, kinds: tuple[ScheduleName, ...]
) -> None:
    spec = tiny(schedule=Schedule(kinds=kinds), budget=Budget(epochs=2.0))
    plan = make_plan(spec)
    assert len(plan) == 3 + 2 * 3  # at the base batch the schedules are one
    storage = Storage(f"sqlite:///{tmp_path}/study.db", create=True)
    ledger = Ledger.plan(storage, spec, plan)
    study = ledger, plan, tmp_path
    for _ in plan:
        claim = take(study)
        ledger.finish(claim, curve([2.0, 1.0]))
        claim.drop()
    results = read_results(ledger)
    assert len(results.single) == 9
    for schedule in kinds:
        found = results.of("sgd", schedule=schedule)
        assert sorted(each.batch for each in found) == [64, 64, 256, 256]
    (target,) = results.targets("loss")[-1:]
    counts = costs_to(results.of("kfac"), target)
    assert speedups(counts, results.base) == {64: 1.0, 256: 1.0}
    storage.close()


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("mysql://u:secret@h/d", r"mysql://u:\*\*\*@h/d.*Must be sqlite"),
        ("sqlite://", "Must be sqlite"),
        ("study.db", "Must be sqlite"),
    ],
)
def test_other_storages_are_refused(address: str, said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        parse_url(address)
    assert "secret" not in str(caught.value)


def test_a_server_that_does_not_answer_is_named_without_its_password() -> None:
    with pytest.raises(StorageError, match="cannot be used") as caught:
        Storage("postgresql://me:secret@127.0.0.1:9/none")
    assert "postgresql://me:***@127.0.0.1:9/none" in str(caught.value)
    assert "refused" in str(caught.value)
    assert "secret" not in str(caught.value)
    assert masked(parse_url("postgres://a:b@c/d")) == "postgresql://a:***@c/d"


def test_a_missing_file_is_not_made_by_those_who_only_look(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"no storage .*none\.db"):
        Storage(f"sqlite:///{tmp_path}/none.db")
    assert not (tmp_path / "none.db").exists()


def test_a_damaged_file_is_said(tmp_path: Path) -> None:
    (tmp_path / "study.db").write_bytes(b"no database at all" * 100)
    with pytest.raises(StorageError, match="not a database"):
        Storage(f"sqlite:///{tmp_path}/study.db")


def test_patience_ends_with_the_reason(study: Study) -> None:
    ledger, _, _ = study
    calls = []

    def fail() -> None:
        calls.append(1)
        raise StorageError("gone")

    with pytest.raises(StorageError, match="gone"):
        ledger.storage.patiently(fail, seconds=0.5)
    assert len(calls) >= 2
    assert ledger.storage.patiently(lambda: 3) == 3


def test_several_studies_in_one_storage(study: Study) -> None:
    ledger, plan, _ = study
    other = replace(tiny(), name="other")
    Ledger.plan(ledger.storage, other, plan)
    with pytest.raises(UserError, match=r"several studies.*other, tiny"):
        Ledger(ledger.storage)
    assert Ledger(ledger.storage, "other").spec() == other
