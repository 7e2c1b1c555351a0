"""Append-only records of a run, and the clock that fills them."""

import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import torch

from natgrad import sinks
from natgrad_lab.train.records import LOOKS, METRICS, Record


class MetricsWriter:
    """Appends one JSON object a line; optionally TensorBoard events as well.

    What a full disk does not take is kept in memory and written when it does.
    """

    def __init__(self, folder: Path, *, tensorboard: bool = False) -> None:
        self._records = sinks.JsonlSink(folder / METRICS)
        self._events = _Events(folder / "tensorboard") if tensorboard else None
        self._folder = folder
        self._looks: sinks.JsonlSink | None = None

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Append a record at once, so that a crash loses at most one line."""
        self._records({"kind": kind, "step": step, **values})
        if self._events is not None:
            for name, value in _scalars(values):
                self._events.add_scalar(f"{kind}/{name}", value, step)

    def look(self, record: Record) -> None:
        """Append a record of `watch` to a file of its own, and to TensorBoard."""
        if self._looks is None:
            self._looks = sinks.JsonlSink(self._folder / LOOKS)
        self._looks(record)
        if self._events is not None:
            sinks.TensorBoardSink(self._events)(record)

    def close(self) -> None:
        """Close the files."""
        for each in (self._records, self._looks, self._events):
            if each is not None:
                each.close()


class _Events:
    """TensorBoard's writer. One that has failed is replaced a minute later.

    A failed one takes nothing any more; what it had not written is only in the other
    files.
    """

    PAUSE = 60.0

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None
        self._resumes = 0.0
        self._warned = False

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """As `SummaryWriter` does it; never raises because of the disk."""
        if time.monotonic() < self._resumes:
            return
        try:
            if self._writer is None:
                self._writer = _event_writer(self._folder)
            self._writer.add_scalar(tag, scalar_value, global_step)
        except OSError as error:
            self._fail(error)

    def close(self) -> None:
        """Write what is queued, if that is possible."""
        try:
            if self._writer is not None:
                self._writer.close()
        except OSError as error:
            self._warn(error)

    def _fail(self, error: OSError) -> None:
        self._warn(error)
        self._resumes = time.monotonic() + self.PAUSE
        with suppress(OSError):
            if self._writer is not None:
                self._writer.close()
        self._writer = None

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            text = f"TensorBoard events cannot be written ({error.strerror}): some "
            warnings.warn(text + "will be missing.", stacklevel=4)


class Mark(Protocol):
    """A moment, as `torch.cuda.Event` has it."""

    def record(self) -> None:
        """That moment is when what was asked for until now is done."""
        ...

    def synchronize(self) -> None:
        """Wait for it."""
        ...

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this one to another."""
        ...


class Moment:
    """A `Mark` of a processor, which is done with what it was asked for at once."""

    def __init__(self) -> None:
        self._at = 0.0

    def record(self) -> None:
        self._at = time.perf_counter()

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def elapsed_time(self, end_event: "Moment") -> float:
        return 1e3 * (end_event._at - self._at)


class Clock:
    """Seconds by phase since the last `take`, and training seconds in all.

    A device works behind the program that tells it what to do. So phases are between
    moments of the device: what it spent on each, and under "data" what it waited. They
    are read only when somebody asks, since that waits for the device.

    ``total`` is what the wall clock says, ``cpu`` what the processor spent on all
    threads of this process: on a shared machine only the second compares runs.

    Args:
        mark: makes a moment.
    """

    def __init__(self, mark: Callable[[], Mark] = Moment) -> None:
        self.cpu = 0.0
        self._mark = mark
        self._total = 0.0
        self._phases: dict[str, float] = defaultdict(float)
        self._open: list[tuple[str, Mark, Mark]] = []

    @classmethod
    def of(cls, device: torch.device) -> "Clock":
        """The clock of a device."""
        if device.type != "cuda":
            return cls()
        return cls(lambda: torch.cuda.Event(enable_timing=True))

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Count the time spent inside under ``name``."""
        start, end, cpu = self._mark(), self._mark(), time.process_time()
        start.record()
        try:
            yield
        finally:
            end.record()
            self.cpu += time.process_time() - cpu
            self._open.append((name, start, end))

    @property
    def total(self) -> float:
        """Seconds of all phases so far."""
        self._read()
        return self._total

    @total.setter
    def total(self, seconds: float) -> None:
        self._read()
        self._total = seconds

    def take(self) -> dict[str, float]:
        """Seconds by phase, and start again."""
        self._read()
        phases = {name: round(value, 6) for name, value in self._phases.items()}
        self._phases.clear()
        return phases

    def _read(self) -> None:
        if self._open:
            self._open[-1][2].synchronize()
        for name, start, end in self._open:
            spent = start.elapsed_time(end) / 1e3
            self._phases[name] += spent
            self._total += spent
        self._open.clear()


def waiting_share(phases: dict[str, float]) -> float:
    """Share of the time spent waiting for the loader."""
    total = sum(phases.values())
    return phases.get("data", 0.0) / total if total else 0.0


def _event_writer(folder: Path) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder))


def _scalars(values: Record) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{key}", item) for key, item in _scalars(value))
        elif isinstance(value, int | float):
            yield name, float(value)
