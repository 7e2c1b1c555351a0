"""Ctrl-C and SIGTERM as a request to stop after the current step."""

import signal
import time
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


ECHO_SECONDS = 2.0
"""A launcher passes on a signal that its workers have got too."""


class StopRequest:
    """Whether somebody asked to stop, and by which signal first.

    A second Ctrl-C, later, is not held back.

    SIGTERM is: schedulers and launchers repeat it, and then send SIGKILL.
    """

    def __init__(self) -> None:
        self.asked, self.number = False, 0
        self._first = 0.0
        self._before: dict[int, Any] = {}

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.asked:
            self.asked, self.number, self._first = True, number, now
        elif number == signal.SIGINT and now - self._first > ECHO_SECONDS:
            raise KeyboardInterrupt

    def listen(self) -> None:
        """Start to catch signals."""
        self._before = {number: signal.signal(number, self) for number in SIGNALS}

    def release(self) -> None:
        """Put the old handlers back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)


@contextmanager
def stop_request() -> Generator[StopRequest]:
    """Catch signals inside the block."""
    request = StopRequest()
    request.listen()
    try:
        yield request
    finally:
        request.release()
