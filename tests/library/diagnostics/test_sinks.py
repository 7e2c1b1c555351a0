"""Sinks of diagnostics: what they write, and that a full disk ends nothing."""

import errno
import json
import os
import warnings
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
from tests.support.toys import mlp, sgd
from tests.support.toys import train as run

from natgrad import sinks
from natgrad.diagnostics.sinks import JsonlSink, TensorBoardSink


class Writer:
    """Stands in for a SummaryWriter."""

    def __init__(self) -> None:
        self.seen: dict[tuple[str, int], float] = {}
        self.full = False

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.seen[tag, global_step] = scalar_value


class Disk:
    """Files of a sink on a disk with so much room."""

    def __init__(self) -> None:
        self.room = 10**9

    def open(self, *args: Any) -> FileIO:
        if self.room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        disk = self

        class File(FileIO):
            def write(self, data: Any, /) -> int:
                part = data[: disk.room]
                if not part:
                    raise OSError(errno.ENOSPC, "No space left on device")
                disk.room -= len(part)
                return super().write(part)

        return File(*args)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    made = Disk()
    monkeypatch.setattr(sinks, "FileIO", made.open)
    return made


def read(path: Path) -> list[int]:
    """The steps in a file, each line of which must be whole."""
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_what_they_write(tmp_path: Path) -> None:
    model, writer = mlp(), Writer()
    optimizer, kfac = sgd(model)
    jsonl, board = JsonlSink(tmp_path / "looks.jsonl"), TensorBoardSink(writer)

    def both(record: dict[str, Any]) -> None:
        jsonl(record)
        board(record)

    kfac.watch(every=2, sink=both)
    run(model, optimizer, range(5))
    jsonl.close()
    lines = (tmp_path / "looks.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["step"] for record in records] == [0, 2, 4]
    assert records[-1] == kfac.diagnostics()
    angle = kfac.diagnostics()["blocks"]["0"]["angle"]
    assert writer.seen["diagnostics/angle/0", 4] == angle
    assert ("diagnostics/motion/0", 0) not in writer.seen


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_does_not_end_a_watched_run() -> None:
    model = mlp()
    optimizer, kfac = sgd(model)
    sink = JsonlSink("/dev/full")
    kfac.watch(every=1, sink=sink)
    with pytest.warns(UserWarning, match=r"/dev/full.*No space.*kept until") as seen:
        run(model, optimizer, range(4))
    assert len(seen) == 1
    with pytest.warns(UserWarning, match="4 records are missing in /dev/full"):
        sink.close()


def test_records_are_kept_until_there_is_room(tmp_path: Path, disk: Disk) -> None:
    path = tmp_path / "looks.jsonl"
    sink = JsonlSink(path)
    sink({"step": 0})
    disk.room = 5  # half of a line
    with pytest.warns(UserWarning, match="cannot be written"):
        sink({"step": 1})
    sink({"step": 2})
    assert path.stat().st_size == len('{"step": 0}\n') + 5
    disk.room = 10**6
    sink({"step": 3})
    assert read(path) == [0, 1, 2, 3]
    disk.room = 0
    sink({"step": 4})
    disk.room = 10**6
    sink.close()
    assert read(path) == [0, 1, 2, 3, 4]


def test_a_file_that_cannot_even_be_made_is_made_later(
    tmp_path: Path, disk: Disk
) -> None:
    disk.room = 0
    with pytest.warns(UserWarning, match="kept until it can"):
        sink = JsonlSink(tmp_path / "looks.jsonl")
    sink({"step": 0})
    disk.room = 10**6
    sink({"step": 1})
    sink.close()
    assert read(tmp_path / "looks.jsonl") == [0, 1]


def test_a_wrong_path_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        JsonlSink(tmp_path / "nowhere" / "looks.jsonl")


def test_what_is_kept_is_bounded(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks, "KEPT_BYTES", 60)
    path = tmp_path / "looks.jsonl"
    sink = JsonlSink(path)
    disk.room = 5
    with pytest.warns(UserWarning, match="cannot be written"):
        sink({"step": 10})
    for step in range(11, 30):
        sink({"step": step})
    assert sum(map(len, sink._kept)) <= 60
    disk.room = 10**6
    sink({"step": 30})
    # the first was begun, the others are the last; all lines are whole
    assert read(path) == [10, 26, 27, 28, 29, 30]
    with pytest.warns(UserWarning, match="15 records are missing"):
        sink.close()


def test_a_line_cut_short_by_a_crash_does_not_swallow_the_next(tmp_path: Path) -> None:
    path = tmp_path / "looks.jsonl"
    path.write_text('{"step": 0}\n{"st')
    sink = JsonlSink(path)
    sink({"step": 1})
    sink.close()
    assert path.read_text() == '{"step": 0}\n{"st\n{"step": 1}\n'


def test_a_pipe_is_a_file_too() -> None:
    here, there = os.pipe()
    sink = JsonlSink(f"/proc/self/fd/{there}")
    sink({"step": 1})
    assert os.read(here, 100) == b'{"step": 1}\n'
    sink.close()
    for end in (here, there):
        os.close(end)


def test_a_board_that_fails_is_left_alone() -> None:
    writer = Writer()
    board = TensorBoardSink(writer)
    record: dict[str, Any] = {"step": 1, "blocks": {"a": {"kl": 1.0}}, "statistics": {}}
    board(record)
    writer.full = True
    with pytest.warns(UserWarning, match=r"events cannot be written .*No space"):
        board(record)
    writer.full = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        board(record | {"step": 2})
    assert list(writer.seen) == [("diagnostics/kl/a", 1)]
