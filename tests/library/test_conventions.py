"""Conventions of the tree that nothing else would notice when they break."""

import ast
import dataclasses
import importlib
import inspect
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import natgrad
from natgrad.options import NOT_GIVEN
from natgrad.rules.motion import Average, Decay

ROOT = Path(__file__).parents[2]
LIBRARY = ROOT / "src" / "natgrad"
FILES = sorted(LIBRARY.rglob("*.py"))
LONGEST = 400


def imports(path: Path) -> Iterator[str]:
    """Full names of everything that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            yield from (f"{node.module}.{name.name}" for name in node.names)


def uses_distributed(path: Path) -> bool:
    named = any(name.startswith("torch.distributed") for name in imports(path))
    tree = ast.walk(ast.parse(path.read_text()))
    dotted = (ast.unparse(x) for x in tree if isinstance(x, ast.Attribute))
    return named or "torch.distributed" in dotted


def relative(path: Path) -> str:
    return str(path.relative_to(LIBRARY))


def test_only_one_room_imports_torch_distributed() -> None:
    rooms = {relative(p).partition("/")[0] for p in FILES if uses_distributed(p)}
    assert rooms == {"distributed"}


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_the_library_imports_torch_and_the_standard_library(path: Path) -> None:
    allowed = {"natgrad", "torch", *sys.stdlib_module_names}
    assert {name.partition(".")[0] for name in imports(path)} <= allowed


@pytest.mark.parametrize("path", sorted((LIBRARY / "math").rglob("*.py")), ids=relative)
def test_maths_knows_nothing_of_the_rest(path: Path) -> None:
    own = [name for name in imports(path) if name.startswith("natgrad")]
    assert all(name.startswith("natgrad.math") for name in own)
    assert not any(name.startswith("torch.nn.Module") for name in imports(path))


def test_importing_the_library_imports_no_extras() -> None:
    code = "import sys, natgrad; print(*sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    loaded = {*done.stdout.split()}
    packages = {name.partition(".")[0] for name in loaded}
    extras = {"natgrad_lab", "matplotlib", "sklearn", "scipy", "PIL", "rich", "tyro"}
    assert "natgrad" in packages
    assert not packages & extras
    # nor what few runs need and takes its time to import
    seldom = {
        f"natgrad.plan.autotune.{name}" for name in ("choice", "predict", "profile")
    }
    assert not loaded & (seldom | {"statistics"})


def test_what_is_loaded_later_is_there_all_the_same() -> None:
    for name in natgrad.plan.__all__:
        assert getattr(natgrad.plan, name) is not None
        assert name in dir(natgrad.plan)
    with pytest.raises(AttributeError, match=r"natgrad\.plan.*no attribute 'gone'"):
        _ = natgrad.plan.gone  # pyright: ignore


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_files_stay_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= LONGEST


def modules() -> Iterator[ModuleType]:
    yield natgrad
    for found in pkgutil.walk_packages(natgrad.__path__, "natgrad."):
        yield importlib.import_module(found.name)


def public(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Classes and functions defined in a module, and the classes' own methods."""
    for name, value in vars(module).items():
        if name.startswith("_") or getattr(value, "__module__", "") != module.__name__:
            continue
        if inspect.isclass(value) or inspect.isfunction(value):
            yield f"{module.__name__}.{name}", value


def test_every_module_says_what_it_is() -> None:
    assert [m.__name__ for m in modules() if not m.__doc__] == []


def test_every_public_name_is_documented() -> None:
    names = [pair for module in modules() for pair in public(module)]
    assert len(names) > 50
    assert [name for name, value in names if not value.__doc__] == []


@pytest.mark.parametrize("name", natgrad.__all__)
def test_what_users_see_is_documented(name: str) -> None:
    value = getattr(natgrad, name)
    assert inspect.getdoc(value)
    if not inspect.isclass(value):
        return
    for method, function in inspect.getmembers(value, inspect.isfunction):
        if not method.startswith("_") and function.__module__.startswith("natgrad"):
            assert inspect.getdoc(function), f"{name}.{method}"


def options(cls: type) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(cls).parameters)


OPTIMIZERS = (natgrad.KFAC, natgrad.SPNGD, natgrad.Polar)
PARTS = (natgrad.Rule, natgrad.Length, Average, Decay)


def test_the_root_has_few_doors() -> None:
    assert len(list(LIBRARY.glob("*.py"))) <= 8


@pytest.mark.parametrize("cls", OPTIMIZERS)
def test_constructors_repeat_names_of_options_and_no_defaults(cls: Any) -> None:
    given = options(cls)
    assert len(given) <= 12
    known = {f.name for f in dataclasses.fields(natgrad.Options)}
    own = {"model", "optimizer", "groups", "grad_scaler", "options"}
    assert given.keys() - own <= known
    for name in given.keys() & known:
        assert given[name].default is NOT_GIVEN
    assert isinstance(cls.defaults, natgrad.Options)


@pytest.mark.parametrize("cls", OPTIMIZERS[:2])
def test_every_argument_is_documented(cls: type) -> None:
    _, _, arguments = (inspect.getdoc(cls) or "").partition("Args:")
    assert [name for name in options(cls) if name not in arguments] == []


def leaves(kind: type) -> Iterator[type]:
    yield kind
    for child in kind.__subclasses__():
        yield from leaves(child)


def test_every_option_is_documented_where_it_is_declared() -> None:
    parts = [p for kind in PARTS for p in leaves(kind) if "natgrad" in p.__module__]
    kinds: list[Any] = [p for p in parts if dataclasses.is_dataclass(p)]
    for value in (natgrad.Options, *kinds):
        text = inspect.getdoc(value) or ""
        declared = vars(value).get("__annotations__", {})
        own = [name for name in declared if name in options(value)]
        assert [name for name in own if name not in text] == [], value


def test_every_option_of_a_schedule_is_documented() -> None:
    for value in (natgrad.CommOptions, natgrad.Scheduled):
        text = inspect.getdoc(value) or ""
        assert [name for name in options(value) if name not in text] == []
