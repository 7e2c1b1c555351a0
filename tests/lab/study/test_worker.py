"""Whole trials on digits: divergence, interruption, kill -9, full disks."""

import contextlib
import errno
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.study_kills import Kill, differences, run_study, strays
from optuna.trial import TrialState
from tests.lab.study.made import one, tiny

from natgrad.math.inverse import InverseError
from natgrad_lab.cli import main
from natgrad_lab.errors import UserError
from natgrad_lab.study import worker as workers
from natgrad_lab.study.curves import from_plain
from natgrad_lab.study.ledger import Claim, Ledger
from natgrad_lab.study.points import make_plan
from natgrad_lab.study.reading import value_at
from natgrad_lab.study.spec import Budget, Method
from natgrad_lab.study.storage import Storage, StorageError
from natgrad_lab.study.trial import TrialTrainer, latest_step, train
from natgrad_lab.study.worker import run_claim, work


def plan_in(folder: Path, **changes: object) -> tuple[Ledger, dict]:
    spec = tiny(**changes)
    plan = make_plan(spec)
    storage = Storage(f"sqlite:///{folder}/study.db", create=True)
    return Ledger.plan(storage, spec, plan), plan


SGD = {"sgd": Method(lr=one(0.1), momentum=one(0.9))}


def test_a_study_ends_with_failures_counted(trained: tuple[Ledger, Path]) -> None:
    ledger, folder = trained
    rows = ledger.trials()
    for row in rows:
        diverges = row.params["lr"] > 1
        assert row.state == (TrialState.FAIL if diverges else TrialState.COMPLETE)
        assert row.user_attrs["starts"] == [0]
        steps = row.user_attrs["curve"]["steps"]
        assert diverges or steps[-1] == -(-2 * 1437 // row.params["batch"])
        assert not (folder / row.user_attrs["key"] / "checkpoints").exists()
    ended = [each for each in rows if each.params["lr"] > 1]
    assert len(ended) == 2
    assert max(len(each.user_attrs["curve"]["steps"]) for each in ended) <= 2


def test_curves_begin_before_training(trained: tuple[Ledger, Path]) -> None:
    ledger, _ = trained
    for row in ledger.trials():
        curve = from_plain(row.user_attrs["curve"])
        assert (curve.steps[0], curve.epochs[0], curve.cpu_seconds[0]) == (0, 0, 0)
        assert curve.accuracies[0] < 30  # ten classes, nothing learned
        assert curve.losses[0] == pytest.approx(math.log(10), rel=0.2)
        assert value_at(curve, "loss", step=0) == curve.losses[0]


def test_an_interrupted_trial_goes_on_from_its_checkpoint(
    trained: tuple[Ledger, Path], tmp_path: Path
) -> None:
    ledger, plan = plan_in(tmp_path, batches=(64,), methods=SGD)
    claim = ledger.claim(plan, tmp_path)
    assert claim is not None

    def stop_at_20(trainer: object, step: int) -> None:
        def watch() -> None:
            while trainer.step < 20:  # type: ignore[attr-defined]
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=watch).start()

    outcome = train(claim.planned, claim.folder, stop_at_20)
    assert outcome.curve is None
    assert latest_step(claim.folder) >= 20
    claim.drop()
    assert work(ledger, tmp_path, say=lambda line: None).done == 1
    (row,) = ledger.trials()
    assert row.user_attrs["starts"][0] >= 20
    whole = {x.user_attrs["key"]: x.user_attrs["curve"] for x in trained[0].trials()}
    key = row.user_attrs["key"]
    assert not differences({key: whole[key]}, {key: row.user_attrs["curve"]})


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(900)
def test_workers_may_be_killed_at_any_moment(
    trained: tuple[Ledger, Path], tmp_path: Path
) -> None:
    address = f"sqlite:///{tmp_path}/study.db"
    hit = run_study(
        tiny(), address, tmp_path, kills=3, pause=(0.0, 0.1), seconds=200, saved=True
    )
    calm = {x.user_attrs["key"]: x.user_attrs["curve"] for x in trained[0].trials()}
    assert hit.kills == 3
    assert hit.resumed >= 1
    assert hit.rows == len(hit.curves) == 6
    assert differences(calm, hit.curves) == []
    assert hit.astray == ()


