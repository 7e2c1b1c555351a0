"""Signs of life, so that an error can name the rank that is gone.

Note [Who is gone]
    gloo reports a lost connection but not whose, and NCCL may report nothing but a
    timeout. Each process counts seconds in the store, in a thread of its own. Whoever
    meets an error looks whose count stands still, and leaves its verdict in the store
    for those who meet theirs later, when it may be gone itself.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

PULSE_SECONDS = 1.0
PATIENCE_SECONDS = 5.0


class Pulse:
    """A daemon thread that counts in ``store`` until it is stopped."""

    def __init__(self, store: Any, rank: int, world: int) -> None:
        self._store, self._rank, self._world = store, rank, world
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

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
                self._store.add(f"pulse/{self._rank}", 1)
                if self._stopped.wait(PULSE_SECONDS):
                    return

    def _look(self) -> str:
        still = {rank: self._count(rank) for rank in range(self._world)}
        end = time.monotonic() + PATIENCE_SECONDS
        while still and time.monotonic() < end:
            time.sleep(PULSE_SECONDS / 4)
            still = {r: n for r, n in still.items() if self._count(r) == n}
        if not still:
            return "All ranks live: one is stuck, or they do not do the same things."
        who = f"Rank {min(still)} is" if len(still) == 1 else f"Ranks {[*still]} are"
        return f"{who} gone: no sign of life for {PATIENCE_SECONDS:g} s."

    def _count(self, rank: int) -> int:
        return self._store.add(f"pulse/{rank}", 0)
