"""Workers of a study killed at random moments: does it end as if nothing had happened?

    python -m benchmarks.study_kills --kills 20
    python -m benchmarks.study_kills --kills 20 --postgres

Runs a small digits study undisturbed, then again while workers are killed, and
compares every curve. At every kill the newest checkpoint of the victim's trial is
noted: the next attempt must begin there. With --folder both studies are kept there, and
a script that was itself stopped goes on; --postgres starts a PostgreSQL server on
loopback for it. Writes results/study_kills_sqlite.md or study_kills_postgresql.md.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS
from natgrad_lab.study.ledger import Ledger
from natgrad_lab.study.points import make_plan
from natgrad_lab.study.spec import Budget, Grid, Method, StudySpec
from natgrad_lab.study.storage import Storage
from natgrad_lab.study.trial import latest_step
from natgrad_lab.study.worker import work

TIMES = ("seconds", "cpu_seconds")
Curves = dict[str, dict[str, Any]]


def small_study(epochs: float = 10.0, points: int = 3) -> StudySpec:
    """SGD and K-FAC on digits, two batch sizes; a trial takes seconds."""
    rates = Grid(low=0.03, high=0.3, points=points)
    return StudySpec(
        name="kills",
        recipe="digits-sgd",
        batches=(64, 256),
        checkpoints=16,
        settings={"model": {"width": 4}},
        budget=Budget(kind="epochs", epochs=epochs),
        methods={
            "sgd": Method(lr=rates, momentum=Grid(values=(0.9,))),
            "kfac": Method(lr=rates, damping=Grid(values=(0.1,)), recipe="digits-kfac"),
        },
    )


def worker(address: str, folder: str) -> None:
    """One worker's life, in a process of its own."""
    os.environ["OMP_NUM_THREADS"] = "1"
    work(Ledger(Storage(address)), Path(folder), say=lambda line: None)


@dataclass(frozen=True, kw_only=True)
class Disturbed:
    """What a study looks like after its workers were killed."""

    curves: Curves
    rows: int
    kills: int
    interrupted: int
    """Kills after which a trial that had begun to train had to be taken up again."""
    resumed: int
    """Of them with a checkpoint, from which the next attempt went on."""
    restarts: int
    """Of them before the first checkpoint: the next attempt began at update 0."""
    astray: tuple[str, ...]
    """Attempts that began elsewhere than at the newest checkpoint: said in words."""


@dataclass(frozen=True, kw_only=True)
class Kill:
    """What a killed worker left: where the next attempt of its trial must begin."""

    key: str
    attempt: int
    """Counted from 0."""
    step: int
    """Of the newest checkpoint; 0 without one."""


class Crew:
    """Worker processes, forked from a server that has imported torch already."""

    def __init__(self, address: str, folder: Path, size: int) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["natgrad_lab.study.worker"])
        self._arguments = (address, str(folder))
        self.workers = [self._start() for _ in range(size)]

    def _start(self) -> Any:
        process = self._context.Process(target=worker, args=self._arguments)
        process.start()
        return process

    def kill(self, pid: int) -> bool:
        """SIGKILL for a worker; False if it had ended."""
        for each in self.workers:
            if each.pid == pid and each.is_alive():
                os.kill(pid, signal.SIGKILL)
                each.join()
                return True
        return False

    def fill(self) -> None:
        """A new worker in the place of each killed one."""
        for index, each in enumerate(self.workers):
            if each.exitcode == -signal.SIGKILL:
                self.workers[index] = self._start()

    def busy(self) -> bool:
        """Whether a worker is alive."""
        return any(each.is_alive() for each in self.workers)

    def wait(self, seconds: float) -> bool:
        """Whether all ended well within that time."""
        deadline = time.monotonic() + seconds
        for each in self.workers:
            each.join(max(0.0, deadline - time.monotonic()))
        return all(each.exitcode == 0 for each in self.workers)

    def end(self) -> None:
        """Leave no process behind."""
        for each in self.workers:
            if each.is_alive():
                each.kill()
                each.join()


