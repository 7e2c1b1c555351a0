"""The pages build without a warning, their code runs, and what they name exists."""

import importlib
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.support.pages import DOCS, PAGES, ROOT, blocks, prose, relative
from torch import nn

import natgrad
from natgrad import diagnostics, distributed, layers
from natgrad.layers.table import TABLE
from natgrad.math.spectrum import change_rate

WITH_CODE = [p for p in PAGES if blocks(p, "python")]
DOTTED = re.compile(r"`((?:natgrad|natgrad_lab|torch)(?:\.\w+)+)`")


@pytest.fixture
def names() -> Iterator[dict[str, Any]]:
    """What pages leave to their reader: a model, an optimizer, data."""
    torch.manual_seed(0)
    known = dict(TABLE)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs, labels = torch.randn(8, 64), torch.randint(10, (8,))
    yield {
        "__name__": "page",
        "torch": torch,
        "nn": nn,
        "natgrad": natgrad,
        "model": model,
        "optimizer": optimizer,
        "inputs": inputs,
        "labels": labels,
        "loader": [(inputs, labels)] * 3,
    }
    TABLE.clear()
    TABLE.update(known)


@pytest.mark.parametrize("path", WITH_CODE, ids=relative)
def test_the_code_of_a_page_runs(
    path: Path, names: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks run one after the other, as a reader would type them."""
    monkeypatch.chdir(tmp_path)
    for code in blocks(path, "python"):
        exec(compile(code, relative(path), "exec"), names)


def test_the_pages_with_code_are_found() -> None:
    assert {"README.md", "docs/reference/layer_kinds.md"} <= {*map(relative, WITH_CODE)}


def exists(name: str) -> bool:
    parts = name.split(".")
    for split in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:split]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[split:]:
            if not hasattr(found, attribute):
                return False
            found = getattr(found, attribute)
        return True
    return False


@pytest.mark.parametrize("path", PAGES, ids=relative)
def test_what_a_page_names_exists(path: Path) -> None:
    assert [n for n in DOTTED.findall(path.read_text()) if not exists(n)] == []


def test_a_name_that_is_gone_would_be_noticed() -> None:
    assert exists("natgrad.math.inverse.pi_split")
    assert exists("natgrad.KFAC.step")
    assert not exists("natgrad.math.inverse.gone")
    assert not exists("natgrad.gone.pi_split")


EQUATIONS = {
    "Osawa et al. 2020": 24,
    "Osawa et al. 2019": 21,
    "Pauloski et al. 2020": 18,
    "Ma et al. 2019": 5,
}
"""The last number of each paper."""
ALGORITHMS = {
    "Osawa et al. 2020": {(1, None), (2, None), *((3, i) for i in range(1, 6))},
    "Osawa et al. 2019": {(1, i) for i in range(1, 7)},
    "Pauloski et al. 2020": {(1, i) for i in range(1, 4)},
    "Ma et al. 2019": set(),
}
"""Their algorithms, by number and stage or step."""


def rows_of(paper: str) -> dict[str, str]:
    """The table of a paper: what is in it, and where that is in the code."""
    text = (DOCS / "reference" / "papers.md").read_text()
    (section,) = [x for x in re.split(r"^## ", text, flags=re.M) if x.startswith(paper)]
    cells = re.findall(r"^\| (.*?) \| .*? \| (.*) \|$", section, re.M)
    return {where: names for where, names in cells if where != "in the paper"}


def numbers(text: str) -> set[int]:
    """Of "1, 3-5": 1, 3, 4 and 5."""
    found: set[int] = set()
    for low, high in re.findall(r"(\d+)(?:-(\d+))?", text):
        found |= set(range(int(low), int(high or low) + 1))
    return found


@pytest.mark.parametrize("paper", EQUATIONS)
def test_every_equation_of_the_papers_has_a_row(paper: str) -> None:
    cells = [re.match(r"eq\. ((?:\d+(?:-\d+)?(?:, )?)+)", x) for x in rows_of(paper)]
    found = [numbers(cell[1]) for cell in cells if cell]
    assert sorted(n for some in found for n in some) == [
        *range(1, EQUATIONS[paper] + 1)
    ]


@pytest.mark.parametrize("paper", EQUATIONS)
def test_every_algorithm_of_the_papers_has_a_row(paper: str) -> None:
    found: set[tuple[int, int | None]] = set()
    for cell in rows_of(paper):
        for number, stages in re.findall(
            r"Algorithm (\d)(?:, (?:stage|step)s? (\d(?:-\d)?))?", cell
        ):
            found |= {(int(number), i) for i in numbers(stages) or {None}}
    assert found == ALGORITHMS[paper]


@pytest.mark.parametrize("paper", EQUATIONS)
def test_every_row_of_the_papers_names_code(paper: str) -> None:
    rows = rows_of(paper)
    assert [where for where, names in rows.items() if not DOTTED.findall(names)] == []


def test_the_change_rate_is_what_diagnostics_show() -> None:
    """A page and the table mean the same function by eq. 19."""
    (names,) = [v for k, v in rows_of("Osawa et al. 2019").items() if "eq. 19" in k]
    assert "natgrad.math.spectrum.change_rate" in names
    assert "eq. 19" in (change_rate.__doc__ or "")


def test_what_looking_costs_is_what_was_measured() -> None:
    page = " ".join((DOCS / "diagnostics.md").read_text().split())
    found = json.loads((ROOT / "benchmarks/results/overhead.json").read_text())
    rows = {row["method"]: row for row in found["rows"]}
    share = re.findall(r"[\d.]+%", rows["kfac, watched"]["says"])[0]
    assert f"a look every {found['every']} steps, looking took {share} of" in page
    watched, plain = rows["kfac, watched"]["cpu_ms"], rows["kfac"]["cpu_ms"]
    assert f"{watched:.1f} ms of the processor watched and {plain:.1f} ms not" in page
    for budget in ("10%", "30%"):
        spent, own = re.findall(
            r"([\d.]+%) (?:was|on p)", rows[f"budget {budget}"]["says"]
        )
        over = f"{100 * rows[f'budget {budget}']['cpu_over_sgd']:.1f}%"
        assert f"{spent} ({own} preconditioning) | {over} |" in page


TEST_NAME = re.compile(r"`((?:tests/[\w/]+\.py|…)(?:::\w+)?)`")


def lost_tests(text: str) -> list[str]:
    """Tests that a text names and that are not; "…" is a file that it named before."""
    files: list[Path] = []
    lost: list[str] = []
    for found in TEST_NAME.findall(text):
        file, _, name = found.partition("::")
        if file != "…":
            files.append(ROOT / file)
        sources = files if file == "…" else files[-1:]
        whole = [path.read_text() for path in sources if path.is_file()]
        if not any(f"def {name}(" in source if name else True for source in whole):
            lost.append(found)
    return lost


@pytest.mark.parametrize("path", PAGES, ids=relative)
def test_tests_that_a_page_names_exist(path: Path) -> None:
    assert lost_tests(path.read_text()) == []


def test_every_fault_of_the_page_has_a_test() -> None:
    """The tests that it names exist: see above."""
    table = (DOCS / "faults.md").read_text().split("## Fault by fault")[1]
    rows = [x for x in table.split("\n## ")[0].splitlines() if x.startswith("| ")][1:]
    assert len(rows) > 20
    for row in rows:
        assert "::test_" in row.rstrip("| ").split(" | ")[-1], row


def test_a_test_that_is_gone_is_noticed() -> None:
    assert len(TEST_NAME.findall((DOCS / "faults.md").read_text())) > 5
    text = "`tests/gone.py`, `tests/lab/test_docs.py::test_gone`, `…::test_gone`"
    assert len(lost_tests(text)) == 3
    assert not lost_tests("`tests/lab/test_docs.py::test_readme_has_a_short_example`")


def test_readme_has_a_short_example() -> None:
    example = blocks(ROOT / "README.md", "python")[0].strip().splitlines()
    assert len(example) <= 12


@pytest.mark.parametrize("path", PAGES, ids=relative)
def test_links_lead_somewhere(path: Path) -> None:
    found = re.findall(r"\]\(([^)#\s]+)", prose(path))
    links = [x for x in found if "://" not in x]
    assert [x for x in links if not (path.parent / x).exists()] == []


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("html")
    options = ("-W", "--keep-going", "-q", "-b", "html", "-d", str(folder / "trees"))
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *options, str(DOCS), str(folder / "html")],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return folder / "html"


def methods(value: Any) -> Iterator[str]:
    """The methods of a class that are natgrad's own."""
    for name in dir(value) if isinstance(value, type) else ():
        home = getattr(getattr(value, name), "__module__", None) or ""
        if not name.startswith("_") and home.startswith("natgrad"):
            yield name


def public() -> dict[str, Any]:
    """Everything that users may name, in all modules that they see."""
    names = vars(natgrad)
    seen = [names[n] for n in natgrad.__all__ if isinstance(names[n], ModuleType)]
    found: dict[str, Any] = {}
    for module in (natgrad, layers, diagnostics, distributed, *seen):
        exported = getattr(module, "__all__", None) or [
            name
            for name, value in vars(module).items()
            if getattr(value, "__module__", "") == module.__name__
            and not name.startswith("_")
        ]
        for name in exported:
            found[f"{module.__name__}.{name}"] = value = getattr(module, name)
            for method in methods(value):
                path = f"{module.__name__}.{name}.{method}"
                found[path] = getattr(value, method)
    return found


@pytest.mark.slow
def test_every_public_name_is_in_the_reference(built: Path) -> None:
    from sphinx.util.inventory import InventoryFile

    inventory = InventoryFile.loads((built / "objects.inv").read_bytes(), uri="")
    documented = {name for kind in inventory.data.values() for name in kind}
    names = public()
    assert len(names) > 60
    shown = [value for name, value in names.items() if name in documented]
    missing = [
        name
        for name, value in names.items()
        # a second name of what is documented under its first is enough; what overrides
        # a method and has no text of its own is explained where that is declared
        if name not in documented
        and getattr(value, "__name__", "") not in documented
        and not any(value is other for other in shown)
        and (inspect.getdoc(value) is None or value.__doc__)
    ]
    assert not missing, "\n".join(missing)


@pytest.mark.slow
def test_every_page_is_reached_from_the_index(built: Path) -> None:
    index = (built / "index.html").read_text()
    pages = [p for p in DOCS.rglob("*.md") if p.name != "index.md"]
    assert len(pages) > 10
    for page in pages:
        target = str(page.relative_to(DOCS).with_suffix(".html"))
        assert f'href="{target}"' in index, target


@pytest.mark.slow
def test_the_pages_need_no_network(built: Path) -> None:
    """Formulas are MathML, and whatever a page loads is one of its own files."""
    pages = {path: path.read_text() for path in built.rglob("*.html")}
    assert pages[built / "damping.html"].count("<math") > 10
    loads = re.compile(r'<(?:script|link|img)\b[^>]*(?:src|href)="(?:\w+:)?//[^"]*')
    assert [found for text in pages.values() for found in loads.findall(text)] == []
    assert not any("\\frac" in text for text in pages.values())


@pytest.mark.slow
def test_links_to_headings_lead_to_one(built: Path) -> None:
    """Sphinx is told not to warn of them: links to files outside of docs/ are fine."""
    pages = {path.resolve(): path.read_text() for path in built.rglob("*.html")}
    ids = {path: {*re.findall(r'\bid="([^"]+)"', x)} for path, x in pages.items()}
    links = [
        (path.parent / file if file else path, heading)
        for path, text in pages.items()
        for file, heading in re.findall(
            r'<a class="ref[^>]* href="([^":#]*)#(.+?)"', text
        )
    ]
    readme = prose(ROOT / "README.md")
    links += [
        (built / f"{file}.html", heading)
        for file, heading in re.findall(r"\]\(docs/(.+?)\.md#(.+?)\)", readme)
    ]
    assert len(links) > 100
    assert [x for x in links if x[1] not in ids.get(x[0].resolve(), ())] == []
    assert not any('<span class="xref myst">' in text for text in pages.values())