def test_attempts_that_begin_elsewhere_than_at_a_checkpoint_are_seen() -> None:
    left = [Kill(key="a", attempt=1, step=9), Kill(key="a", attempt=2, step=18)]
    assert strays({"a": [0, 9, 18], "b": [0]}, left) == []
    assert strays({"a": [0, 0, 0]}, left) == [
        "a, attempt 1: began at 0, not 9",
        "a, attempt 2: began at 0, not 18",
    ]
    assert strays({"a": [0, 9, 18, 18]}, left) == [
        "a, attempt 3: began at 18, not None"
    ]
    assert strays({"b": [5]}, left) == ["b, attempt 0: began at 5, not 0"]
    early = [Kill(key="a", attempt=0, step=0)]  # taken, but not begun
    assert strays({"a": [0]}, early) == []


def test_curvature_that_has_no_inverse_is_divergence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, _ = plan_in(tmp_path, batches=(64,), methods=SGD)
    real = TrialTrainer._one_step

    def fail(self: TrialTrainer) -> None:
        if self.step == 30:
            raise InverseError("no inverse")
        real(self)

    monkeypatch.setattr(TrialTrainer, "_one_step", fail)
    assert work(ledger, tmp_path, say=lambda line: None).diverged == 1
    (row,) = ledger.trials()
    assert row.state == TrialState.FAIL
    assert row.user_attrs["curve"]["steps"] == [0, 23]


def test_a_damaged_checkpoint_starts_the_trial_anew(tmp_path: Path) -> None:
    ledger, plan = plan_in(tmp_path, batches=(64,), methods=SGD)
    claim = ledger.claim(plan, tmp_path)
    assert claim is not None
    broken = claim.folder / "checkpoints" / "step-00000020"
    broken.mkdir(parents=True)
    (broken / "rank-0.pt").write_bytes(b"half a file")
    (claim.folder / "metrics.jsonl").write_text('{"kind": "tra')
    with pytest.warns(UserWarning, match="starts over"):
        curve = run_claim(ledger, claim, say=lambda line: None)
    assert curve is not None
    assert curve.steps[-1] == 45


