"""Run an iterator ahead in a background thread."""

import queue
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class _Failure:
    error: BaseException


class _End:
    """Nothing more will come."""


class Prefetcher(Generic[T]):
    """An iterator whose items are made ahead of need.

    `waited` counts the seconds its user spent waiting for items. An error in the
    iterator is raised where the item would have been.

    Args:
        items: what to iterate over, in the thread.
        depth: how many items to keep ready; 0 makes each when it is asked for.
    """

    def __init__(self, items: Iterator[T], depth: int) -> None:
        if depth < 0:
            raise ValueError(f"Invalid {depth=}. Must be >= 0.")
        self.waited = 0.0
        self._items = items if depth == 0 else self._start(items, depth)

    def __iter__(self) -> "Prefetcher[T]":
        return self

    def __next__(self) -> T:
        start = time.perf_counter()
        try:
            return next(self._items)
        finally:
            self.waited += time.perf_counter() - start

    def close(self) -> None:
        """Stop the thread; nothing more comes."""
        self._items = iter(())
        if hasattr(self, "_finish"):
            self._finish()

    def _start(self, items: Iterator[T], depth: int) -> Iterator[T]:
        ready: queue.Queue[T | _Failure | _End] = queue.Queue(depth)
        stop = threading.Event()
        # the thread must not hold this object, or it would never be collected
        thread = threading.Thread(
            target=_fill, args=(items, ready, stop), daemon=True, name="natgrad-data"
        )
        self._finish = weakref.finalize(self, _stop, thread, stop)
        thread.start()
        return _drain(ready)


def _drain(ready: "queue.Queue[T | _Failure | _End]") -> Iterator[T]:
    while True:
        item = ready.get()
        if isinstance(item, _End):
            return
        if isinstance(item, _Failure):
            raise item.error
        yield item


def _fill(
    items: Iterator[T],
    ready: "queue.Queue[T | _Failure | _End]",
    stop: threading.Event,
) -> None:
    try:
        for item in items:
            if not _put(ready, item, stop):
                return
        _put(ready, _End(), stop)
    except BaseException as error:
        _put(ready, _Failure(error), stop)


def _put(
    ready: "queue.Queue[T | _Failure | _End]",
    item: T | _Failure | _End,
    stop: threading.Event,
) -> bool:
    """Hand over an item; False when told to stop."""
    while not stop.is_set():
        try:
            ready.put(item, timeout=0.05)
        except queue.Full:
            continue
        return True
    return False


def _stop(thread: threading.Thread, stop: threading.Event) -> None:
    stop.set()
    # a collection can run in the thread itself, which cannot wait for its own end
    if thread is not threading.current_thread():
        thread.join(timeout=5)
