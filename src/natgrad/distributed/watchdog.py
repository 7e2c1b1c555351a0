"""Signs of life, so that an error can name the rank that is gone, stuck or failed.

Note [Who is gone]
    gloo reports a lost connection but not whose, and NCCL may report nothing but a
    timeout. Each process counts in the store, in a thread of its own, and says where it
    is: how many marks it has passed, and whether it waits for others. Whoever meets an
    error looks whose count no longer rises, who said that it failed, and who is
    behind the others, and leaves its verdict in the store for those who meet theirs
    later.

Note [News]
    A failure and a verdict are news: whoever posts one counts it, and every thread asks
    for that count at each beat. So each process knows what has happened without a
    question of its main thread, and still does when the store is gone: rank 0, whose
    process may have the store, waits for the others to have heard before it ends.

Note [One word]
    What ranks may do only together, and some may not do at all, is asked through the
    store: an exchange that others do not take part in would disturb theirs. Each says
    it under a key of what it is about; either all come in time, or one gives up, and
    the first word on it holds for all. So with failures: a rank that raises in a step
    ends the others, as it will not take part in what they wait for. But if all raise
    the same at the same mark, none is missing in anything, and all may go on.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

PULSE_SECONDS = 0.5
PATIENCE_SECONDS = 5.0
FAREWELL_SECONDS = 2.0
LONGEST_MESSAGE = 500
STORE_GONE = (
    "The store is gone, as rank 0 or the launcher has ended: which rank was lost first "
    "cannot be said any more."
)
START_AGAIN = "Start the processes again."
_logger = logging.getLogger("natgrad")


class Pulse:
    """A daemon thread that counts in ``store``, and listens, until it is stopped."""

    def __init__(self, store: Any, rank: int, world: int) -> None:
        self._store, self._rank, self._world = store, rank, world
        self._marks, self._waits, self._where = 0, 0, "at its start"
        self._own: set[str] = set()  # failures of this rank
        self._posted: set[int] = set()
        self._news, self._heard, self._gone = 0, "", 0
        self._told, self._since = False, time.monotonic()
        self._listening = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    @property
    def bad_news(self) -> str:
        """Why the others will not come, as far as this rank has heard; or empty."""
        return self._heard

    def mark(self, where: str) -> None:
        """This rank has come to a place that every rank comes to."""
        self._marks, self._where = self._marks + 1, where

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
                if self._heard:
                    raise RuntimeError(START_AGAIN) from None
                if work.is_completed():
                    work.wait()  # what it failed with, unless it has just come
                    return

    def fail(self, error: BaseException) -> bool:
        """Tell the others why this rank ends.

        Returns whether all ranks have failed in the same way and may go on together.
        """
        text = f"{self._marks} {type(error).__name__}: {error}"[:LONGEST_MESSAGE]
        if text in self._own:
            return False  # as was said before
        self._own.add(text)
        with contextlib.suppress(RuntimeError):
            self._store.set(f"failed/{self._rank}", text)
            self._post()
            self._listen(again=True)
            # an interrupt is not to be held up
            if isinstance(error, Exception) and self.all_say(text, FAREWELL_SECONDS):
                return True
            self._let_hear()
        return False

    def all_say(self, text: str, seconds: float) -> bool:
        """Whether every rank says the same within some time. See Note [One word]."""
        key = hashlib.sha256(text.encode()).hexdigest()[:16]
        count = self._store.add(f"saying/{key}", 1)
        end = time.monotonic() + seconds
        while count < self._world and time.monotonic() < end:
            if self._heard or self._store.add("ended", 0):
                break
            time.sleep(PULSE_SECONDS / 10)
            count = self._store.add(f"saying/{key}", 0)
        word = "yes" if count >= self._world else "no"
        self._store.compare_set(f"all/{key}", "", word)
        return self._store.get(f"all/{key}") == b"yes"

    def stop(self) -> None:
        """End the thread. To others this rank then looks gone."""
        self._stopped.set()
        self._thread.join(timeout=2 * PULSE_SECONDS)

    def verdict(self) -> str:
        """Who is gone, in words that are the same on all ranks. This rank gives up."""
        self._told = True
        with contextlib.suppress(RuntimeError):
            self._store.add("ended", 1)
            self._listen()
            if not self._heard:
                self._store.compare_set("verdict", "", self._look())
                self._post()
                self._listen(again=True)
            self._let_hear()
        return self._heard or STORE_GONE

    # -- what the thread does ----------------------------------------------------------

    def _beat(self) -> None:
        # Without a store there is nobody left to tell.
        with contextlib.suppress(RuntimeError):
            while True:
                where = f"{self._marks} {self._waits} {self._where}"
                self._store.set(f"where/{self._rank}", where)
                self._store.add(f"pulse/{self._rank}", 1)
                self._listen()
                if self._stopped.wait(PULSE_SECONDS):
                    return
                self._warn()

    def _listen(self, again: bool = False) -> None:
        """See Note [News]. One question while all is well."""
        with self._listening:
            seen, self._news = self._news, self._store.add("news", 0)
            if self._news == seen and not again:
                return
            # what this rank has failed with since may be what it had heard of another
            heard = "" if again else self._heard
            self._heard = heard or self._failure_of_another() or self._said()
            for number in {*range(seen + 1, self._news + 1)} - self._posted:
                self._store.add(f"heard/{number}", 1)

    def _warn(self) -> None:
        """For a rank that waits where it cannot be told, as in DDP's own exchanges."""
        if not self._heard or self._told:
            self._since = time.monotonic()
        elif time.monotonic() - self._since > FAREWELL_SECONDS:
            self._told = True
            where = "which is not in an exchange of natgrad"
            _logger.error("%s (told to rank %d, %s)", self._heard, self._rank, where)

    # -- failures ----------------------------------------------------------------------

    def _post(self) -> None:
        """Count what was just written as news."""
        with self._listening:
            self._posted.add(self._store.add("news", 1))

    def _let_hear(self) -> None:
        """On rank 0, which may take the store with it: wait until others have heard."""
        listeners = self._world - 1 - self._gone
        end = time.monotonic() + FAREWELL_SECONDS
        while self._rank == 0 and time.monotonic() < end:
            if self._store.add(f"heard/{self._news}", 0) >= listeners:
                return
            time.sleep(PULSE_SECONDS / 10)

    def _failure_of_another(self) -> str:
        """That at the earliest mark, unless this rank has failed in the same way."""
        found: list[tuple[int, int, str]] = []
        for rank in range(self._world):
            text = self._value(f"failed/{rank}") if rank != self._rank else ""
            if text and text not in self._own:
                marks, message = text.split(" ", 1)
                found.append((int(marks), rank, message))
        return "Rank {1} failed: {2}".format(*min(found)) if found else ""

    def _said(self) -> str:
        """The verdict of whoever was first to look."""
        gone, _, text = self._value("verdict").partition(" ")
        self._gone = int(gone or 0)
        return text

    def _value(self, key: str) -> str:
        # to get what is not there would be to wait for it
        return self._store.get(key).decode() if self._store.check([key]) else ""

    # -- who it was --------------------------------------------------------------------

    def _look(self) -> str:
        """How many ranks are gone, and what to say of it."""
        still = {rank: self._count(rank) for rank in range(self._world)}
        end = time.monotonic() + PATIENCE_SECONDS
        while still and time.monotonic() < end:
            self._listen()
            if self._heard:
                return f"0 {self._heard}"
            time.sleep(PULSE_SECONDS / 4)
            still = {r: n for r, n in still.items() if self._count(r) == n}
        if not still:
            return f"0 {self._behind()}"
        who = f"Rank {min(still)} is" if len(still) == 1 else f"Ranks {[*still]} are"
        return f"{len(still)} {who} gone: no sign of life for {PATIENCE_SECONDS:g} s."

    def _behind(self) -> str:
        """Who has passed the fewest marks, or waits for nobody, of ranks that live."""
        time.sleep(2 * PULSE_SECONDS)  # everyone has said where it is once more
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

    def _count(self, rank: int) -> int:
        return self._store.add(f"pulse/{rank}", 0)
