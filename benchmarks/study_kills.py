"""Workers of a study killed at random moments: does it end as if nothing had happened?

    python -m benchmarks.study_kills --kills 20

With --folder both studies are kept there, and a script that was itself stopped goes on.
Runs a small digits study undisturbed, then again while workers are killed, and
compares every curve. Writes results/study_kills.md.
"""

import argparse
import json
import multiprocessing
import os
import random
import signal
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from natgrad_lab.study.ledger import Ledger
from natgrad_lab.study.points import make_plan
from natgrad_lab.study.spec import Budget, Grid, Method, StudySpec
from natgrad_lab.study.storage import Storage
from natgrad_lab.study.worker import work

RESULT = Path(__file__).parent / "results" / "study_kills.md"
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
    restarts: int
    """Attempts that began at update 0 again, before a first checkpoint."""
    from_start: int
    """Attempts that began at update 0 although there had been a checkpoint."""


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
        """SIGKILL for a worker, and a new one in its place; False if it had ended."""
        for index, each in enumerate(self.workers):
            if each.pid == pid and each.is_alive():
                os.kill(pid, signal.SIGKILL)
                each.join()
                self.workers[index] = self._start()
                return True
        return False

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
) -> Disturbed:
    """Plan a study and work on it, killing a random worker again and again.

    The victim is a worker that has begun to train a trial, a random pause ago: else
    most kills would hit workers that are still starting.
    """
    storage = Storage(address, create=True)
    ledger = Ledger.plan(storage, spec, make_plan(spec))
    tally = folder / "kills"
    done = len(tally.read_text()) if tally.is_file() else 0
    chosen = random.Random(seed + done)
    crew = Crew(address, folder, workers)
    try:
        while done < kills:
            victim = next_in_training(ledger, crew)
            time.sleep(chosen.uniform(*pause))
            if not crew.kill(victim):
                break
            done += 1
            tally.write_text("x" * done)
        if not crew.wait(seconds):
            raise RuntimeError("The study did not end.")
    finally:
        crew.end()
    return read(ledger, done)


def next_in_training(ledger: Ledger, crew: Crew) -> int:
    """The process that begins, or goes on, to train a trial next; 0 when all end."""
    before = begun(ledger)
    while crew.busy():
        now = begun(ledger)
        new = [key for key in now if now[key][0] > before[key][0]]
        if new:
            return now[new[0]][1]
        time.sleep(0.02)
    return 0


def begun(ledger: Ledger) -> dict[str, tuple[int, int]]:
    """By trial: how often training began or went on, and the last worker's number."""
    rows = [each.user_attrs for each in ledger.planned_trials()]
    return {
        x["key"]: (
            len(x.get("starts", ())),
            int(x.get("worker", "0").rpartition(":")[2]),
        )
        for x in rows
    }


def read(ledger: Ledger, kills: int = 0) -> Disturbed:
    """The curves by key, and how each trial's attempts began."""
    rows = ledger.planned_trials()
    if not all(each.state.is_finished() for each in rows):
        raise RuntimeError("A trial has not ended.")
    starts = [each.user_attrs["starts"] for each in rows]
    again = [each[1:] for each in starts]
    late = [[s for i, s in enumerate(x) if s == 0 and any(x[:i])] for x in starts]
    zeros = sum(each.count(0) for each in again)
    broken = sum(map(len, late))
    return Disturbed(
        curves={x.user_attrs["key"]: x.user_attrs["curve"] for x in rows},
        rows=len(rows),
        kills=kills,
        interrupted=sum(map(len, again)),
        restarts=zeros - broken,
        from_start=broken,
    )


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
    parser.add_argument("--storage", help="default: an SQLite file")
    asked = parser.parse_args()
    spec = small_study()
    with tempfile.TemporaryDirectory() as temporary:
        base = asked.folder or Path(temporary)
        calm, wild = base / "calm", base / "wild"
        quiet = run_study(spec, f"sqlite:///{calm}/study.db", calm)
        renamed = replace(spec, name="kills-disturbed")
        address = asked.storage or f"sqlite:///{wild}/study.db"
        hit = run_study(renamed, address, wild, kills=asked.kills, seed=asked.seed)
    text = report(quiet, hit, "PostgreSQL" if asked.storage else "SQLite")
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(text, encoding="utf-8")
    print(text)


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
        "attempts that trained from the start although a checkpoint existed": (
            hit.from_start
        ),
        "attempts killed before the first checkpoint (1/16 of a trial)": hit.restarts,
    }
    lines = [f"| {name} | {value} |" for name, value in rows.items()]
    head = ["# Workers killed at random moments", "", "| | |", "|---|---:|"]
    note = ["", "`python -m benchmarks.study_kills`, 2 workers, digits, SGD and K-FAC."]
    return "\n".join([*head, *lines, *note, f"Differing: {json.dumps(wrong)}", ""])


if __name__ == "__main__":
    main()
