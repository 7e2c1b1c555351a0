"""What a test does, read from its code and from measured durations.

A test is marked ``processes`` if it, a fixture that it uses, or a function of the tests
that either of them calls, refers to `subprocess`, or to something that is declared with
`starts_processes`. It is marked ``slow`` by ``tests/durations.json``, which
``make durations`` writes. Nobody has to remember either.
"""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeVar

import pytest

DURATIONS = Path(__file__).parents[1] / "durations.json"
SLOW = 0.4
"""Seconds from which on a test is slow."""
WORTH_KEEPING = 0.2
"""Seconds below which a duration is not written down."""
OURS = ("tests.", "benchmarks.")
T = TypeVar("T")

_starting: set[int] = set()


def starts_processes(helper: T) -> T:
    """Declare that a function or class of the tests starts processes."""
    _starting.add(id(helper))
    return helper


def durations() -> dict[str, float]:
    """Seconds of the tests that took longer than `WORTH_KEEPING`."""
    return json.loads(DURATIONS.read_text()) if DURATIONS.is_file() else {}


def write_durations(seconds: dict[str, float]) -> None:
    """Keep what is worth keeping, the slowest first."""
    kept = {k: round(v, 1) for k, v in seconds.items() if v >= WORTH_KEEPING}
    ordered = dict(sorted(kept.items(), key=lambda pair: (-pair[1], pair[0])))
    DURATIONS.write_text(json.dumps(ordered, indent=1) + "\n")


def needs_processes(item: pytest.Function, seen: dict[int, bool]) -> bool:
    """Whether a test starts processes; ``seen`` remembers functions between tests."""
    roots = [item.function, *(each.func for each in _fixtures(item))]
    return any(_starts(root, seen) for root in roots)


def shared_fixture(item: pytest.Function) -> str | None:
    """The module or fixture whose result a test shares with others, if it does.

    Tests that share one run on one worker, so that it is made once.
    """
    for each in _fixtures(item):
        if each.scope == "session":
            return each.argname
        if each.scope in ("module", "package", "class"):
            return item.nodeid.partition("::")[0].replace("/", ".")
    return None


def _fixtures(item: pytest.Function) -> Iterator[pytest.FixtureDef[Any]]:
    """Those of this tree, with the fixtures that they use."""
    for found in item._fixtureinfo.name2fixturedefs.values():
        for each in found:
            if each.func.__module__.startswith(OURS):
                yield each


def _starts(thing: Any, seen: dict[int, bool]) -> bool:
    if id(thing) in _starting:
        return True
    if id(thing) not in seen:
        seen[id(thing)] = False  # for functions that call each other
        seen[id(thing)] = any(_starts(each, seen) for each in _reached(thing))
    return seen[id(thing)]


def _reached(thing: Any) -> Iterator[Any]:
    """Functions and classes of this tree that a function or class refers to."""
    if isinstance(thing, type):
        yield from (x for x in vars(thing).values() if isinstance(x, FunctionType))
    function = getattr(thing, "__wrapped__", thing)
    if not isinstance(function, FunctionType):
        return
    names = set(_names(function.__code__))
    for name in names & function.__globals__.keys():
        value = function.__globals__[name]
        if value is subprocess:
            yield starts_processes(value)
        elif isinstance(value, ModuleType) and value.__name__.startswith(OURS):
            yield from (vars(value)[n] for n in names & vars(value).keys())
        elif getattr(value, "__module__", "").startswith(OURS):
            yield value


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)
