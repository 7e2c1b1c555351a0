"""What the commands print: fast to come, readable in a narrow window, or in a pipe."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.table import Table
from tests.lab.test_report import write_run

from natgrad_lab.cli import main
from natgrad_lab.console import fitted
from natgrad_lab.recipes import RECIPES

NARROW = 80
WATCHED = ("torch", "natgrad", "optuna", "matplotlib", "sklearn")
SMALL = ["--model", "mlp"]


def imported(arguments: Sequence[str]) -> set[str]:
    """Packages that a command line imports, in a process of its own."""
    command = [sys.executable, "-X", "importtime", "-m", "natgrad_lab", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    names = re.findall(r"\|\s+([\w.]+)$", done.stderr, re.M)
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize(
    "arguments",
    [["recipes", "digits"], ["train", "--help"], ["train", "digits-sgd", "--help"]],
    ids=" ".join,
)
def test_what_only_prints_imports_nothing_that_trains(arguments: list[str]) -> None:
    found = imported(arguments)
    assert "natgrad_lab" in found
    assert found.isdisjoint(WATCHED)


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(NARROW))


def printed(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert main(list(arguments)) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.usefixtures("narrow")
def test_recipes_fit_into_a_narrow_window(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(["recipes"], capsys)
    assert max(map(len, lines)) <= NARROW
    for name, recipe in RECIPES.items():
        (line,) = [each for each in lines if each.split()[:1] == [name]]
        assert line.split()[1:4] == [
            recipe.config.optimizer.label,
            str(recipe.config.batch),
            f"{recipe.config.epochs:g}",
        ]


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize(
    ("arguments", "whole"),
    [
        (["simulate", *SMALL, "--epochs", "90"], ["reduce_statistics", "precondition"]),
        (["plan", *SMALL], ["reduce_statistics", "activations", "packed, half"]),
    ],
    ids=["simulate", "plan"],
)
def test_no_cell_is_cut_in_a_narrow_window(
    arguments: list[str], whole: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = printed(arguments, capsys)
    assert max(map(len, lines)) <= NARROW
    assert "…" not in "".join(lines)
    for text in whole:
        assert any(text in line for line in lines), text


@pytest.mark.usefixtures("narrow")
def test_compare_in_a_narrow_window(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [f"digits-polar-20240101-12000{i}" for i in range(5)]
    folders = [str(write_run(tmp_path / name, [50.0, 91.23])) for name in names]
    figure = ["--figure", str(tmp_path / "x.png")]
    lines = printed(["compare", *folders, *figure], capsys)[:-1]
    assert max(map(len, lines)) <= NARROW
    numbers = [re.findall(r"91\.23", line) for line in lines if "best %" in line]
    assert sum(map(len, numbers)) == len(names), "each accuracy is whole, on its line"


def test_a_table_that_fits_stays_as_it_is() -> None:
    table = Table("a", "b")
    table.add_row("1", "2")
    assert fitted(table, 20) == [table]
    (turned,) = fitted(table, 5)
    assert [str(c.header) for c in turned.columns] == ["a", "1"]


def test_the_plan_names_its_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(["plan", *SMALL], capsys)[0].startswith("mlp: ")


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = printed(["--version"], capsys)
    assert re.fullmatch(r"natgrad \d+\.\S+, torch \d+\.\S+, Python \d+\.\S+", line)


TABLE = """
from rich.table import Table
from natgrad_lab import cli, console
cli.COMMANDS["recipes"] = lambda _: console.show(Table("a")) or 0
raise SystemExit(cli.main(["recipes"]))
"""


@pytest.mark.parametrize(
    "program", [["-m", "natgrad_lab", "recipes"], ["-c", TABLE]], ids=["text", "table"]
)
def test_a_reader_that_has_seen_enough_is_no_error(program: list[str]) -> None:
    """As `natgrad recipes | head`, but the reader is gone before the first line."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, *program]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_pipe_that_is_not_the_output_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> int:
        raise BrokenPipeError("of a database")

    monkeypatch.setattr("natgrad_lab.recipes.command.main", broken)
    assert main(["recipes"]) == 2
    assert "of a database" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [["train", "digits-sgd", "--out", ""], ["demo", "--out="], ["train", "--resume="]],
    ids=" ".join,
)
def test_an_empty_folder_is_no_folder(
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert "Must not be empty" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
