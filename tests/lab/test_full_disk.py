"""A run goes on, and ends as it should, where nothing more can be written."""

import errno
import resource
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from natgrad_lab.cli import main
from natgrad_lab.train import metrics
from natgrad_lab.train.loop import Trainer
from natgrad_lab.train.metrics import MetricsWriter
from natgrad_lab.train.records import read_looks, read_metrics

QUICK = ["--steps", "4", "--batch", "64", "--model.width", "4", "--diagnostics", "1"]
SAID = ("diagnostics.jsonl cannot", "TensorBoard events cannot", "Checkpoint: step")
ROOM = 6000


@contextmanager
def files_of_at_most(size: int) -> Generator[None]:
    """The system's own limit: writing more raises in every thread.

    Processes started inside would be killed by it, git with a lock in its hands.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_run_ends_as_it_should_where_no_file_can_grow(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = tmp_path / "run"
    monkeypatch.setattr("natgrad_lab.train.run.git_state", lambda: None)
    command = ["train", "digits-kfac", *QUICK, "--tensorboard", "--out", str(run)]
    with files_of_at_most(ROOM), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert main(command) == 4
    said = [str(each.message) for each in seen]
    for what in SAID:
        assert sum(what in each for each in said) == 1, what
    shown = capsys.readouterr()
    assert "curves.png could not be drawn" in shown.err
    assert "the last checkpoint could not be written" in shown.out
    assert all(p.stat().st_size <= ROOM for p in run.rglob("*") if p.is_file())


def test_looks_are_written_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    look = Trainer._look

    def tight(self: Trainer, record: dict[str, Any]) -> None:
        with files_of_at_most(ROOM if record["step"] < 3 else resource.RLIM_INFINITY):
            look(self, record)

    monkeypatch.setattr(Trainer, "_look", tight)
    with pytest.warns(UserWarning, match=r"diagnostics\.jsonl cannot be written"):
        assert main(["train", "digits-kfac", *QUICK, "--out", str(run)]) == 0
    assert [record["step"] for record in read_looks(run)] == [0, 1, 2, 3]


class Board:
    """Stands in for a SummaryWriter on a disk that is full, or is not."""

    full = True
    made = 0

    def __init__(self, _: Path) -> None:
        Board.made += 1
        self.seen: list[str] = []

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        if Board.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.seen.append(tag)

    def close(self) -> None:
        """There is nothing to write."""


def test_a_failed_writer_of_events_is_replaced_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(metrics, "_event_writer", Board)
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now[0])
    writer = MetricsWriter(tmp_path, tensorboard=True)
    with pytest.warns(UserWarning, match="TensorBoard events cannot be written"):
        writer.write("start", 1, loss=1.0)
    Board.full = False
    writer.write("start", 2, loss=1.0)
    assert Board.made == 1, "not at once"
    now[0] += 61
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        writer.write("start", 3, loss=1.0)
    assert Board.made == 2
    writer.close()
    steps = [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")]
    assert steps == [1, 2, 3]
