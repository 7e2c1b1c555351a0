"""What the tree promises: rooms and their imports, few files a step, one place a thing.

The table of rooms is drawn in CONTRIBUTING.md; a test keeps the two equal.
"""

import ast
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from importlib import import_module
from pathlib import Path
from runpy import run_path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import natgrad
from natgrad.layers.matrices import Linear
from natgrad.layers.table import TABLE

ROOT = Path(__file__).parents[2]
LIBRARY = ROOT / "src" / "natgrad"

# What each room imports, besides math, requiring and the standard library: only rooms
# that stand above it, so that there are no cycles. "root" are the public classes.
ROOMS: dict[str, str] = {
    "math": "",
    "plan": "",
    "rules": "",
    "layers": "plan rules",
    "diagnostics": "plan rules layers",
    "capture": "layers diagnostics",
    "distributed": "plan layers capture",
    "factors": "plan rules layers diagnostics capture distributed",
    "quadratic": "rules capture distributed factors",
    "options": "plan rules distributed factors quadratic",
    "checkpoint": "plan rules layers distributed factors",
    "engine": "plan rules layers diagnostics capture distributed factors quadratic "
    "options checkpoint",
    "root": "plan rules layers diagnostics capture distributed factors quadratic "
    "options checkpoint engine",
}
# What rooms know by type of those below them. Must only become less.
TYPES: dict[str, str] = {
    "rules": "layers factors",
    "layers": "options",
    "diagnostics": "factors",
    "factors": "options engine",
    "quadratic": "options",
    "checkpoint": "root",
}
# Inside a function, of what stands below.
LATE = {"plan -> layers": "make_plan takes a module, too"}
EVERYWHERE = {"math", "requiring"}
ALONE = ("options", "requiring")
FILES_A_STEP = 16


def room_of(parts: tuple[str, ...]) -> str:
    """The folder of a module, or its own name if it is one of the root's rooms."""
    if (LIBRARY / parts[0]).is_dir():
        return parts[0]
    name = parts[0].removesuffix(".py")
    return name if name in ALONE else "root"


def imported(path: Path, *, typed: bool = False) -> Iterator[str]:
    """The rooms that a module imports, there or in functions; or for types alone."""
    tree = ast.parse(path.read_text())
    free = [n for n in tree.body if isinstance(n, ast.If)]
    assert {ast.unparse(n.test) for n in free} <= {"TYPE_CHECKING"}, path
    inside = {id(node) for n in free for node in ast.walk(n)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert not any(a.name.startswith("natgrad") for a in node.names), path
        if isinstance(node, ast.ImportFrom) and (id(node) in inside) == typed:
            names = [node.module or ""]
            if node.module == "natgrad":
                names = [f"natgrad.{alias.name}" for alias in node.names]
            for name in names:
                if name.startswith("natgrad."):
                    yield room_of(tuple(name.split(".")[1:]))


def test_rooms_import_what_the_table_says_and_nothing_else() -> None:
    found: dict[str, set[str]] = {room: set() for room in ROOMS}
    for path in LIBRARY.rglob("*.py"):
        room = room_of(path.relative_to(LIBRARY).parts)
        found.setdefault(room, set()).update({*imported(path)} - {room} - EVERYWHERE)
    found.pop("requiring")
    for late in LATE:
        room, _, other = late.partition(" -> ")
        found[room].remove(other)
    table = {room: set(may.split()) for room, may in ROOMS.items()}
    differ = {r: (found[r] - may, may - found[r]) for r, may in table.items()}
    assert {r: pair for r, pair in differ.items() if any(pair)} == {}


def test_a_room_imports_only_rooms_above_it() -> None:
    order = list(ROOMS)
    for room, may in ROOMS.items():
        assert set(may.split()) <= set(order[: order.index(room)]), room


def test_rooms_know_few_types_of_those_below() -> None:
    order, found = list(ROOMS), dict[str, set[str]]()
    for path in LIBRARY.rglob("*.py"):
        room = room_of(path.relative_to(LIBRARY).parts)
        known = set(imported(path, typed=True)) - EVERYWHERE
        below = order[order.index(room) + 1 :] if room in ROOMS else []
        found.setdefault(room, set()).update(known & set(below))
    typed = {room: set(may.split()) for room, may in TYPES.items()}
    assert {room: rooms for room, rooms in found.items() if rooms} == typed


def figure() -> str:
    """The table as it is drawn."""
    rows = [f"{room:<12} -> {may}".rstrip(" ->") for room, may in ROOMS.items()]
    return "\n".join(rows)


def test_the_figure_is_the_table() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert f"```text\n{figure()}\n```" in text, f"Must be drawn so:\n{figure()}"


# -- what the lab may use --------------------------------------------------------------

# Public modules, as docs/reference/api.md has them; `natgrad.math` with all below it.
PUBLIC = (
    *("natgrad", "natgrad.plan", "natgrad.plan.autotune", "natgrad.layers"),
    *("natgrad.schedules", "natgrad.sinks"),
    *("natgrad.diagnostics", "natgrad.distributed"),
)


def test_the_lab_uses_public_names() -> None:
    used: set[str] = set()
    for path in (ROOT / "lab" / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                names = {f"{node.module}.{alias.name}" for alias in node.names}
                used |= names if node.module.split(".")[0] == "natgrad" else set()
    assert {name for name in used if not is_public(name)} == set()


def is_public(name: str) -> bool:
    """Whether a name is one that users may import, from where it is documented."""
    module, _, own = name.rpartition(".")
    if module == "natgrad.math" or module.startswith("natgrad.math."):
        return True
    known = getattr(import_module(module), "__all__", None) if module in PUBLIC else ()
    return module in PUBLIC and (known is None or own in known)


# -- one step --------------------------------------------------------------------------


def convnet() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3),
        nn.Flatten(),
        nn.Linear(4 * 36, 5),
    )


