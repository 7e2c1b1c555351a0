"""One thread a process, and marks that follow from what a test does."""

import os
import re
import sys
from collections import Counter
from typing import Any

# Before torch is imported, and for the processes that tests start. Small tensors gain
# nothing from a second thread, and workers would fight for the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

import pytest
from tests.support import facts

# Not counted: what a run asks about its machine, and has answered at once.
_QUESTIONS = {"git", "lscpu", "ps"}
_STARTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn")
_running: list[pytest.Item] = []
_seconds: dict[str, float] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-durations",
        action="store_true",
        help="write tests/durations.json, from which tests are marked slow",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark by fact, and put what takes long first: it would hold up the end."""
    known, seen = facts.durations(), dict[int, bool]()
    weight, group = Counter[str](), dict[pytest.Item, str]()
    for item in items:
        assert isinstance(item, pytest.Function)
        seconds = known.get(item.nodeid, 0.0)
        if seconds >= facts.SLOW:
            item.add_marker("slow")
        if facts.needs_processes(item, seen):
            item.add_marker("processes")
        if shared := facts.shared_fixture(item):
            item.add_marker(pytest.mark.xdist_group(shared))
        group[item] = shared or item.nodeid
        weight[group[item]] += round(1000 * seconds)
    if os.environ.get("PYTEST_XDIST_WORKER"):
        items.sort(key=lambda item: -weight[group[item]])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    _running.append(item)
    try:
        return (yield)
    finally:
        _running.remove(item)


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    """A process in a test that is not marked is an error where it is started."""
    if event in _STARTS and _running:
        (item,) = _running
        question = event == "subprocess.Popen" and arguments[0] in _QUESTIONS
        if not (question or item.get_closest_marker("processes")):
            raise RuntimeError(
                f"{item.nodeid} starts a process, and neither it nor a helper says so: "
                "declare the helper with tests.support.facts.starts_processes, or mark "
                "the test with pytest.mark.processes."
            )


sys.addaudithook(_refuse)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    name = re.sub(r"@[\w.]+$", "", report.nodeid)  # xdist adds the group
    _seconds[name] = _seconds.get(name, 0.0) + report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if session.config.getoption("--write-durations") and not worker:
        facts.write_durations(_seconds)
