"""What users call is typed throughout, as another type checker would see it."""

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import natgrad
from natgrad import diagnostics, distributed, layers

BIN = Path(sys.executable).parent
MODULES = tuple(f"natgrad.{name}." for name in ("schedules", "sinks", "layers", "plan"))


@pytest.fixture(scope="module")
def completeness(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """pyright's own account of the package as its users have it."""
    command = [str(BIN / "pyright"), "--verifytypes", "natgrad", "--ignoreexternal"]
    done = subprocess.run(
        [*command, "--outputjson"],
        capture_output=True,
        text=True,
        cwd=tmp_path_factory.mktemp("elsewhere"),
        env=os.environ | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"},
        timeout=240,
    )
    assert done.stdout, done.stderr
    return json.loads(done.stdout)["typeCompleteness"]


def homes() -> set[str]:
    """Where the public names are defined: classes with all their bases, functions."""
    found: set[str] = set()
    for module in (natgrad, natgrad.plan, layers, diagnostics, distributed):
        for name in module.__all__:
            value = getattr(module, name)
            if isinstance(value, ModuleType):
                continue
            for each in inspect.getmro(value) if inspect.isclass(value) else (value,):
                if getattr(each, "__module__", "").startswith("natgrad"):
                    found.add(f"{each.__module__}.{each.__name__}")
    return found


def untyped(completeness: dict[str, Any], places: set[str]) -> dict[str, str]:
    """Public symbols that lack an annotation, with what pyright says."""
    found: dict[str, str] = {}
    for symbol in completeness["symbols"]:
        name: str = symbol["name"]
        public = name.startswith(MODULES) or {name, name.rpartition(".")[0]} & places
        said = [d["message"] for d in symbol["diagnostics"]]
        missing = [text for text in said if "issing" in text]
        if public and missing:
            found[name] = missing[0]
    return found


def test_the_package_ships_its_types(completeness: dict[str, Any]) -> None:
    assert completeness["pyTypedPath"].endswith("natgrad/py.typed")
    assert len(completeness["symbols"]) > 1000


def test_what_users_call_is_typed(completeness: dict[str, Any]) -> None:
    places = homes()
    assert {"natgrad.kfac.KFAC", "natgrad.engine.users.Inspectable"} <= places
    assert untyped(completeness, places) == {}


def test_no_function_of_the_library_lacks_an_annotation(
    completeness: dict[str, Any],
) -> None:
    lacking = [
        symbol["name"]
        for symbol in completeness["symbols"]
        if any("annotation is missing" in d["message"] for d in symbol["diagnostics"])
    ]
    assert lacking == []
