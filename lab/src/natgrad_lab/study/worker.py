"""A worker: takes trials, trains them, records them, until none is left."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from optuna.exceptions import UpdateFinishedTrialError

from natgrad_lab.errors import UserError
from natgrad_lab.study.curves import Curve
from natgrad_lab.study.ledger import Claim, Ledger
from natgrad_lab.study.points import Planned, make_plan
from natgrad_lab.study.spec import StudySpec
from natgrad_lab.study.storage import HEARTBEAT_SECONDS, StorageError
from natgrad_lab.study.trial import forget, train
from natgrad_lab.train.files import full_disk_said
from natgrad_lab.train.loop import Trainer
from natgrad_lab.train.records import read_metrics

PATIENCE_SECONDS = 300.0
"""How long a worker tries to reach the storage again before it gives up."""
POLL_SECONDS = 2.0
"""Between two looks at trials that other workers have."""
PARENT = "NATGRAD_STUDY_PARENT"
"""Environment: the process whose end this worker does not outlive."""
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Tally:
    """What one worker did."""

    done: int = 0
    diverged: int = 0
    interrupted: bool = False


def work(ledger: Ledger, folder: Path, say: Say = print) -> Tally:
    """Work until every trial of the study is finished, by whomever, or a signal."""
    tasks = Tasks(ledger, folder)
    done = diverged = 0
    while True:
        claim = tasks.next()
        if claim is None:
            return Tally(done=done, diverged=diverged)
        curve = run_claim(ledger, claim, say)
        if curve is None:
            return Tally(done=done, diverged=diverged, interrupted=True)
        done, diverged = done + (not curve.diverged), diverged + curve.diverged


class Tasks:
    """The trials of a study, one at a time, as the specification is at that moment."""

    def __init__(self, ledger: Ledger, folder: Path) -> None:
        self._ledger, self._folder = ledger, folder
        self._spec: StudySpec | None = None
        self._plan: dict[str, Planned] = {}

    def next(self) -> Claim | None:
        """Take one; waits while others hold the last ones, in case they die."""
        storage = self._ledger.storage
        while True:
            claim = storage.patiently(self._claim, PATIENCE_SECONDS)
            if claim is not None:
                return claim
            left = storage.patiently(
                lambda: self._ledger.remaining(self._plan), PATIENCE_SECONDS
            )
            if not left:
                return None
            time.sleep(POLL_SECONDS)

    def _claim(self) -> Claim | None:
        spec = self._ledger.spec()
        if spec != self._spec:  # somebody ran the study with a changed file
            self._spec, self._plan = spec, make_plan(spec)
            self._compare()
        with full_disk_said(self._folder):
            return self._ledger.claim(self._plan, self._folder)

    def _compare(self) -> None:
        if self._ledger.keys() != set(self._plan):
            raise UserError(
                f"This natgrad makes other configurations of study {self._ledger.name} "
                "than the one that planned it. Use the same version, or plan again "
                "with `natgrad study run FILE`."
            )


def run_claim(ledger: Ledger, claim: Claim, say: Say = print) -> Curve | None:
    """Train one claimed trial and record it; None when it was interrupted."""
    try:
        with Pulse(ledger, claim) as pulse:
            outcome = train(claim.planned, claim.folder, pulse.started)
        if outcome.curve is None:
            _give_back(ledger, claim)
            return None
        _record(ledger, claim, outcome.curve)
        say(_line(claim, outcome.curve))
        return outcome.curve
    except StorageError:
        raise
    except BaseException:  # an error or a second Ctrl-C: somebody may go on at once
        _give_back(ledger, claim)
        raise
    finally:
        claim.drop()


def _record(ledger: Ledger, claim: Claim, curve: Curve) -> None:
    """End the trial in the storage, then drop its checkpoints, in this order."""
    storage = ledger.storage
    storage.patiently(lambda: ledger.finish(claim, curve), PATIENCE_SECONDS)
    forget(claim.folder)


def _give_back(ledger: Ledger, claim: Claim) -> None:
    # without the storage the free lock, or the missing heartbeat, says the same
    with contextlib.suppress(StorageError):
        ledger.release(claim)


def _line(claim: Claim, curve: Curve) -> str:
    label, again = claim.planned.point.label, ""
    if claim.attempt > 1:
        again = f" (attempt {claim.attempt})"
    if curve.diverged:
        return f"{label}: diverged{again}"
    best = max(curve.accuracies)
    return f"{label}: {best:.2f} % after {curve.steps[-1]} updates{again}"


class Pulse:
    """A thread that shows the storage that this worker lives, and how far it is.

    An unreachable storage does not disturb training: the next beat tries again.
    """

    def __init__(self, ledger: Ledger, claim: Claim) -> None:
        self._ledger, self._claim, self._every = ledger, claim, HEARTBEAT_SECONDS
        self._trainer: Trainer | None = None
        self._shown, self._first = -1, 0
        self._stopped = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Pulse":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def started(self, trainer: Trainer, step: int) -> None:
        """Training begins at a step."""
        self._trainer, self._first = trainer, step
        storage = self._ledger.storage
        storage.patiently(
            lambda: self._ledger.started(self._claim, step), PATIENCE_SECONDS
        )

    def _run(self) -> None:
        while not self._stop.wait(self._every):
            self._stop_orphan()
            with contextlib.suppress(StorageError, UpdateFinishedTrialError, OSError):
                self._beat()
        self._ledger.storage.rdb.remove_session()

    def _stop_orphan(self) -> None:
        """As Ctrl-C, once: the trial is saved and goes back."""
        trainer = self._trainer
        # before the first update nobody listens to the signal yet
        training = trainer is not None and trainer.step > self._first
        if training and not self._stopped and orphaned():
            self._stopped = True
            os.kill(os.getpid(), signal.SIGTERM)

    def _beat(self) -> None:
        self._ledger.beat(self._claim)
        trainer = self._trainer
        if trainer is None:
            return
        seen = self._news()
        self._ledger.progress(self._claim, trainer.step, trainer.total, seen)
        self._shown = max([self._shown, *seen])

    def _news(self) -> dict[int, float]:
        """Accuracies by step that the storage has not been shown."""
        path = self._claim.folder / "metrics.jsonl"
        records = read_metrics(path) if path.is_file() else []
        tests = [each for each in records if each["kind"] == "test"]
        return {
            each["step"]: each["accuracy"]
            for each in tests
            if each["step"] > self._shown
        }


def orphaned() -> bool:
    """Whether the `natgrad study run` that started this worker is gone."""
    parent = os.environ.get(PARENT)
    return parent is not None and os.getppid() != int(parent)


def default_folder(name: str) -> Path:
    """Where a study's runs are kept unless said otherwise."""
    return Path(os.environ.get("NATGRAD_STUDIES", "runs/studies")) / name
