"""The report of whole trainings."""

from typing import Any

from benchmarks.quality import readme, shorter
from benchmarks.quality.__main__ import LEDGER, ledger
from benchmarks.quality.report import (
    batch_section,
    by_batch,
    by_setting,
    finals,
    reached,
    section,
    tuned,
)


def run(contender: str, lr: float, seed: int, ends: list[float], **more: Any) -> Any:
    curve = [[10 * (i + 1), value, 0.0] for i, value in enumerate(ends)]
    setting = {"protocol": "autoencoder", "steps": 30, "batch": 8} | more
    own = {"contender": contender, "lr": lr, "seed": seed, "value": ends[-1]}
    return {**setting, **own, "curve": curve, "cpu_seconds": 1.0}


RUNS = [
    run("muon", 0.1, 1, [3.0, 2.5, 2.0]),
    run("muon", 0.2, 1, [3.0, 2.0, 1.5]),
    run("muon", 0.2, 2, [3.0, 2.0, 1.0]),
    run("muon", 0.2, 3, [3.0, 2.0, 2.0]),
    run("muon", 0.1, 2, [3.0, 2.0, 0.1]),
    run("polar", 0.3, 1, [2.0, 1.4, 1.2]),
]


def test_the_seed_that_chooses_a_rate_is_no_final() -> None:
    ((_, contenders),) = by_setting(RUNS).items()
    assert tuned(contenders["muon"])["lr"] == 0.2
    assert finals(contenders["muon"]) == [1.0, 2.0]


def test_steps_are_those_to_the_end_of_the_best_rival() -> None:
    assert reached(RUNS[-1], 1.5) == 20
    assert reached(RUNS[-1], 1.1) is None
    ((setting, contenders),) = by_setting(RUNS).items()
    table = [line.split("|") for line in section(setting, contenders).splitlines()]
    cells = {row[1].strip(): [c.strip() for c in row[2:-1]] for row in table[4:]}
    assert list(cells) == ["polar", "muon"]
    assert cells["polar"] == ["1.200", "0.3 of 0.3", "-", "20", "1"]
    assert cells["muon"][2] == "1.500 (1.000 to 2.000), n = 2"


def test_the_speedrun_is_shown_as_accuracy() -> None:
    one = [run("muon", 0.1, 1, [60.0, 40.0, 20.0], protocol="airbench")]
    ((setting, contenders),) = by_setting(one).items()
    assert "| 80.0" in section(setting, contenders)


def test_the_speedrun_is_told_by_batch() -> None:
    runs = [
        run("muon", 0.1, 1, [40.0, 21.0, 15.0], protocol="airbench", batch=2),
        run("muon", 0.1, 1, [60.0, 40.0, 23.0], protocol="airbench", batch=8),
        run("polar", 0.1, 1, [60.0, 40.0, 20.0], protocol="airbench", batch=8),
    ]
    found = by_batch(by_setting(runs))
    assert list(found) == ["muon"]  # the other has one batch
    rows = [line.split("|")[2:-1] for line in batch_section(found).splitlines()[2:]]
    told = [[cell.strip() for cell in row] for row in rows]
    assert told[2] == ["%, in steps", "85.0 in 30", "77.0 in 30"]
    assert told[3] == ["steps to 78%", "20", "-"]


def final(contender: str, lr: float, *values: float, seeds: int = 2) -> list[Any]:
    """Runs of the first row of README, with seeds from ``seeds`` on."""
    protocol, steps, batch = next(iter(readme.SHOWN))
    more = {"protocol": protocol, "steps": steps, "batch": batch}
    return [
        run(contender, lr, seed, [value], **more)
        for seed, value in enumerate(values, seeds)
    ]


def test_readme_takes_the_rate_with_most_seeds_but_not_the_one_that_chose_it() -> None:
    chosen = final("muon", 0.2, 9.0, seeds=1)
    assert readme.ends(chosen) == [9.0]
    chosen += final("muon", 0.1, 20.0) + final("muon-0.8", 0.2, 40.0, 30.0)
    assert readme.ends(chosen) == [30.0, 40.0]
    assert readme.ends([]) == []


def test_readme_marks_the_best_and_all_whose_ranges_overlap_with_it() -> None:
    records = final("muon", 0.2, 20.0, 30.0) + final("pmuon", 0.2, 26.0, 28.0)
    records += final("polar", 0.2, 19.0, 24.0)
    for setting in [*readme.SHOWN][1:]:
        keys = dict(zip(("protocol", "steps", "batch"), setting, strict=True))
        records.append(run("muon", 0.1, 1, [1.0], **keys))
    rows = [line.split("|")[3:-1] for line in readme.table(records).splitlines()[2:]]
    row, alone, *_ = [[cell.strip() for cell in row] for row in rows]
    assert row == ["**78.5** (2)", "**75.0** (2)", "-", "-", "73.0 (2)", "-", "-"]
    assert alone == [
        "-",
        "1.000 (1)",
        "-",
        "-",
        "-",
        "-",
        "-",
    ]  # one seed is not the best


def test_the_table_of_readme_is_that_of_the_ledger() -> None:
    """If it is not: python -m benchmarks.quality report."""
    text = readme.README.read_text()
    assert text.count(readme.BEGIN) == text.count(readme.END) == 1
    assert readme.replaced(text, ledger(LEDGER)) == text


def test_shorter_schedules_are_compared_with_the_best_rival_of_the_same_batch() -> None:
    records = [
        run("muon", 0.2, 2, [2.0], steps=40),
        run("soap", 0.2, 2, [1.8], steps=40),
        run("soap", 0.2, 2, [1.5], steps=40, batch=16),
        run("polar", 0.3, 2, [1.7], steps=30),
        run("polar", 0.3, 3, [1.5], steps=30),
        run("polar", 0.3, 2, [1.1], steps=40),
    ]
    found = [*shorter.pairs(by_setting(records))]
    assert [(p.rival, p.steps, p.fewer, p.ours) for p in found] == [
        ("SOAP", 40, 30, [1.5, 1.7]),
        ("SOAP", 40, 40, [1.1]),
    ]
    (row,) = shorter.section(found).splitlines()[-1:]
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    ours = "1.600 (1.500 to 1.700), n = 2"
    assert cells == ["P4, 8", "SOAP: 1.800", "40", ours, "30, 0.75 of them"]
