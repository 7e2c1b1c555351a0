"""The ledger of `benchmarks.rules`: what is kept, what is chosen, what is tabulated."""

import dataclasses
from pathlib import Path

import pytest
from benchmarks.rules import jobs
from benchmarks.rules.__main__ import to_do
from benchmarks.rules.contenders import CONTENDERS
from benchmarks.rules.outcomes import Evaluation, Outcome, append_outcome, read_outcomes
from benchmarks.rules.panels import panel, rates
from benchmarks.rules.tables import (
    defaults_table,
    finals_table,
    overview_table,
    schedules_table,
    tuning_table,
)

SETTING = jobs.Setting(data="cifar10", model="resnet8", batch=512, steps=48)


def outcome(
    name: str,
    *accuracies: float,
    ending: str = "done",
    setting: jobs.Setting = SETTING,
) -> Outcome:
    tests = [
        Evaluation(step=10 * i, loss=2 - a / 100, accuracy=a, cpu_seconds=5.0 * i)
        for i, a in enumerate(accuracies, start=1)
    ]
    return Outcome(
        name=f"{setting.name}-{name}",
        settings={"optimizer.lr": "0.1"},
        ending=ending,
        steps=10 * len(accuracies),
        cpu_seconds=5.0 * len(accuracies),
        tests=tuple(tests),
    )


def known(*outcomes: Outcome) -> dict[str, Outcome]:
    return {one.name: one for one in outcomes}


def test_what_is_appended_is_read_again(tmp_path: Path) -> None:
    ledger = tmp_path / "rules.jsonl"
    assert read_outcomes(ledger) == {}
    ones = [outcome("tune-sgd-t0", 40.0), outcome("tune-sgd-t1", ending="diverged")]
    for one in ones:
        append_outcome(ledger, one)
    assert read_outcomes(ledger) == known(*ones)


def test_a_miss_is_counted_and_never_chosen() -> None:
    ones = known(
        outcome("tune-muon-t0", 41.0),
        outcome("tune-muon-t1", 90.0, ending="diverged"),
        outcome("tune-muon+trust-t0", 70.0),
    )
    best = jobs.best_trial(ones, SETTING, "tune", "muon")
    assert best is not None
    assert best.name.endswith("-muon-t0")  # and not that of muon+trust
    table = "".join(tuning_table(ones, SETTING, CONTENDERS, "tune"))
    assert "| muon | 41.0 | 1.590 | - | 5 | 2 (1 missed) | lr 0.1 |" in table
    assert table.index("| muon+trust |") < table.index("| muon |")


def test_finals_are_means_over_seeds_with_what_a_step_costs() -> None:
    ones = known(
        outcome("final-sgd-r1", 30.0, 45.0, 50.0),
        outcome("final-sgd-r2", 52.0),
    )
    table = "".join(finals_table(ones, SETTING))
    assert "| sgd | 51.0 (50.0 to 52.0) | 1.490 | 2 | 10 | 500 |" in table


def test_a_seed_that_diverged_sinks_a_rule() -> None:
    ones = known(
        outcome("final-sgd-r1", 30.0),
        outcome("final-muon-r1", 90.0),
        outcome("final-muon-r2", ending="diverged"),
    )
    table = "".join(finals_table(ones, SETTING))
    assert "| muon | 90.0 (90.0 to 90.0, 1 missed) |" in table
    assert table.index("| sgd |") < table.index("| muon |")


def test_the_overview_marks_the_best_of_each_setting() -> None:
    ones = known(
        outcome("tune-sgd-t0", 40.0),
        outcome("tune-muon-t0", 45.0),
        outcome("tune-muon-t1", 41.0),
    )
    table = "".join(overview_table(ones, [SETTING]))
    assert "| rule | cifar10, resnet8, batch 512, 48 steps |" in table
    assert "| sgd | 40.0 |\n| muon | **45.0** |" in table


def test_how_far_the_defaults_are_behind_is_of_the_best_that_was_tried() -> None:
    ones = known(
        outcome("tune-polar__only_lr_tuned-t0", 48.0),
        outcome("tune-polar-t0", 44.0),
        outcome("ablate-damping_10-t0", 50.0),
        outcome("ablate-damping_10-t1", 90.0, ending="diverged"),
    )
    table = "".join(defaults_table(ones, [SETTING]))
    assert "48 steps | 48.0 | 0.1 | 50.0 | damping 10 | 4.0% |" in table