def run_study(
    spec: StudySpec,
    address: str,
    folder: Path,
    *,
    kills: int = 0,
    pause: tuple[float, float] = (0.0, 2.5),
    workers: int = 2,
    seed: int = 0,
    seconds: float = 500.0,
    saved: bool = False,
) -> Disturbed:
    """Plan a study and work on it, killing a random worker again and again.

    The victim is a worker that has begun to train a trial, a random pause ago: else
    most kills would hit workers that are still starting. With ``saved`` the pause
    begins when the trial has a checkpoint.
    """
    storage = Storage(address, create=True)
    ledger = Ledger.plan(storage, spec, make_plan(spec))
    tally = Tally(folder / "kills.json")
    chosen = random.Random(seed + tally.kills)
    crew = Crew(address, folder, workers)
    try:
        while tally.kills < kills:
            key, victim = next_in_training(ledger, crew)
            while saved and key in training(ledger) and not latest_step(folder / key):
                time.sleep(0.005)
            if saved and victim and not latest_step(folder / key):
                continue  # it has diverged, and left no checkpoint
            time.sleep(chosen.uniform(*pause))
            if not crew.kill(victim):
                if crew.busy():
                    continue
                break
            tally.add(left_by(victim, ledger, folder))
            crew.fill()
        if not crew.wait(seconds):
            raise RuntimeError("The study did not end.")
    finally:
        crew.end()
    return read(ledger, tally)


class Tally:
    """Kills so far, in a file: a benchmark that was itself stopped goes on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        known = json.loads(path.read_text()) if path.is_file() else {}
        self.kills: int = known.get("kills", 0)
        self.left = [Kill(**each) for each in known.get("left", ())]

    def add(self, left: Sequence[Kill]) -> None:
        """One more, and the trial that its victim had, if any."""
        self.kills += 1
        self.left += left
        facts = {"kills": self.kills, "left": [asdict(each) for each in self.left]}
        self._path.write_text(json.dumps(facts))


def left_by(pid: int, ledger: Ledger, folder: Path) -> list[Kill]:
    """The trial that a dead worker had begun to train, and where it can go on."""
    rows = [each for each in ledger.planned_trials() if not each.state.is_finished()]
    rows = [each for each in rows if worker_of(each.user_attrs) == pid]
    return [
        Kill(
            key=row.user_attrs["key"],
            attempt=len(row.user_attrs.get("starts", ())),
            step=latest_step(folder / row.user_attrs["key"]),
        )
        for row in rows
    ]


def training(ledger: Ledger) -> set[str]:
    """The trials that have not ended."""
    rows = [each for each in ledger.planned_trials() if not each.state.is_finished()]
    return {row.user_attrs["key"] for row in rows}


def next_in_training(ledger: Ledger, crew: Crew) -> tuple[str, int]:
    """The trial that begins, or goes on, next, and its process; 0 when all end."""
    before = begun(ledger)
    while crew.busy():
        now = begun(ledger)
        new = [key for key in now if now[key][0] > before[key][0]]
        if new:
            return new[0], now[new[0]][1]
        time.sleep(0.02)
    return "", 0


def begun(ledger: Ledger) -> dict[str, tuple[int, int]]:
    """By trial: how often training began or went on, and the last worker's number."""
    rows = [each.user_attrs for each in ledger.planned_trials()]
    return {x["key"]: (len(x.get("starts", ())), worker_of(x)) for x in rows}


def worker_of(facts: dict[str, Any]) -> int:
    """The number of the process that has, or had, a trial; 0: nobody yet."""
    return int(facts.get("worker", "0").rpartition(":")[2])


def read(ledger: Ledger, tally: Tally) -> Disturbed:
    """The curves by key, and how each trial's attempts began."""
    rows = ledger.planned_trials()
    if not all(each.state.is_finished() for each in rows):
        raise RuntimeError("A trial has not ended.")
    starts = {x.user_attrs["key"]: x.user_attrs["starts"] for x in rows}
    again = [each for each in tally.left if each.attempt]
    wrong = strays(starts, tally.left)
    return Disturbed(
        curves={x.user_attrs["key"]: x.user_attrs["curve"] for x in rows},
        rows=len(rows),
        kills=tally.kills,
        interrupted=len(again),
        resumed=sum(each.step > 0 for each in again),
        restarts=sum(each.step == 0 for each in again),
        astray=tuple(wrong),
    )


