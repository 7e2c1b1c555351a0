"""Signs of life, so that an error can name the rank that is gone, stuck or failed.

Note [Who is gone]
    gloo reports a lost connection but not whose, and NCCL may report nothing but a
    timeout. Each process counts seconds in the store, in a thread of its own, and says
    where it is: how many marks it has passed, and whether it waits for others. Whoever
    meets an error looks whose count stands still, who said that it failed, and who is
    behind the others, and leaves its verdict in the store for those who meet theirs
    later, when it may be gone itself.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

PULSE_SECONDS = 1.0
PATIENCE_SECONDS = 5.0
LONGEST_MESSAGE = 500


class Pulse:
    """A daemon thread that counts in ``store`` until it is stopped."""

    def __init__(self, store: Any, rank: int, world: int) -> None:
        self._store, self._rank, self._world = store, rank, world
        self._marks, self._waits, self._where = 0, 0, "at its start"
        self._failed = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def mark(self, where: str) -> None:
        """This rank has come to a place that every rank comes to."""
        self._marks, self._where = self._marks + 1, where
        if self._failed:  # it went on after all
            self._failed = False
            self._store.set(f"failed/{self._rank}", "")
            self._store.add("failures", -1)

    @contextmanager
    def waiting(self, where: str) -> Generator[None]:
        """Inside, this rank waits for others; an error leaves it waiting."""
        self._waits, before, self._where = 1, self._where, where
        yield
        self._waits, self._where = 0, before

    def wait(self, work: Any) -> None:
        """Wait for a collective on CPU, but not for a rank that says it failed.

        Such a rank may well live on, in a notebook say, and never take part.
        """
        while True:
            try:
                work.wait(timedelta(seconds=PULSE_SECONDS))
                return
            except RuntimeError:
                if work.is_completed() or self._failed_rank() is not None:
                    raise

    def fail(self, error: BaseException) -> None:
        """Tell the others why this rank ends."""
        text = f"{type(error).__name__}: {error}"[:LONGEST_MESSAGE]
        with contextlib.suppress(RuntimeError):
            self._store.set(f"failed/{self._rank}", text)
            if not self._failed:
                self._failed = True
                self._store.add("failures", 1)

    def stop(self) -> None:
        """End the thread. To others this rank then looks gone."""
        self._stopped.set()
        self._thread.join(timeout=2 * PULSE_SECONDS)

    def verdict(self) -> str:
        """Who is gone, in words that are the same on all ranks."""
        try:
            if not self._store.check(["verdict"]):
                self._store.compare_set("verdict", "", self._look())
            return self._store.get("verdict").decode()
        except RuntimeError:
            return "The store is gone, and with it rank 0 or the launcher."

    def _beat(self) -> None:
        # Without a store there is nobody left to tell.
        with contextlib.suppress(RuntimeError):
            while True:
                where = f"{self._marks} {self._waits} {self._where}"
                self._store.set(f"where/{self._rank}", where)
                self._store.add(f"pulse/{self._rank}", 1)
                if self._stopped.wait(PULSE_SECONDS):
                    return

    def _look(self) -> str:
        still = {rank: self._count(rank) for rank in range(self._world)}
        end = time.monotonic() + PATIENCE_SECONDS
        while still and time.monotonic() < end:
            if (rank := self._failed_rank()) is not None:
                return f"Rank {rank} failed: {self._failure(rank)}"
            time.sleep(PULSE_SECONDS / 4)
            still = {r: n for r, n in still.items() if self._count(r) == n}
        if not still:
            return self._behind()
        who = f"Rank {min(still)} is" if len(still) == 1 else f"Ranks {[*still]} are"
        return f"{who} gone: no sign of life for {PATIENCE_SECONDS:g} s."

    def _behind(self) -> str:
        """Who has passed the fewest marks, or waits for nobody, of ranks that live."""
        time.sleep(PULSE_SECONDS)  # everyone has said where it is once more
        at: dict[int, tuple[int, int]] = {}
        where: dict[int, str] = {}
        for rank in range(self._world):
            marks, waits, text = self._store.get(f"where/{rank}").decode().split(" ", 2)
            at[rank], where[rank] = (int(marks), int(waits)), text
        places = ", ".join(f"rank {rank} {text}" for rank, text in where.items())
        last = [rank for rank in at if at[rank] == min(at.values())]
        if len(last) == self._world:
            return f"All ranks live, but do not do the same things: {places}."
        who = f"rank {last[0]} is" if len(last) == 1 else f"ranks {last} are"
        return f"All ranks live, but {who} stuck: {places}."

    def _failed_rank(self) -> int | None:
        # asked every second by everyone: one question while all is well
        if not self._store.add("failures", 0):
            return None
        return next((r for r in range(self._world) if self._failure(r)), None)

    def _failure(self, rank: int) -> str:
        key = f"failed/{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _count(self, rank: int) -> int:
        return self._store.add(f"pulse/{rank}", 0)
