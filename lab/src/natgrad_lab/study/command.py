"""`natgrad study`: run, work, status and report."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from natgrad_lab.errors import UserError
from natgrad_lab.study.ledger import Ledger
from natgrad_lab.study.points import make_plan
from natgrad_lab.study.status import read_status, show_status
from natgrad_lab.study.storage import GRACE_SECONDS, Storage
from natgrad_lab.study.toml import read_study
from natgrad_lab.study.worker import PARENT, default_folder, work
from natgrad_lab.train.signals import stop_request

USAGE = """usage: natgrad study run FILE [--workers N]    plan a study and work on it
       natgrad study work [URL]               join a study from anywhere
       natgrad study status FILE-OR-URL       how far it is, and the time left
       natgrad study report FILE-OR-URL       figures, tables and a page of its results

`natgrad study COMMAND --help` says more. Exit status: 0 done, 130 interrupted (run the
same command again to go on)."""
ADDRESS = "NATGRAD_STORAGE"
Positional = tyro.conf.Positional


@dataclass(frozen=True, kw_only=True)
class RunArguments:
    """Plan the study of a TOML file and train until all its trials have ended.

    Run it again to go on after an interruption, or with a larger grid: what is done is
    kept."""

    file: Annotated[Path, Positional]
    """The study's specification."""
    workers: int = 1
    """Processes on this machine."""
    storage: str | None = None
    """Instead of the file's: sqlite:///FILE or postgresql://..."""
    folder: Path | None = None
    """Checkpoints and records. Default: runs/studies/NAME."""
    grace: int = GRACE_SECONDS
    """Seconds without heartbeat after which another machine's trial is taken over."""


@dataclass(frozen=True, kw_only=True)
class WorkArguments:
    """Join a study that `natgrad study run` has planned, as one more worker."""

    url: Annotated[str | None, Positional] = None
    """The storage. Default: $NATGRAD_STORAGE."""
    name: str | None = None
    """The study, when the storage holds several."""
    folder: Path | None = None
    """Checkpoints and records. On a disk that all machines share, a trial goes on from
    its checkpoint wherever it is taken over."""
    grace: int = GRACE_SECONDS
    """Seconds without heartbeat after which another machine's trial is taken over."""


@dataclass(frozen=True, kw_only=True)
class LookArguments:
    """Which study, for those who only look."""

    target: Annotated[str, Positional]
    """The study's TOML file, or its storage."""
    name: str | None = None
    """The study, when the storage holds several."""
    storage: str | None = None
    """Instead of the file's, as for `run`."""
    folder: Path | None = None
    """The study's folder, as for `run`. Default: runs/studies/NAME."""


@dataclass(frozen=True, kw_only=True)
class StatusArguments(LookArguments):
    """How far a study is: a table that stays fresh on a terminal, and the time left."""

    once: bool = False
    """Print once and end."""
    every: float = 2.0
    """Seconds between two looks."""


@dataclass(frozen=True, kw_only=True)
class ReportArguments(LookArguments):
    """Write figures (PNG and SVG), tables (CSV and Parquet) and one HTML page."""

    out: Path | None = None
    """Where to. Default: report in the study's folder."""


