"""What recipes say was measured is what the committed tables say."""

import re
from pathlib import Path

import pytest
from benchmarks import comparison

from natgrad_lab.cli import main
from natgrad_lab.recipes import FILES, RECIPES, digits, find
from natgrad_lab.train.command import parse

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def tables(name: str) -> dict[str, dict[str, list[str]]]:
    """The rows of a results file, by heading and first cell."""
    found: dict[str, dict[str, list[str]]] = {}
    for part in (RESULTS / name).read_text().split("\n### ")[1:]:
        heading, *lines = part.splitlines()
        rows = [[x.strip() for x in line.split("|")[1:-1]] for line in lines]
        found[heading] = {cells[0]: cells for cells in rows if cells}
    return found


def measured_methods() -> dict[str, str]:
    """``best % in epochs`` by recipe, from comparison_methods.md."""
    found: dict[str, str] = {}
    for heading, rows in tables("comparison_methods.md").items():
        match = re.fullmatch(r"(\w+), batch (\d+), (\S+) epochs", heading)
        assert match
        data, batch, epochs = match.groups()
        best = rows["method"].index("best %")
        unit = "epoch" if float(epochs) <= 1 else "epochs"
        found |= {
            f"{data}-{method}-{batch}": f"{cells[best]} % in {epochs} {unit}"
            for method, cells in rows.items()
            if method != "method" and not method.startswith("---")
        }
    return found


METHODS = measured_methods()
DIGITS = {
    "digits-sgd": ("K-FAC on digits, batch 128", "SGD"),
    "digits-kfac": ("K-FAC on digits, batch 128", "K-FAC, eigendecomposition"),
    "digits-spngd": ("SP-NGD on digits: Fisher", "empirical"),
}


def test_every_row_of_the_tables_is_a_recipe() -> None:
    assert len(METHODS) == 28
    assert set(METHODS) <= set(RECIPES)


@pytest.mark.parametrize("name", [n for n in RECIPES if n.startswith(("cif", "fash"))])
def test_cifar10_and_fashion_say_what_the_table_says(name: str) -> None:
    # that it is a re-encoding belongs beside every accuracy measured on it
    where = " of CIFAR-10 (JPEG)" if name.startswith("cifar10") else ""
    measured = METHODS.get(name)
    assert find(name).measured == (None if measured is None else measured + where)


@pytest.mark.parametrize("name", DIGITS)
def test_digits_say_what_the_table_says(name: str) -> None:
    heading, row = DIGITS[name]
    accuracy = tables("comparison_papers.md")[heading][row][1].split()[0]
    recipe = find(name)
    epochs = f"{recipe.config.epochs:g}"
    assert recipe.measured == f"{accuracy} % in {epochs} epochs (3 seeds)"


@pytest.mark.parametrize("what", ["methods", "papers", "schemes"])
def test_the_tables_carry_the_commands_that_made_them(what: str) -> None:
    jobs = list(getattr(comparison, f"{what[:-1]}_jobs")())
    text = (RESULTS / f"comparison_{what}.md").read_text()
    for group, part in zip(
        dict.fromkeys(job.group for job in jobs), text.split("\n### ")[1:], strict=True
    ):
        mine = [job for job in jobs if job.group == group]
        assert part.startswith(f"{group}\n")
        assert part.endswith("".join(comparison.commands(mine)))
    for job in jobs:  # each is a command that natgrad takes
        config = parse(job.command[0], [*job.command[1:], "--threads", "1"])
        assert config.threads == 1


def test_a_row_of_several_seeds_has_one_command() -> None:
    jobs = [j for j in comparison.paper_jobs() if j.row == "sampled"]
    assert "".join(comparison.commands(jobs)).splitlines()[1:] == [
        "```console",
        "natgrad train digits-spngd --curvature.fisher sampled --seed 0 --threads 1"
        "  # and --seed 1, 2",
        "```",
    ]


def test_what_was_not_run_says_so() -> None:
    papers = ("osawa", "pauloski", "ma2019")
    assert not [n for n in RECIPES if n.startswith(papers) and find(n).measured]
    for file in FILES:
        run = any(recipe.measured for recipe in file.RECIPES)
        header = " ".join((file.__doc__ or "").split())
        assert run == ("natgrad train " in header)
        assert run or "Not run here" in header, file.__name__


def test_the_list_has_both_results(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    printed = capsys.readouterr().out
    assert f"measured: {digits.recipe('sgd').measured}" in printed
    assert f"published: {find('osawa2019-4k').published}" in printed
