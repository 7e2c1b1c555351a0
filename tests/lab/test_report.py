"""Summaries, tables and figures, from records written by hand."""

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from natgrad_lab.errors import UserError
from natgrad_lab.report.curves import draw, title
from natgrad_lab.report.summary import Reached, summarise
from natgrad_lab.report.table import run_table
from natgrad_lab.train import run as runs
from natgrad_lab.train.config import OptimizerConfig, TrainConfig
from natgrad_lab.train.metrics import MetricsWriter


def write_run(folder: Path, accuracies: list[float], *, end: bool = True) -> Path:
    """A run that is evaluated every 10 steps of a tenth of a second."""
    settings = TrainConfig(targets=(90.0,), optimizer=OptimizerConfig(kfac=True))
    runs.create(folder, "made-up", settings)
    writer = MetricsWriter(folder)
    for index, accuracy in enumerate(accuracies, 1):
        step, seconds = 10 * index, float(index)
        train = {"loss": 1 / index, "lr": 0.1, "reduction": 0.25}
        spent = {"seconds": seconds, "cpu_seconds": 2 * seconds}
        writer.write(
            "train", step, phases={"data": 0.2, "forward": 0.8}, **train, **spent
        )
        writer.write("test", step, epoch=1.0, loss=0.5, accuracy=accuracy, **spent)
    if end:
        writer.write("end", 10 * len(accuracies), reason="done", seconds=9.0)
    writer.close()
    return folder


def test_a_summary_finds_the_first_time_a_target_was_reached(tmp_path: Path) -> None:
    summary = summarise(write_run(tmp_path / "a", [50.0, 91.0, 89.0, 95.0]))
    assert summary.reached == {90.0: Reached(step=20, seconds=2.0, cpu_seconds=4.0)}
    assert (summary.best, summary.last) == (95.0, 95.0)
    assert (summary.steps, summary.ending) == (40, "done")
    assert (summary.seconds, summary.cpu_seconds) == (9.0, 8.0)
    assert summary.waiting == pytest.approx(0.2)
    assert summary.reduction == 0.25


def test_other_targets_can_be_asked_for(tmp_path: Path) -> None:
    summary = summarise(write_run(tmp_path / "a", [50.0, 91.0]), targets=(99.0, 40.0))
    assert summary.reached[99.0] is None
    assert summary.reached[40.0] == Reached(step=10, seconds=1.0, cpu_seconds=2.0)


def test_runs_stand_side_by_side(tmp_path: Path) -> None:
    one = summarise(write_run(tmp_path / "one", [50.0, 91.0]))
    two = summarise(write_run(tmp_path / "two", [50.0], end=False))
    table = run_table([one, two])
    assert table.row_count == 2
    cells = {str(c.header): list(c.cells) for c in table.columns}
    assert cells["run"] == ["one", "two"]
    assert cells["steps to 90 %"] == ["20", "-"]
    assert cells["s to 90 %"] == ["2.0", "-"]
    assert cells["best %"] == ["91.00", "50.00"]
    assert cells["ending"] == ["done", "unfinished"]


def test_what_the_data_are_stands_beside_the_accuracy(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", [50.0])
    two = write_run(tmp_path / "two", [60.0])
    runs.note_data(runs.load(one), "CIFAR-10 (JPEG)")
    summaries = [summarise(one), summarise(two)]
    cells = {str(c.header): list(c.cells) for c in run_table(summaries).columns}
    assert cells["data"] == ["CIFAR-10 (JPEG)", "digits"]  # a run without: the name
    assert title(summaries) == "CIFAR-10 (JPEG), digits"
    assert title(summaries[:1] * 2) == "CIFAR-10 (JPEG)"


def test_the_figures_title_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    titles: list[str] = []
    monkeypatch.setattr(Figure, "suptitle", lambda _, text, **__: titles.append(text))
    folder = write_run(tmp_path / "a", [50.0])
    runs.note_data(runs.load(folder), "CIFAR-10 (JPEG)")
    draw([summarise(folder)], tmp_path / "figure.png")
    assert titles == ["CIFAR-10 (JPEG)"]


def test_the_figure_is_a_png(tmp_path: Path) -> None:
    summary = summarise(write_run(tmp_path / "a", [50.0, 91.0]))
    path = draw([summary, summary], tmp_path / "deep" / "figure.png", ["x", "y"])
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_run_that_never_trained_is_named(tmp_path: Path) -> None:
    runs.create(tmp_path, "made-up", TrainConfig())
    with pytest.raises(UserError, match=r"no metrics\.jsonl"):
        summarise(tmp_path)