def strays(starts: dict[str, list[int]], left: Sequence[Kill]) -> list[str]:
    """What did not begin where it must: at 0 first, then at what each kill left.

    An attempt that no kill explains is one as well.
    """
    found = []
    for key, steps in starts.items():
        wanted = {each.attempt: each.step for each in left if each.key == key}
        for attempt, step in enumerate(steps):
            right = wanted.get(attempt, None if attempt else 0)
            if step != right:
                found.append(f"{key}, attempt {attempt}: began at {step}, not {right}")
    return found


def differences(one: Curves, other: Curves) -> list[str]:
    """Keys whose numbers differ, times aside."""
    keys = sorted(one.keys() | other.keys())
    return [key for key in keys if _numbers(one.get(key)) != _numbers(other.get(key))]


def _numbers(curve: dict[str, Any] | None) -> Any:
    if curve is None:
        return None
    return {name: value for name, value in curve.items() if name not in TIMES}


def main() -> None:
    """Measure and write the result down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="default: a temporary one")
    storage = parser.add_mutually_exclusive_group()
    storage.add_argument("--storage", help="default: an SQLite file")
    storage.add_argument("--postgres", action="store_true", help="start a server")
    asked = parser.parse_args()
    spec = small_study()
    with tempfile.TemporaryDirectory() as temporary, server(asked.postgres) as started:
        base = asked.folder or Path(temporary)
        calm, wild = base / "calm", base / "wild"
        quiet = run_study(spec, f"sqlite:///{calm}/study.db", calm)
        renamed = replace(spec, name="kills-disturbed")
        address = asked.storage or started or f"sqlite:///{wild}/study.db"
        hit = run_study(renamed, address, wild, kills=asked.kills, seed=asked.seed)
    kind = "SQLite" if address.startswith("sqlite") else "PostgreSQL"
    text = report(quiet, hit, kind)
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / f"study_kills_{kind.lower()}.md"
    file.write_text(text, encoding="utf-8")
    print(text)


@contextlib.contextmanager
def server(wanted: bool) -> Generator[str | None]:
    """The address of a PostgreSQL server for this run; None where none is wanted.

    With --folder a second run has a new, empty server: use --storage to go on.
    """
    if not wanted:
        yield None
        return
    from tests.lab.study.postgres import postgres

    with postgres() as found:
        yield found.address


def report(quiet: Disturbed, hit: Disturbed, kind: str) -> str:
    """The result as Markdown."""
    wrong = differences(quiet.curves, hit.curves)
    points = sum(len(each["steps"]) for each in hit.curves.values())
    rows = {
        "storage": kind,
        "trials": hit.rows,
        "kills (SIGKILL, up to 2.5 s after training began or went on)": hit.kills,
        "of them that stopped a trial in training": hit.interrupted,
        "trials that ended, each once": len(hit.curves),
        "points of curves compared": points,
        "trials whose numbers differ from the undisturbed study": len(wrong),
        "kills after a first checkpoint, to go on from": hit.resumed,
        "kills before the first checkpoint (1/16 of a trial)": hit.restarts,
        "attempts that began elsewhere than at the newest checkpoint": len(hit.astray),
    }
    lines = [f"| {name} | {value} |" for name, value in rows.items()]
    head = ["# Workers killed at random moments", "", "| | |", "|---|---:|"]
    note = ["", "`python -m benchmarks.study_kills`, 2 workers, digits, SGD and K-FAC."]
    found = [f"Differing: {json.dumps(wrong)}", f"Astray: {json.dumps(hit.astray)}"]
    return "\n".join([*head, *lines, *note, *found, ""])


if __name__ == "__main__":
    main()