def main(arguments: Sequence[str]) -> int:
    """Find the subcommand."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if arguments else 2
    name, rest = arguments[0], list(arguments[1:])
    if name not in COMMANDS:
        legal = ", ".join(COMMANDS)
        raise UserError(f"Unknown command 'study {name}'. Must be one of {legal}.")
    kind, function = COMMANDS[name]
    return function(tyro.cli(kind, prog=f"natgrad study {name}", args=rest))


def run(asked: RunArguments) -> int:
    """Plan, then work here or in several processes."""
    if asked.workers < 1:
        raise UserError(f"Invalid --workers {asked.workers}. Must be >= 1.")
    spec = read_study(asked.file)
    folder = asked.folder or default_folder(spec.name)
    address = asked.storage or spec.storage or default_storage(folder)
    plan = make_plan(spec)
    storage = Storage(address, create=True, grace=asked.grace)
    ledger = Ledger.plan(storage, spec, plan)
    left = ledger.remaining(plan)
    print(f"study {spec.name}: {len(plan)} trials, {left} to do, in {folder}")
    if asked.workers == 1 or not left:
        return _work(ledger, folder)
    return _work_together(ledger, folder, asked)


def join(asked: WorkArguments) -> int:
    """Work on somebody's study."""
    address = asked.url or os.environ.get(ADDRESS)
    if not address:
        raise UserError(f"Give the storage's address, or set {ADDRESS}.")
    ledger = Ledger(Storage(address, grace=asked.grace), asked.name)
    return _work(ledger, asked.folder or default_folder(ledger.name))


def status(asked: StatusArguments) -> int:
    """Show the table."""
    if asked.every <= 0:
        raise UserError(f"Invalid --every {asked.every}. Must be > 0.")
    ledger = find_ledger(asked)
    show_status(ledger, every=asked.every, once=asked.once)
    return 0


def report(asked: ReportArguments) -> int:
    """Write the report."""
    from natgrad_lab.study.report import write_report

    ledger = find_ledger(asked)
    out = asked.out or (asked.folder or default_folder(ledger.name)) / "report"
    print(write_report(ledger, out))
    return 0


COMMANDS: dict[str, tuple[type, Callable]] = {
    "run": (RunArguments, run),
    "work": (WorkArguments, join),
    "status": (StatusArguments, status),
    "report": (ReportArguments, report),
}


def default_storage(folder: Path) -> str:
    """The embedded storage: an SQLite file in the study's folder."""
    return f"sqlite:///{folder / 'study.db'}"


def find_ledger(asked: LookArguments) -> Ledger:
    """The study of a TOML file, where `run` keeps it, or of a storage's address."""
    if "://" in asked.target:
        if asked.storage is not None:
            raise UserError("Give a storage's address or --storage, not both.")
        return Ledger(Storage(asked.target), asked.name)
    spec = read_study(Path(asked.target))
    folder = asked.folder or default_folder(spec.name)
    address = asked.storage or spec.storage or default_storage(folder)
    return Ledger(Storage(address), asked.name or spec.name)


def _work(ledger: Ledger, folder: Path) -> int:
    tally = work(ledger, folder, say=lambda line: print(line, flush=True))
    if tally.interrupted:
        print("interrupted: run the same command again to go on", file=sys.stderr)
        return 130
    return _summary(ledger)


def _summary(ledger: Ledger) -> int:
    now = read_status(ledger)
    diverged = sum(row.diverged for row in now.rows)
    print(f"study {now.name}: {now.ended} of {now.total} ended, {diverged} diverged")
    return 0


def _work_together(ledger: Ledger, folder: Path, asked: RunArguments) -> int:
    """Several workers; a signal is passed on, and each saves its trial."""
    command = [sys.executable, "-m", "natgrad_lab", "study", "work"]
    command += ["--name", ledger.name, "--folder", str(folder)]
    command += ["--grace", str(asked.grace)]
    # not in the arguments, where every user of the machine could read a password
    environment = {**os.environ, ADDRESS: ledger.storage.address}
    environment[PARENT] = str(os.getpid())
    ledger.storage.close()
    with stop_request() as request:
        workers = [
            subprocess.Popen(command, env=environment) for _ in range(asked.workers)
        ]
        while any(each.poll() is None for each in workers) and not request.asked:
            time.sleep(0.2)
        for each in workers:
            if each.poll() is None:
                each.send_signal(signal.SIGTERM)
        statuses = [each.wait() for each in workers]
    if request.asked:
        print("interrupted: run the same command again to go on", file=sys.stderr)
        return 130
    if any(statuses):
        return next(each for each in statuses if each) % 256
    return _summary(ledger)
