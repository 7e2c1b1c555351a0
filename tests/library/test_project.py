"""What the project says about itself is what is run."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = {*re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.M)}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_run_what_make_runs(path: Path) -> None:
    commands = re.findall(r"^ *-? *run: (.+)$", path.read_text(), re.M)
    assert commands
    for command in commands:
        make, target, *_ = command.split()
        assert make == "make", command
        assert target in TARGETS, command


def test_the_whole_check_is_make_test() -> None:
    assert (ROOT / ".ci" / "run").read_text().splitlines()[-1] == "make test"


def test_the_oldest_torch_that_is_claimed_is_tested() -> None:
    (claimed,) = PROJECT["dependencies"]
    oldest = claimed.removeprefix("torch>=")
    pinned = re.findall(r"^torch==(.+)$", (ROOT / "constraints.txt").read_text(), re.M)
    assert pinned[0].startswith(f"{oldest}.")
    assert f"torch=={oldest}.*" in (ROOT / ".github/workflows/checks.yml").read_text()


def test_every_python_that_is_claimed_is_tested() -> None:
    text = " ".join(PROJECT["classifiers"])
    claimed = re.findall(r"Python :: (3\.\d+)", text)
    (tested,) = re.findall(r"python: \[(.+)\]", WORKFLOWS[0].read_text())
    assert re.findall(r"3\.\d+", tested) == claimed
    assert PROJECT["requires-python"] == f">={claimed[0]}"