def kfac(model: nn.Module) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    natgrad.KFAC(model, optimizer, refresh=natgrad.Every())
    return optimizer


def polar(model: nn.Module) -> Any:
    return natgrad.Polar(model, refresh=natgrad.Every())


@pytest.mark.parametrize("make", [kfac, polar])
def test_a_step_crosses_few_files(make: Callable[[nn.Module], Any]) -> None:
    """Forward, backward and step, everything due, on one process; without maths."""
    model = convnet()
    optimizer, found = make(model), set[str]()

    def note(frame: Any, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(LIBRARY):
            found.add(str(path.relative_to(LIBRARY)))

    def step() -> None:
        x = torch.randn(8, 1, 8, 8)
        F.cross_entropy(model(x), torch.arange(8) % 5).backward()
        optimizer.step()

    step()
    threading.setprofile(note)  # of the threads that a backward starts
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    crossed = sorted(name for name in found if not name.startswith("math/"))
    assert len(crossed) <= FILES_A_STEP, crossed
    assert "engine/engine.py" in crossed


# -- one place a thing -----------------------------------------------------------------


# Functions whose parameter only has the name of an option.
OTHERS = {
    "find_blocks(skip)",  # no name is skipped where none is given
    "make_plan(norm)",  # of a module that is planned without an optimizer
}


def test_an_option_has_its_default_in_one_place() -> None:
    """No function of the library has a parameter of that name with a value of its own.

    But the fields of `Options` themselves; functions may say "not given", or None, or
    name the constant that is the default.
    """
    options = {f.name for f in fields(natgrad.Options)} - {"group"}
    found: set[str] = set()
    for path in LIBRARY.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                found |= {f"{node.name}({x})" for x in defaults(node) & options}
    assert found == OTHERS


def test_the_table_of_options_is_that_of_the_declaration() -> None:
    script = ROOT / "docs" / "extensions" / "options_table.py"
    made = run_path(str(script))
    assert made["PAGE"].read_text() == made["page"](), f"Run python {script.name}"


def defaults(function: ast.FunctionDef) -> set[str]:
    """Parameters whose default is a value."""
    args = function.args
    plain = [*args.posonlyargs, *args.args]
    tail = plain[len(plain) - len(args.defaults) :]
    pairs = [
        *zip(tail, args.defaults, strict=True),
        *zip(args.kwonlyargs, args.kw_defaults, strict=True),
    ]
    free = {"NOT_GIVEN", "None", "FIRST_STRATEGY", "FIRST_PLACEMENT"}
    return {a.arg for a, value in pairs if value and ast.unparse(value) not in free}


@dataclass(frozen=True, kw_only=True)
class Halves(natgrad.Rule):
    """A toy rule: half of the direction."""

    name: ClassVar[str] = "halves"
    sides: Any = "inputs"

    def apply(self, x: natgrad.Matrices) -> Tensor:
        return x.direction / 2


@dataclass(frozen=True, kw_only=True)
class Doubled(natgrad.Length):
    """A toy length: twice as long."""

    def scaled(self, updates: dict[str, Tensor], sight: Any) -> dict[str, Tensor]:
        return {name: 2 * u for name, u in updates.items()}


class Dense(nn.Module):
    """A layer of nobody's."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(3, 4).double())

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.kernel.T


class Kernel(Linear):
    """A toy layer kind."""

    name = "kernel"


@pytest.fixture
def a_new_layer() -> Iterator[None]:
    natgrad.register_layer(Dense, Kernel, weight="kernel")
    yield
    del TABLE[Dense]


@pytest.mark.usefixtures("a_new_layer")
def test_a_rule_a_length_and_a_layer_kind_are_a_class_and_a_row_each() -> None:
    model = Dense()
    before = model.kernel.detach().clone()
    options = replace(natgrad.SPNGD.defaults, rule=Halves(), length=Doubled())
    optimizer = natgrad.SPNGD(model, lr=0.1, momentum=0.0, options=options)
    model(torch.randn(6, 4).double()).square().sum(1).mean().backward()
    assert model.kernel.grad is not None
    gradient = model.kernel.grad.clone()
    optimizer.step()
    torch.testing.assert_close(model.kernel.detach(), before - 0.1 * gradient)
    assert optimizer.refreshes()["last"]["estimated"]
    assert "kernel" in optimizer.report()
