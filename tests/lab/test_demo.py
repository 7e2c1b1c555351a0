"""`natgrad demo` from start to end, shortened; what it says of made-up races."""

import re
from pathlib import Path

import pytest

from natgrad_lab.cli import main
from natgrad_lab.console import Console, fitted
from natgrad_lab.demo.race import CONTENDERS, Race
from natgrad_lab.demo.report import best_rival, sentences, table_of
from natgrad_lab.demo.sweep import best_rate, records
from natgrad_lab.demo.tasks import TASKS


@pytest.mark.slow
@pytest.mark.processes
def test_the_demo_runs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "demo"
    assert main(["demo", "--out", str(out), "--steps", "4"]) == 0
    printed, errors = capfd.readouterr()
    assert "Warning" not in errors
    for name in (*TASKS, *CONTENDERS):
        assert name in printed
    assert [x for x in printed.splitlines() if len(x) > 80 and str(out) not in x] == []
    assert re.search(r"On the task autoencoder, .*\sends at ", printed, re.S)
    assert (out / "demo.png").is_file()
    assert (out / "digits-spngd-2" / "metrics.jsonl").is_file()


def raced(name: str, *values: float) -> Race:
    steps = tuple(range(1, len(values) + 1))
    seconds = tuple(float(s) for s in steps)
    return Race(contender=name, rate=1.0, steps=steps, values=values, seconds=seconds)


def test_a_value_is_reached_when_it_is_not_lost_again() -> None:
    assert raced("SGD", 3.0, 1.0, 2.0, 1.0, 0.5).reaches(1.5) == (4, 4.0)
    assert raced("SGD", 3.0, 2.0).reaches(1.0) is None


def test_what_is_said_is_judged_by_the_best_rival_s_end() -> None:
    rivals = [raced("SGD", 3.0, 2.0, 1.0), raced("AdamW", 3.0, 2.0, 1.5)]
    ahead, behind = raced("Polar", 2.0, 0.9, 0.8), raced("Polar", 3.0, 2.0, 1.2)
    assert best_rival([*rivals, ahead]).contender == "SGD"
    (said,) = sentences({"digits": [*rivals, ahead]})
    assert "Polar reaches the final loss of SGD, 1, after 2 of 3 steps" in said
    (said,) = sentences({"digits": [*rivals, behind]})
    assert "Polar ends at 1.2, behind SGD at 1." in said


def test_the_table_fits_80_columns_and_marks_the_best_rival() -> None:
    rivals = [raced("SGD", 3.0, 2.0, 1.0), raced("AdamW", 3.0, 2.0, 1.5)]
    races = [*rivals, *(raced(name, 2.0, 0.9, 1e-4) for name in [*CONTENDERS][2:])]
    console = Console(width=80, record=True)
    table = table_of(dict.fromkeys(TASKS, races))
    assert fitted(table, 80) == [table]
    console.print(table)
    assert len(re.findall(r"Muon \*", console.export_text())) == len(TASKS)


def test_every_rate_is_the_best_of_a_sweep() -> None:
    known = records()
    for task in TASKS:
        for name, contender in CONTENDERS.items():
            mine = [r for r in known if (r["task"], r["contender"]) == (task, name)]
            if contender.rates:
                swept = [r["rate"] for r in mine if r["seed"] == 0]
                assert sorted(swept) == sorted(contender.rates)
            rate = best_rate(task, name)
            assert len([r for r in mine if r["seed"] and r["rate"] == rate]) == 3
