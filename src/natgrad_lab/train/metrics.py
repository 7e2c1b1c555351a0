"""Append-only records of a run, and the clock that fills them."""

import json
import time
from collections import defaultdict
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class MetricsWriter:
    """Appends one JSON object a line; optionally TensorBoard events as well."""

    def __init__(self, folder: Path, *, tensorboard: bool = False) -> None:
        self._file = (folder / "metrics.jsonl").open("a", encoding="utf-8")
        self._events = _event_writer(folder) if tensorboard else None

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Append a record and flush it, so that a crash loses at most one line."""
        record = {"kind": kind, "step": step, **values}
        self._file.write(json.dumps(record, allow_nan=True) + "\n")
        self._file.flush()
        if self._events is not None:
            for name, value in _scalars(values):
                self._events.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        if self._events is not None:
            self._events.close()


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
    """Seconds by phase since the last `take`, and training seconds in all."""

    def __init__(self, total: float = 0.0) -> None:
        self.total = total
        self._phases: dict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Count the time spent inside under ``name``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - start
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
