"""The study in its storage: one Optuna trial a configuration, taken and ended once.

Note [One row a configuration]
    A configuration has one trial, known by its key. It is waiting, then
    running, then complete (or, when training diverged, failed). A worker that dies
    leaves it running; another takes over the same row, and goes on from the checkpoint.
    Optuna refuses to change a finished trial, so even two workers that both believe
    they own it end it once; training is deterministic, so either has the right numbers.
"""

import contextlib
import os
import socket
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import (
    BaseDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState, create_trial

from natgrad_lab import locks
from natgrad_lab.errors import UserError
from natgrad_lab.schema import build
from natgrad_lab.study.curves import Curve, thinned, to_plain
from natgrad_lab.study.points import Planned, Point, spec_to_plain
from natgrad_lab.study.spec import StudySpec, second_of
from natgrad_lab.study.storage import Storage

SHOWN = 20
"""Points of a finished curve that Optuna's own tools are shown."""
OPEN = (TrialState.WAITING, TrialState.RUNNING)
# Optuna wants one distribution a name, always: wide ones, so that grids can grow.
# Words have no wide one (a choice more is another distribution): they are attributes.
RANGES: dict[str, BaseDistribution] = {
    "batch": IntDistribution(1, 2**31 - 1),
    "lr": FloatDistribution(1e-30, 1e30, log=True),
    "momentum": FloatDistribution(0.0, 1.0),
    "damping": FloatDistribution(1e-30, 1e30, log=True),
    "seed": IntDistribution(0, 2**31 - 1),
}


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A trial this process has taken, and the lock on its folder."""

    trial_id: int
    planned: Planned
    folder: Path
    attempt: int
    starts: tuple[int, ...]
    handle: int
    spent: float = 0.0
    """Seconds of earlier attempts."""
    began: float = field(default_factory=time.monotonic)

    def wall(self) -> float:
        """Seconds of all attempts so far."""
        return self.spent + time.monotonic() - self.began

    def drop(self) -> None:
        """Give the folder's lock back."""
        os.close(self.handle)


class Ledger:
    """A study in its storage.

    Args:
        storage: where it is.
        name: the study; None: the only one there.
    """

    def __init__(self, storage: Storage, name: str | None = None) -> None:
        self.storage = storage
        with storage.errors():
            self.study = optuna.load_study(
                study_name=name or _only(storage), storage=storage.rdb
            )
            self.id = storage.rdb.get_study_id_from_name(self.study.study_name)
        self.name = self.study.study_name

    @classmethod
    def plan(
        cls, storage: Storage, spec: StudySpec, plan: dict[str, Planned]
    ) -> "Ledger":
        """Open or make the study, and add the trials it does not have yet."""
        with storage.lock(spec.name):
            optuna.create_study(
                study_name=spec.name,
                storage=storage.rdb,
                direction="maximize",
                load_if_exists=True,
            )
            ledger = cls(storage, spec.name)
            # before the trials: whatever stops us, the study says what it is
            ledger.study.set_user_attr("keys", list(plan))
            ledger.study.set_user_attr("spec", spec_to_plain(spec))
            known = {each.user_attrs["key"] for each in ledger.trials()}
            for key, planned in plan.items():
                if key not in known:
                    ledger.study.add_trial(_waiting(planned))
        return ledger

    def spec(self) -> StudySpec:
        """The specification as last planned."""
        with self.storage.errors():
            attributes = self.study.user_attrs
        if "spec" not in attributes:
            raise UserError(
                f"The Optuna study {self.name!r} was not made by natgrad: it has no "
                "specification. Start one with `natgrad study run FILE`."
            )
        return build(StudySpec, attributes["spec"], "")

    def keys(self) -> frozenset[str]:
        """The trials of the specification as last planned."""
        with self.storage.errors():
            return frozenset(self.study.user_attrs.get("keys", ()))

    def trials(self) -> list[FrozenTrial]:
        """Every trial; finished ones are read from the storage once only."""
        with self.storage.errors():
            found = self.study.get_trials(deepcopy=False)
        return [each for each in found if "key" in each.user_attrs]

    def lost(self) -> frozenset[int]:
        """Trials that run, but whose worker has shown no life for the grace period."""
        with self.storage.errors():
            return frozenset(self.storage.rdb._get_stale_trial_ids(self.id))

    def planned_trials(self) -> list[FrozenTrial]:
        """The trials of the specification, without those it no longer has."""
        keys = self.keys()
        return [each for each in self.trials() if each.user_attrs["key"] in keys]

    def claim(self, plan: dict[str, Planned], folder: Path) -> Claim | None:
        """Take a trial: first one whose worker died, then one that waits.

        None when every trial is finished or in other hands; `remaining` tells which.
        """
        here = place(folder)
        with self.storage.lock(self.name):
            rdb = self.storage.rdb
            rows = rdb.get_all_trials(self.id, deepcopy=False, states=OPEN)
            stale = set(rdb._get_stale_trial_ids(self.id))
            rows = [each for each in rows if each.user_attrs.get("key") in plan]
            rows.sort(key=lambda each: each.state != TrialState.RUNNING)
            for row in rows:
                if not _takeable(row, here, stale):
                    continue
                planned = plan[row.user_attrs["key"]]
                claim = self._take(row, planned, folder / planned.key, here)
                if claim is not None:
                    return claim
        return None

    def remaining(self, plan: dict[str, Planned]) -> int:
        """Trials of the plan that are not finished."""
        with self.storage.errors():
            rows = self.storage.rdb.get_all_trials(self.id, deepcopy=False, states=OPEN)
        return sum(each.user_attrs.get("key") in plan for each in rows)

    def started(self, claim: Claim, step: int) -> None:
        """Write down from which step this attempt trains."""
        self._set(claim, "starts", [*claim.starts, step])

    def beat(self, claim: Claim) -> None:
        """Say that this worker lives."""
        with self.storage.errors():
            self.storage.rdb.record_heartbeat(claim.trial_id)

    def progress(
        self, claim: Claim, step: int, total: int, seen: dict[int, float]
    ) -> None:
        """Show how far a running trial is, and its newest accuracies by step."""
        self._set(claim, "progress", [step, total])
        self._set(claim, "wall", claim.wall())
        self._show(claim, seen)

    def release(self, claim: Claim) -> None:
        """Put an unfinished trial back for anybody to go on with."""
        with self.storage.errors(), contextlib.suppress(UpdateFinishedTrialError):
            rdb = self.storage.rdb
            rdb.set_trial_user_attr(claim.trial_id, "wall", claim.wall())
            rdb.set_trial_state_values(claim.trial_id, state=TrialState.WAITING)

    def finish(self, claim: Claim, curve: Curve) -> bool:
        """Record the curve and end the trial; False when it had ended already."""
        best = max(curve.accuracies, default=None)
        facts: dict[str, Any] = {"curve": to_plain(curve), "ending": curve.ending}
        facts["wall"] = claim.wall()
        facts |= {"steps": max(curve.steps, default=0), "data": claim.planned.data}
        state, values = TrialState.COMPLETE, None if best is None else [best]
        if curve.diverged:
            state, values = TrialState.FAIL, None
        try:
            for name, value in facts.items():
                self._set(claim, name, value)
            self._show(claim, thinned(curve, SHOWN))
            with self.storage.errors():
                rdb = self.storage.rdb
                rdb.set_trial_state_values(claim.trial_id, state=state, values=values)
        except UpdateFinishedTrialError:
            return False
        return True

    def _take(
        self, row: FrozenTrial, planned: Planned, folder: Path, here: str
    ) -> Claim | None:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / locks.NAME, os.O_CREAT | os.O_RDWR, 0o644)
        claim = None
        try:
            # else its worker lives, whatever its heartbeat says
            if locks.try_flock(handle):
                locks.sign(handle)
                claim = self._mark(row._trial_id, planned, folder, here, handle)
        finally:
            if claim is None:  # the storage may have failed: our own lock must not stay
                os.close(handle)
        return claim

    def _mark(
        self, trial_id: int, planned: Planned, folder: Path, here: str, handle: int
    ) -> Claim | None:
        """Write down that the trial is ours, unless it has ended."""
        rdb = self.storage.rdb
        # its worker may have ended it, or put it back, since the rows were read
        row = rdb.get_trial(trial_id)
        if row.state.is_finished():
            return None
        known = row.user_attrs
        attempt = int(known.get("attempts", 0)) + 1
        worker = f"{socket.gethostname()}:{os.getpid()}"
        facts = {"attempts": attempt, "place": here, "worker": worker}
        for name, value in facts.items():
            rdb.set_trial_user_attr(trial_id, name, value)
        # before the state: a running trial without heartbeat would belong to no worker
        rdb.record_heartbeat(trial_id)
        if row.state == TrialState.WAITING:
            rdb.set_trial_state_values(trial_id, state=TrialState.RUNNING)
        return Claim(
            trial_id=trial_id,
            planned=planned,
            folder=folder,
            attempt=attempt,
            starts=tuple(known.get("starts", ())),
            handle=handle,
            spent=known.get("wall", 0.0),
        )

    def _show(self, claim: Claim, seen: dict[int, float]) -> None:
        """Intermediate values: Optuna's dashboard draws them."""
        with self.storage.errors():
            for step, accuracy in seen.items():
                rdb = self.storage.rdb
                rdb.set_trial_intermediate_value(claim.trial_id, step, accuracy)

    def _set(self, claim: Claim, name: str, value: Any) -> None:
        with self.storage.errors():
            self.storage.rdb.set_trial_user_attr(claim.trial_id, name, value)


