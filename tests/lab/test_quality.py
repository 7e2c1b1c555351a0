"""The report of whole trainings."""

from typing import Any

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
    run("whole-activations", 0.3, 1, [2.0, 1.4, 1.2]),
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
