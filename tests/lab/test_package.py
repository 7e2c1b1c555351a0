"""The library needs torch and nothing else, and is imported quickly."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from importlib.metadata import distribution, packages_distributions, requires
from pathlib import Path

import pytest

import natgrad
from natgrad_lab.cli import COMMANDS, EXTRA, Command, main

ROOT = Path(__file__).parents[2]
LIMIT = 0.3
"""Seconds that ``import natgrad`` may add to ``import torch``, of which a third is one
garbage collection over torch's own objects, which is due by then."""


def normal(name: str) -> str:
    """One spelling of a package's name."""
    return re.sub(r"[-_.]+", "-", name).lower()


def names(requirements: list[str]) -> set[str]:
    """Packages that are needed without any extra."""
    always = [r for r in requirements if "extra ==" not in r]
    return {normal(re.split(r"[^\w.-]", r.strip())[0]) for r in always}


def closure(package: str) -> set[str]:
    """A package and everything that it needs, and what that needs."""
    found: set[str] = set()
    waiting = [package]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += names(requires(name) or [])
    return found


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_library_requires_torch_alone() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert names(project["dependencies"]) == {"torch"}
    assert names(requires("natgrad") or []) == {"torch"}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Both, built from the tree without a network, by the name of their package."""
    pytest.importorskip("hatchling", reason="builds wheels; of the extra dev")
    folder = tmp_path_factory.mktemp("wheels")
    options = ("--no-deps", "--no-index", "--no-build-isolation", "-w", str(folder))
    pip("wheel", *options, str(ROOT), str(ROOT / "lab"))
    return {path.name.partition("-")[0]: path for path in folder.glob("*.whl")}


@pytest.fixture(scope="module")
def site(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages of an environment in which ``pip install natgrad`` was run."""
    folder = tmp_path_factory.mktemp("site")
    pip(
        "install",
        "--no-deps",
        "--no-index",
        "--target",
        str(folder),
        str(wheels["natgrad"]),
    )
    for package in closure("torch"):
        files = distribution(package).files or []
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            if not (folder / top).exists():
                (folder / top).symlink_to(str(distribution(package).locate_file(top)))
    return folder


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", *arguments, "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


def inside(site: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run where nothing is installed but what is in ``site``."""
    alone = f"import sys; sys.path.append({str(site)!r})\n"
    command = [sys.executable, "-I", "-S", "-c", alone + code]
    return subprocess.run(command, capture_output=True, text=True, cwd=site)


def told(wheel: Path) -> Message:
    """A wheel's metadata."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith("/METADATA")]
        return Parser().parsestr(archive.read(name).decode())


def test_a_wheel_asks_for_torch_alone(wheels: dict[str, Path]) -> None:
    needs = told(wheels["natgrad"]).get_all("Requires-Dist", [])
    assert names(needs) == {"torch"}


@pytest.mark.parametrize(("package", "root"), [("natgrad", ""), ("natgrad_lab", "lab")])
def test_a_wheel_has_its_package_alone(
    package: str, root: str, wheels: dict[str, Path]
) -> None:
    with zipfile.ZipFile(wheels[package]) as archive:
        shipped = {*archive.namelist()}
    source = ROOT / root / "src"
    data = {p for s in ("typed", "html", "toml") for p in source.rglob(f"*.{s}")}
    assert {str(path.relative_to(source)) for path in data} <= shipped
    tops = {name.partition("/")[0] for name in shipped}
    assert tops == {package, f"{package}-{natgrad.__version__}.dist-info"}
    assert any(name.endswith("/licenses/LICENSE") for name in shipped)


def test_both_packages_have_one_version(wheels: dict[str, Path]) -> None:
    library, lab = told(wheels["natgrad"]), told(wheels["natgrad_lab"])
    assert library["Version"] == lab["Version"] == natgrad.__version__
    assert f"natgrad=={natgrad.__version__}" in lab.get_all("Requires-Dist", [])


def test_nothing_asks_for_files_of_this_machine(wheels: dict[str, Path]) -> None:
    """An index refuses direct references."""
    for wheel in wheels.values():
        assert not [x for x in told(wheel).get_all("Requires-Dist", []) if "@" in x]


TRAIN = """
import importlib.util, natgrad, torch
from torch import nn

layers = nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3)
model = nn.Sequential(*layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
kfac = natgrad.KFAC(model, optimizer, norm="unit")
kfac.watch(every=1, sink=natgrad.sinks.JsonlSink("looks.jsonl"))
model(torch.randn(4, 1, 4, 4)).square().mean().backward()
optimizer.step()
print(natgrad.__file__)
print(kfac.refreshes()["statistics"]["3/A"]["refreshed"])
print([x for x in ("numpy", "rich", "tyro", "pytest") if importlib.util.find_spec(x)])
"""


def test_the_library_trains_where_nothing_else_is_installed(site: Path) -> None:
    done = inside(site, TRAIN)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(site / "natgrad" / "__init__.py"), "1", "[]"]
    assert (site / "looks.jsonl").stat().st_size > 0


def test_what_the_lab_brings_is_known_to_its_command(wheels: dict[str, Path]) -> None:
    needs = told(wheels["natgrad_lab"]).get_all("Requires-Dist", [])
    installed = packages_distributions()
    brought = {normal(installed[module][0]) for module in EXTRA}
    assert brought == names(needs) - {"natgrad"}


def test_a_package_that_is_missing_is_told_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(COMMANDS, "odd", Command("rich:print", ""))
    assert main(["odd"]) == 2
    assert "pip install natgrad-lab" in capsys.readouterr().err


def test_a_module_that_no_extra_brings_is_not_explained_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(COMMANDS, "odd", Command("no_such_module:main", ""))
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        main(["odd"])


TIMED = """
import time, torch
begin = time.process_time()
import natgrad
print(time.process_time() - begin)
"""


def test_importing_adds_little_to_importing_torch(tmp_path: Path) -> None:
    """From bytecode, as installed; the processor's seconds, whatever else runs."""
    shutil.copytree(ROOT / "src" / "natgrad", tmp_path / "natgrad")
    compiled = [sys.executable, "-m", "compileall", "-q", str(tmp_path)]
    subprocess.run(compiled, check=True)
    tries = (float(run(TIMED, PYTHONPATH=str(tmp_path))) for _ in range(4))
    assert any(seconds < LIMIT for seconds in tries)


def test_types_are_shipped() -> None:
    for package in ("src/natgrad", "lab/src/natgrad_lab"):
        assert (ROOT / package / "py.typed").exists()