def place(folder: Path) -> str:
    """Names this machine and this folder: where a free lock proves a dead worker."""
    folder.mkdir(parents=True, exist_ok=True)
    found = folder.stat()
    return f"{socket.gethostname()}:{found.st_dev}:{found.st_ino}"


def _takeable(row: FrozenTrial, here: str, stale: set[int]) -> bool:
    """Waiting; or running where we can try its lock; or without heartbeat too long."""
    if row.state == TrialState.WAITING or row._trial_id in stale:
        return True
    return row.user_attrs.get("place") == here


def _waiting(planned: Planned) -> FrozenTrial:
    """A new trial of a plan, as Optuna's tools show it."""
    point = planned.point
    numbers = parameters(point)
    words = {"method": point.method, "style": point.style, "schedule": point.schedule}
    return create_trial(
        state=TrialState.WAITING,
        params=numbers,
        distributions={name: RANGES[name] for name in numbers},
        user_attrs={"key": planned.key, "point": asdict(point), **words},
    )


def parameters(point: Point) -> dict[str, Any]:
    """A point's numbers under the names that Optuna and its dashboard show."""
    return {
        "batch": point.batch,
        "lr": point.lr,
        second_of(point.method): point.other,
        "seed": point.seed,
    }


def _only(storage: Storage) -> str:
    names = [each.study_name for each in storage.rdb.get_all_studies()]
    if len(names) == 1:
        return names[0]
    if not names:
        raise UserError(
            "The storage holds no study. Start one with `natgrad study run FILE`."
        )
    legal = ", ".join(sorted(names))
    raise UserError(f"The storage holds several studies. Choose one: --name {legal}.")
