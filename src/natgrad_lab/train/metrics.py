"""Append-only records of a run, and the clock that fills them."""

import json
import os
import time
import warnings
from collections import defaultdict
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from natgrad.sinks import JsonlSink, TensorBoardSink

Record = dict[str, Any]
LOOKS = "diagnostics.jsonl"
"""The records of `watch` in a run's folder."""


class MetricsWriter:
    """Appends one JSON object a line; optionally TensorBoard events as well.

    What a full disk does not take is kept in memory and written when it does.
    """

    def __init__(self, folder: Path, *, tensorboard: bool = False) -> None:
        self._path = folder / "metrics.jsonl"
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self._file = os.open(self._path, flags, 0o644)
        # a crash may have cut the last line short: the next must not join it
        self._kept = b"" if _ends_a_line(self._path) else b"\n"
        self._warned = False
        self._events = _event_writer(folder) if tensorboard else None
        self._folder = folder
        self._sinks: list[Any] = []

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Append a record at once, so that a crash loses at most one line."""
        record = {"kind": kind, "step": step, **values}
        self._kept += json.dumps(record, allow_nan=True).encode() + b"\n"
        self._flush()
        if self._events is not None:
            for name, value in _scalars(values):
                self._events.add_scalar(f"{kind}/{name}", value, step)

    def look(self, record: Record) -> None:
        """Append a record of `watch` to a file of its own, and to TensorBoard."""
        if not self._sinks:
            self._sinks = [JsonlSink(self._folder / LOOKS)]
            if self._events is not None:
                self._sinks.append(TensorBoardSink(self._events))
        for sink in self._sinks:
            sink(record)

    def _flush(self) -> None:
        try:
            while self._kept:
                self._kept = self._kept[os.write(self._file, self._kept) :]
        except OSError as error:
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"{self._path} cannot be written ({error.strerror}): records are "
                    "kept until it can.",
                    stacklevel=3,
                )

    def close(self) -> None:
        """Close the files."""
        self._flush()
        os.close(self._file)
        for sink in self._sinks[:1]:
            sink.close()
        if self._events is not None:
            self._events.close()


def _ends_a_line(path: Path) -> bool:
    content = path.read_bytes()
    return not content or content.endswith(b"\n")


def read_metrics(path: Path) -> list[Record]:
    """The records that count: those a resume took back are left out.

    A last line cut short by a crash is ignored.
    """
    records: list[Record] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if record["kind"] == "resume":
            records = [old for old in records if old["step"] <= record["step"]]
        records.append(record)
    return records


class Clock:
    """Seconds by phase since the last `take`, and training seconds in all.

    ``total`` is what the wall clock says, ``cpu`` what the processor spent on all
    threads of this process: on a shared machine only the second compares runs.
    """

    def __init__(self) -> None:
        self.total = 0.0
        self.cpu = 0.0
        self._phases: dict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Count the time spent inside under ``name``."""
        start, cpu = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            spent = time.perf_counter() - start
            self.cpu += time.process_time() - cpu
            self._phases[name] += spent
            self.total += spent

    def take(self) -> dict[str, float]:
        """Seconds by phase, and start anew."""
        phases = {name: round(value, 6) for name, value in self._phases.items()}
        self._phases.clear()
        return phases


def waiting_share(phases: dict[str, float]) -> float:
    """Share of the time spent waiting for the loader."""
    total = sum(phases.values())
    return phases.get("data", 0.0) / total if total else 0.0


def _event_writer(folder: Path) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder / "tensorboard"))


def _scalars(values: Record) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{key}", item) for key, item in _scalars(value))
        elif isinstance(value, int | float):
            yield name, float(value)
