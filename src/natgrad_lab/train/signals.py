"""Ctrl-C and SIGTERM as a request to stop after the current step."""

import signal
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Whether somebody asked to stop; the second Ctrl-C is not held back."""

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        signal.signal(number, self._before[number])

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