def test_the_shortest_whole_schedule_that_reaches_what_others_come_to() -> None:
    long = SETTING
    short, other = (
        dataclasses.replace(SETTING, steps=n, model=model)
        for n, model in ((24, "resnet8"), (24, "resnet20"))
    )
    ones = known(
        outcome("final-soap-r1", 46.0),
        outcome("final-soap-r2", 47.06),
        outcome("final-polar-r1", 52.0),
        outcome("final-muon-r1", 45.0),
        outcome("final-lars-r1", 99.0, ending="diverged"),
        outcome("final-polar-r1", 46.6, setting=short),
        outcome("final-polar-r2", 46.8, setting=short),
        outcome("final-soap-r1", 41.0, setting=short),
    )
    table = "".join(schedules_table(ones, [short, long]))
    assert table.splitlines() == [
        "| rule | 24 steps | 48 steps | steps to 46.5% | CPU s to it |",
        "|---|---|---|---|---|",
        "| polar | 46.7 | 52.0 | 24 | 5 |",
        "| soap | 41.0 | 46.5 | 48 | 5 |",
        "| muon | - | 45.0 | - | - |",
        "| lars | - | - | - | - |",
    ]
    other_lr = dataclasses.replace(ones[f"{short.name}-final-soap-r1"], settings={})
    table = "".join(schedules_table(ones | known(other_lr), [long, short]))
    assert "| soap | - | 46.5 | 48 | 5 |" in table
    assert not [*schedules_table(ones, [other, long])]
    assert (short.place, other.place) == (
        "cifar10, resnet8, batch 512",
        "cifar10, resnet20, batch 512",
    )


def test_the_figure_shows_each_seed_of_the_finals_best_rule_first() -> None:
    ones = known(
        outcome("final-soap-r1", 46.0),
        outcome("final-soap-r2", ending="diverged"),
        outcome("final-polar-r1", 30.0, 52.0),
        outcome("final-polar-r2", 54.0),
    )
    assert panel(ones, SETTING) == (
        "accuracy, %",
        {"polar": [52.0, 54.0], "soap": [46.0]},
    )
    assert panel(known(outcome("final-soap-r1", 46.0)), SETTING) is None


def test_the_other_figure_shows_trials_by_learning_rate() -> None:
    def trial(name: str, lr: str, accuracy: float, ending: str = "done") -> Outcome:
        one = outcome(f"tune-{name}__only_lr_tuned-t{lr}", accuracy, ending=ending)
        return dataclasses.replace(one, settings={"optimizer.lr": lr})

    ones = known(
        *(trial("polar", lr, 30.0 + float(lr)) for lr in ("3", "1", "2")),
        *(trial("muon+trust", lr, 20.0) for lr in ("1", "2", "5")),
        trial("muon+trust", "4", 99.0, ending="diverged"),
        *(trial("soap", lr, 20.0) for lr in ("1", "2")),
        *(outcome(f"tune-soap-t{i}", 99.0) for i in range(3)),
    )
    lines = {
        "polar": ([1.0, 2.0, 3.0], [31.0, 32.0, 33.0]),
        "muon+trust": ([1.0, 2.0, 5.0], [20.0] * 3),
    }
    assert rates(ones, SETTING) == ("accuracy, %", lines)
    ones = {name: one for name, one in ones.items() if "muon" not in name}
    assert rates(ones, SETTING) is None


def test_a_model_may_be_named_with_its_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "training_examples", lambda _: 50_000)
    narrow = dataclasses.replace(SETTING, model="resnet8w8")
    assert narrow.title == "cifar10, resnet8 of width 8, batch 512, 48 steps"
    command = " ".join(narrow.command("sgd", 0, 1))
    assert "--model.name resnet8 --model.width 8 " in command
    assert "width" not in " ".join(SETTING.command("sgd", 0, 1))


def test_finals_can_take_the_trials_of_another_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jobs.Setting, "command", lambda self, *args: [])
    ones = known(outcome("tune-sgd-t0", 40.0))
    short = dataclasses.replace(SETTING, steps=24)
    sgd = {"sgd": CONTENDERS["sgd"]}
    assert not [*jobs.final_jobs(short, sgd, ones, 1, 1)]
    (job,) = jobs.final_jobs(short, sgd, ones, 1, 1, SETTING)
    assert job.name == f"{short.name}-final-sgd-r1"
    assert job.settings == {"optimizer.lr": "0.1"}


def test_a_run_with_other_options_is_not_taken_for_done() -> None:
    job = jobs.Job(name="a", settings={"optimizer.lr": "0.1"}, command=[])
    one = dataclasses.replace(outcome("x", 1.0), name="a")
    assert to_do([job], {}) == [job]
    assert to_do([job], known(one)) == []
    with pytest.raises(SystemExit, match=r"a was run with .*'0.1'.* now with .*'0.2'"):
        to_do([dataclasses.replace(job, settings={"optimizer.lr": "0.2"})], known(one))
    one = dataclasses.replace(one, command="cifar10-sgd --steps 48")
    with pytest.raises(
        SystemExit, match=r"with .*--steps 48, .* now with .*--steps 4:"
    ):
        to_do([dataclasses.replace(job, command=["--steps", "4"])], known(one))


def test_every_contender_gets_the_same_points_and_is_tried_in_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jobs.Setting, "command", lambda self, *args: [])
    names = ("sgd", "muon+trust")
    contenders = {name: CONTENDERS[name] for name in names}
    found = list(jobs.tuning_jobs(SETTING, contenders, "tune", 2))
    assert [job.name.partition("tune-")[2] for job in found] == [
        "sgd-t0",
        "muon+trust-t0",
        "sgd-t1",
        "muon+trust-t1",
    ]
    assert jobs.points(2, 2) == jobs.points(2, 6)[:2]
    parsed = jobs.settings_in({job.name: outcome("x", 1.0) for job in found})
    assert parsed == [SETTING]
