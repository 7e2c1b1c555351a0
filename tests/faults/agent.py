"""A small torchrun: starts ranks, and starts them all anew when one ends badly.

Processes are forked from a server that has imported everything, so a restart takes a
second where torchrun's takes ten. As under torchrun, the store outlives the restarts.
"""

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch.distributed as dist
from tests.faults.launch import Outcome
from tests.support.facts import starts_processes

from natgrad_lab.train.records import read_metrics

PRELOAD = [
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor",
    "natgrad_lab.train.session",
    "natgrad_lab.data",
    "sklearn.datasets",
    "hypothesis",
]
_context = get_context("forkserver")
Fault = tuple[int, int, str]


@starts_processes
@dataclass(kw_only=True)
class Agent:
    """Runs ``natgrad`` with some words on ranks that have faults.

    Args:
        words: the command line.
        faults: what happens to which rank, and from which step on.
        ranks: how many there are; the last of several numbers holds for later restarts.
        restarts: how often they are started anew at most.
        timeout: seconds that a start may take.
    """

    words: list[str]
    faults: Sequence[Fault] = ()
    ranks: Sequence[int] = (2,)
    restarts: int = 30
    timeout: float = 120.0
    starts: int = 0
    failed_after: list[float] = field(default_factory=list)
    """Seconds from each start to the first rank that ended badly, if one did."""
    statuses: list[list[int | None]] = field(default_factory=list)

    def run(self) -> Outcome:
        """Until all ranks end well, or there are no restarts left."""
        out = Path(self.words[self.words.index("--out") + 1])
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        name = uuid4().hex
        with tempfile.TemporaryDirectory() as notes:
            log = Path(notes) / "log"
            (Path(notes) / "done").mkdir()
            while True:
                statuses = self._start(store.port, name, Path(notes))
                self.statuses.append(statuses)
                if set(statuses) == {0} or self.starts > self.restarts:
                    break
            printed = log.read_text(errors="replace")
            happened = len(list((Path(notes) / "done").iterdir()))
        path = out / "metrics.jsonl"
        records = read_metrics(path) if path.is_file() else []
        losses = {r["step"]: r["loss"] for r in records if r["kind"] == "train"}
        status = next((s for s in statuses if s), 0) or 0
        return Outcome(status=status, printed=printed, losses=losses, restarts=happened)

    def _start(self, port: int, name: str, notes: Path) -> list[int | None]:
        ranks = self.ranks[min(self.starts, len(self.ranks) - 1)]
        env = {
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": name,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "GLOO_SOCKET_IFNAME": "lo",
            "COLUMNS": "200",
        }
        self.starts += 1
        processes = [
            _context.Process(
                target=_rank,
                args=({**env, "RANK": str(rank)}, notes, list(self.faults), self.words),
                daemon=True,
            )
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        return self._watch(processes)

    def _watch(self, processes: list[Any]) -> list[int | None]:
        """As torchrun does: when one fails the others are told, and then ended."""
        began, told = time.monotonic(), False
        end = began + self.timeout
        while alive := [p for p in processes if p.exitcode is None]:
            connection.wait([p.sentinel for p in alive], timeout=1.0)
            if any(p.exitcode for p in processes) and not told:
                told, end = True, time.monotonic() + 20.0
                self.failed_after.append(time.monotonic() - began)
                for process in alive:
                    process.terminate()
            if time.monotonic() > end:
                for process in alive:
                    process.kill()
        for process in processes:
            process.join()
        return [process.exitcode for process in processes]


def _rank(env: dict[str, str], notes: Path, faults: list[Fault], words: Any) -> None:
    os.environ.update(env)
    log = os.open(notes / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1) for n in (1, 2))
    from tests.faults import victim

    os._exit(victim.train(notes / "done", [list(each) for each in faults], words))


def preload() -> None:
    """Before the first process is started: what the server imports."""
    _context.set_forkserver_preload(PRELOAD)
