"""The library needs torch and nothing else, and is imported quickly."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions, requires
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIMIT = 0.1
"""Seconds that ``import natgrad`` may add to ``import torch``."""


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


CLEAN = """
import sys
from importlib.machinery import PathFinder

class Clean:
    def find_spec(self, name, path=None, target=None):
        return None if name in BLOCKED else PathFinder.find_spec(name, path, target)

sys.meta_path = [Clean() if f is PathFinder else f for f in sys.meta_path]

import natgrad, torch
from torch import nn

layers = nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3)
model = nn.Sequential(*layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
kfac = natgrad.KFAC(model, optimizer, norm="unit")
model(torch.randn(4, 1, 4, 4)).square().mean().backward()
optimizer.step()
print(kfac.refreshes()["statistics"]["3/A"]["refreshed"])
try:
    import numpy
except ModuleNotFoundError:
    print("clean")
"""


def test_the_library_trains_where_nothing_else_is_installed() -> None:
    """Everything is hidden that ``pip install natgrad`` would not have brought."""
    brought = closure("torch") | {"natgrad"}
    blocked = {
        module
        for module, packages in packages_distributions().items()
        if not brought & {*map(normal, packages)}
    }
    assert {"numpy", "rich", "transformers"} <= blocked
    assert run(f"BLOCKED = {blocked}\n{CLEAN}").split() == ["1", "clean"]


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
    for package in ("natgrad", "natgrad_lab"):
        assert (ROOT / "src" / package / "py.typed").exists()
