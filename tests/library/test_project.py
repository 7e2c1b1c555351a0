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


def test_the_changelog_has_a_dated_section_for_the_version() -> None:
    """The version is written once, in the library; the lab and the docs read it."""
    source = (ROOT / "src/natgrad/__init__.py").read_text()
    (version,) = re.findall(r'^__version__ = "(.+)"$', source, re.M)
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$", changes, re.M)
    for name in ("pyproject.toml", "lab/pyproject.toml"):
        project = tomllib.loads((ROOT / name).read_text())["project"]
        assert "version" in project["dynamic"]
