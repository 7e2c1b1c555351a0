"""Every command that the pages show is one that exists, options included."""

import contextlib
import importlib.util
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import tyro
from tests.support.pages import PAGES, ROOT, blocks, relative, spans
from torch.distributed.run import get_args_parser

from natgrad_lab.cli import COMMANDS, main
from natgrad_lab.recipes import RECIPES

WITH_COMMANDS = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md"]
CONSOLE = ("console", "")
HARMLESS = ("pip", "git", "cd", "optuna-dashboard")
STANDS_FOR = {"RECIPE": "digits-kfac", "NAME": "cifar10", "RUN...": "RUN"}
TARGETS = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)


class ParsedError(Exception):
    """Raised where a command would begin to do something."""


@pytest.fixture
def parse_only(monkeypatch: pytest.MonkeyPatch) -> None:
    real = tyro.cli

    def parse(*args: Any, **options: Any) -> None:
        real(*args, **options)
        raise ParsedError

    monkeypatch.setattr(tyro, "cli", parse)


def lines(block: str) -> list[list[str]]:
    """The words of each command, without comments and settings of the environment."""
    joined = block.replace("\\\n", " ").splitlines()
    found = [shlex.split(line, comments=True) for line in joined]
    for words in found:
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            words.pop(0)
    return [words for words in found if words]


def problem(words: Sequence[str]) -> str | None:
    """Why a command line would not work; None if it would."""
    program, rest = words[0], list(words[1:])
    if program == "natgrad":
        return refused(rest)
    if program == "torchrun":
        asked = get_args_parser().parse_args(rest)
        return refused(asked.training_script_args) if asked.module else None
    if program == "srun":  # what it launches begins at a program that is known
        known = [i for i, word in enumerate(rest) if word in ("natgrad", "torchrun")]
        return problem(rest[known[0] :]) if known else "launches nothing known"
    if program == "make":
        return None if rest and {*rest} <= {*TARGETS} else "no such target"
    if program == "python":
        return without_module(rest)
    return None if program in HARMLESS else "unknown program"


def refused(arguments: Sequence[str]) -> str | None:
    words = [STANDS_FOR.get(word, word) for word in arguments]
    try:
        status = main(words)
    except ParsedError:
        return None
    except SystemExit as end:
        status = end.code
    return None if status == 0 else f"exit status {status}"


def without_module(arguments: Sequence[str]) -> str | None:
    if arguments[0] != "-m":
        return None if (ROOT / arguments[0]).is_file() else "no such file"
    return None if importlib.util.find_spec(arguments[1]) else "no such module"


def commands(path: Path) -> Iterator[list[str]]:
    for block in blocks(path, *CONSOLE):
        yield from lines(block)


@pytest.mark.usefixtures("parse_only")
@pytest.mark.parametrize("path", WITH_COMMANDS, ids=relative)
def test_the_commands_of_a_page_would_run(path: Path) -> None:
    wrong = {shlex.join(each): problem(each) for each in commands(path)}
    assert {line: why for line, why in wrong.items() if why} == {}


def test_the_pages_with_commands_are_found() -> None:
    shown = [words for path in WITH_COMMANDS for words in commands(path)]
    assert len(shown) > 12
    assert {words[0] for words in shown} >= {"natgrad", "torchrun", "make"}


@pytest.mark.usefixtures("parse_only")
@pytest.mark.parametrize(
    "line",
    [
        "natgrad train ma2019-kfac-1024 --damping 0.01",
        "natgrad train no-such-recipe",
        "natgrad frobnicate",
        "natgrad study run",
        "torchrun --nproc-per-node 2 -m natgrad_lab train digits-sgd --lr 1",
        "make coffee",
        "python -m benchmarks.gone",
        "frobnicate",
    ],
)
def test_a_command_that_would_not_run_is_noticed(line: str) -> None:
    assert problem(shlex.split(line)) is not None


# -- commands inside of sentences ---------------------------------------------------


def named(path: Path) -> Iterator[list[str]]:
    """Spans that are commands, maybe without the arguments that they need."""
    for span in spans(path):
        words = span.split()
        if words[0] in ("natgrad", "make", "python") and len(words) > 1:
            yield words


def unknown(words: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Words of a span that its program does not know."""
    if words[0] != "natgrad":
        return [] if problem(words) is None else words
    if words[1] not in COMMANDS:
        return words[1:2]
    options = [word for word in words if word.startswith("--")]
    if not options:
        return []
    before = [STANDS_FOR.get(w, w) for w in words[1 : words.index(options[0])]]
    with contextlib.suppress(SystemExit):
        main([*before, "--help"])
    known = re.findall(r"--[a-z][\w.-]*", capsys.readouterr().out)
    return [option for option in options if option not in known]


@pytest.mark.parametrize("path", WITH_COMMANDS, ids=relative)
def test_commands_in_sentences_exist(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = {" ".join(words): unknown(words, capsys) for words in named(path)}
    assert {span: why for span, why in wrong.items() if why} == {}


def test_a_command_in_a_sentence_that_is_gone_is_noticed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert unknown(shlex.split("natgrad train RECIPE --diagnose 5"), capsys)
    assert unknown(shlex.split("natgrad brew"), capsys)
    assert not unknown(shlex.split("natgrad train RECIPE --diagnostics 5"), capsys)


# -- recipes ------------------------------------------------------------------------


def test_every_recipe_is_in_the_table_of_reproducing() -> None:
    rows = re.findall(
        r"^\| `(\S+)`(?: \.\.\. `(\S+)`)? \|",
        (ROOT / "docs" / "reference" / "reproducing.md").read_text(),
        re.M,
    )
    names = list(RECIPES)
    shown: set[str] = set()
    for first, last in rows:
        shown |= {*names[names.index(first) : names.index(last or first) + 1]}
    assert [name for name in names if name not in shown] == []