def test_an_error_gives_the_trial_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, _plan = plan_in(tmp_path, batches=(64,), methods=SGD)

    def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(workers, "train", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        work(ledger, tmp_path, say=lambda line: None)
    assert [each.state for each in ledger.trials()] == [TrialState.WAITING]


def test_a_storage_lost_during_training_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, plan = plan_in(tmp_path, batches=(64,), methods=SGD)
    monkeypatch.setattr(workers, "PATIENCE_SECONDS", 0.3)
    claim = ledger.claim(plan, tmp_path)
    assert claim is not None
    database, away = tmp_path / "study.db", tmp_path / "away.db"
    real = workers.train

    def lose(*arguments: object) -> object:
        outcome = real(*arguments)  # type: ignore[arg-type]
        ledger.storage.close()
        database.rename(away)
        database.mkdir()  # what cannot be opened as a file
        return outcome

    monkeypatch.setattr(workers, "train", lose)
    with pytest.raises(StorageError, match="Nothing is lost"):
        run_claim(ledger, claim, say=lambda line: None)
    database.rmdir()
    away.rename(database)
    monkeypatch.setattr(workers, "train", real)
    began = latest_step(claim.folder)
    assert began == 45
    assert work(ledger, tmp_path, say=lambda line: None).done == 1
    (row,) = ledger.trials()
    assert row.user_attrs["starts"] == [0, 45]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("cannot mount a small file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.filterwarnings("ignore:Checkpoint", "ignore:.*cannot be written")
def test_a_full_disk_is_said_and_nothing_is_lost(
    tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    longer = Budget(kind="epochs", epochs=6.0)
    ledger, _ = plan_in(tmp_path, batches=(64,), methods=SGD, budget=longer)
    ballast = small_disk / "ballast"
    real = Ledger.started

    def fill_the_disk(self: Ledger, claim: Claim, step: int) -> None:
        real(self, claim, step)
        if not step:
            trainer = threading.Thread(target=fill, args=(claim.folder, ballast))
            trainer.start()

    monkeypatch.setattr(Ledger, "started", fill_the_disk)
    with pytest.raises(UserError, match="No space left on the disk"):
        work(ledger, small_disk, say=lambda line: None)
    assert [each.state for each in ledger.trials()] == [TrialState.WAITING]
    ballast.unlink()
    assert work(ledger, small_disk, say=lambda line: None).done == 1
    (row,) = ledger.trials()
    steps = row.user_attrs["curve"]["steps"]
    assert steps == sorted(set(steps))
    assert steps[-1] == 135
    assert row.user_attrs["starts"][1] > 0


@pytest.mark.parametrize("trained_first", [False, True])
def test_a_storage_on_a_full_disk_is_said_and_nothing_is_lost(
    tmp_path: Path,
    small_disk: Path,
    monkeypatch: pytest.MonkeyPatch,
    trained_first: bool,
) -> None:
    ledger, _ = plan_in(small_disk, batches=(64,), methods=SGD)
    monkeypatch.setattr(workers, "PATIENCE_SECONDS", 0.3)
    ballast, real = small_disk / "ballast", workers.train

    def then_fill(*arguments: Any) -> Any:
        outcome = real(*arguments)
        take_all_room(ballast)
        return outcome

    with monkeypatch.context() as patch:
        patch.setattr(workers, "train", then_fill)
        if not trained_first:
            take_all_room(ballast)
        with pytest.raises(StorageError, match=r"(full|disk I/O).*Nothing is lost"):
            work(ledger, tmp_path, say=lambda line: None)
    ballast.unlink()
    assert work(ledger, tmp_path, say=lambda line: None).done == 1
    (row,) = ledger.trials()
    assert row.state == TrialState.COMPLETE
    assert row.user_attrs["starts"] == ([0, 45] if trained_first else [0])
    ledger.storage.close()


def test_no_room_for_a_trial_s_folder_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, _ = plan_in(tmp_path, batches=(64,), methods=SGD)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Ledger, "_take", full)
    with pytest.raises(UserError, match="No space left on the disk of"):
        work(ledger, tmp_path, say=lambda line: None)


def test_a_storage_whose_folder_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file/studies cannot be made: Not a dir"):
        Storage(f"sqlite:///{tmp_path}/file/studies/study.db", create=True)


def test_records_with_a_hole_are_no_curve(tmp_path: Path) -> None:
    ledger, plan = plan_in(tmp_path, batches=(64,), methods=SGD)
    claim = ledger.claim(plan, tmp_path)
    assert claim is not None
    assert train(claim.planned, claim.folder, lambda *_: None).curve is not None
    path = claim.folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    assert '"train"' in lines[2]
    path.write_text("".join(lines[:2] + lines[3:]))
    with pytest.raises(UserError, match="have a hole"):
        train(claim.planned, claim.folder, lambda *_: None)
    assert latest_step(claim.folder) == 0
    assert train(claim.planned, claim.folder, lambda *_: None).curve is not None


def fill(folder: Path, ballast: Path) -> None:
    """Once there is a checkpoint, take all the room there is."""
    while not latest_step(folder):
        time.sleep(0.001)
    take_all_room(ballast)


def take_all_room(ballast: Path) -> None:
    """Fill the disk."""
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def test_a_study_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "quick.toml"
    file.write_text(
        'name = "quick"\nrecipe = "digits-sgd"\nbatches = [256]\n'
        "settings.model.width = 4\n[budget]\nepochs = 1\n"
        "[methods.sgd]\nlr = [0.1]\nmomentum = [0.9]\n"
    )
    assert main(["study", "run", str(file)]) == 0
    assert "1 trials, 1 to do" in capsys.readouterr().out
    assert main(["study", "run", str(file)]) == 0
    assert "1 trials, 0 to do" in capsys.readouterr().out
    assert main(["study", "status", str(file)]) == 0
    assert "every trial has ended" in capsys.readouterr().out
    assert main(["study", "work", "sqlite:///runs/studies/quick/study.db"]) == 0
    monkeypatch.setattr("natgrad_lab.study.report.charts", lambda results: [])
    assert main(["study", "report", str(file), "--out", "there"]) == 0
    assert "there/index.html" in capsys.readouterr().out
    shutil.copytree("runs/studies/quick", "away")
    assert main(["study", "report", str(file), "--folder", "away"]) == 0
    assert "away/report/index.html" in capsys.readouterr().out


def test_those_who_look_find_a_study_where_run_keeps_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plan_in(tmp_path / "elsewhere", batches=(64,), methods=SGD)
    file = tmp_path / "tiny.toml"
    file.write_text('name = "tiny"\n')
    address = f"sqlite:///{tmp_path}/elsewhere/study.db"
    for options in (["--folder", "elsewhere"], ["--storage", address]):
        assert main(["study", "status", str(file), *options]) == 0
        assert "0 of 1 trials" in capsys.readouterr().out
        assert main(["study", "report", str(file), *options]) == 2
        assert "nothing to report" in capsys.readouterr().err
    assert main(["study", "status", str(file)]) == 2
    assert "There is no storage" in capsys.readouterr().err
    assert main(["study", "status", address, "--storage", address]) == 2
    assert "not both" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["study", "walk"], "Unknown command 'study walk'"),
        (["study", "run", "no.toml"], "no.toml cannot be read"),
        (["study", "work"], "NATGRAD_STORAGE"),
        (["study", "work", "sqlite:///no/such.db"], "There is no storage no/such.db"),
        (["study", "status", "redis://x/y"], "Invalid storage"),
        (["study", "report", "postgresql://127.0.0.1:9/x"], "cannot be used"),
    ],
)
def test_what_is_wrong_is_said(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr().err
    assert said in printed
    assert "Traceback" not in printed


@pytest.mark.processes
def test_ctrl_c_stops_several_workers_and_the_study_goes_on(tmp_path: Path) -> None:
    long = tiny(budget=Budget(kind="epochs", epochs=500.0), methods=SGD)
    storage = Storage(f"sqlite:///{tmp_path}/study.db", create=True)
    ledger = Ledger.plan(storage, long, make_plan(long))
    file = tmp_path / "long.toml"
    file.write_text(
        'name = "tiny"\nrecipe = "digits-sgd"\nbatches = [64, 256]\ncheckpoints = 5\n'
        "settings.model.width = 4\n[budget]\nkind = 'epochs'\nepochs = 500\n"
        "[methods.sgd]\nlr = [0.1]\nmomentum = [0.9]\n"
    )
    command = [sys.executable, "-m", "natgrad_lab", "study", "run", str(file)]
    command += ["--workers", "2", "--folder", str(tmp_path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            deadline = time.monotonic() + 120
            while sum("starts" in x.user_attrs for x in ledger.trials()) < 2:
                assert time.monotonic() < deadline, "no worker began"
                assert process.poll() is None, process.communicate()
                time.sleep(0.2)
            time.sleep(1.0)
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()  # its workers end when they notice
    assert process.returncode == 130, errors
    assert "run the same command again" in errors
    assert [each.state for each in ledger.trials()] == [TrialState.WAITING] * 2
    assert all(latest_step(tmp_path / x.user_attrs["key"]) for x in ledger.trials())


def test_a_worker_does_not_outlive_its_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = Budget(kind="epochs", epochs=500.0)
    ledger, plan = plan_in(tmp_path, batches=(64,), methods=SGD, budget=long)
    claim = ledger.claim(plan, tmp_path)
    assert claim is not None
    monkeypatch.setattr(workers, "HEARTBEAT_SECONDS", 0.5)
    monkeypatch.setenv(workers.PARENT, str(os.getpid()))  # not our parent's number
    assert run_claim(ledger, claim, say=lambda line: None) is None
    assert [each.state for each in ledger.trials()] == [TrialState.WAITING]
    assert latest_step(claim.folder) > 0


def test_torchrun_is_not_for_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, _ = plan_in(tmp_path, batches=(64,), methods=SGD)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="worker is one process"):
        work(ledger, tmp_path, say=lambda line: None)
