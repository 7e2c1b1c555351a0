"""What a run has written down: metrics.jsonl and diagnostics.jsonl, read and checked.

Needs neither torch nor natgrad, so that commands that only read start fast.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from natgrad_lab.errors import UserError
from natgrad_lab.schema import SchemaError, build

Record = dict[str, Any]
METRICS = "metrics.jsonl"
"""The records of training in a run's folder."""
LOOKS = "diagnostics.jsonl"
"""The records of `watch` in a run's folder."""


class _Any(TypedDict):
    kind: str
    step: int


class _Train(_Any):
    loss: float
    lr: float
    seconds: float
    phases: dict[str, float]
    reduction: NotRequired[float]
    refreshes: NotRequired[list[list[Any]]]
    statistics: NotRequired[list[str]]


class _Test(_Any):
    epoch: float
    loss: float
    accuracy: float
    seconds: float


class _Start(_Any):
    loss: float


class _End(_Any):
    reason: str


KINDS = {"train": _Train, "test": _Test, "start": _Start, "end": _End}


class _Block(TypedDict):
    largest: NotRequired[float | None]


class _Statistic(TypedDict):
    kind: str
    refreshed: int
    packed_bytes: int
    change: float | None


class _Look(TypedDict):
    step: int
    steps: int
    world: int
    seconds: dict[str, float]
    traffic: dict[str, float]
    blocks: dict[str, _Block]
    statistics: dict[str, _Statistic]


def read_metrics(path: Path) -> list[Record]:
    """The records that count: those a resume took back are left out."""
    records: list[Record] = []
    for record in _read(path, _metric):
        if record["kind"] == "resume":
            records = [old for old in records if old["step"] <= record["step"]]
        records.append(record)
    return records


def read_looks(folder: Path) -> list[Record]:
    """A run's looks in the order of steps; what a resume took back is left out."""
    path = folder / LOOKS
    if not path.is_file():
        raise UserError(
            f"{folder} has no {LOOKS}. Train with --diagnostics STEPS to record it."
        )
    records: list[Record] = []
    for record in _read(path, lambda value: build(_Look, value)):
        records = [old for old in records if old["step"] < record["step"]]
        records.append(record)
    if not records:
        raise UserError(f"{path} has no complete record yet.")
    return records


def _metric(value: Any) -> Record:
    kind = build(_Any, value)["kind"]
    return build(KINDS.get(kind, _Any), value)


def _read(path: Path, parse: Callable[[Any], Record]) -> Iterator[Record]:
    """Records of a file; one that a crash has cut short is left out.

    Anything else that is no record is an error that names the line.
    """
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        line = line.strip(b" \r\0")  # a power failure may leave zeros
        if not line or (line.startswith(b"{") and not line.endswith(b"}")):
            continue
        try:
            yield parse(json.loads(line))
        except (ValueError, RecursionError, SchemaError) as error:
            raise UserError(f"{path}, line {number} is damaged: {error}") from error
