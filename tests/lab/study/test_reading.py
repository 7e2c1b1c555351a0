"""The reading functions on made-up curves whose answers are known by hand."""

import math

import pytest
from tests.lab.study.made import curve, falling, started, trial

from natgrad_lab.study.curves import (
    Curve,
    from_plain,
    from_records,
    mean_curve,
    to_plain,
)
from natgrad_lab.study.reading import (
    Criterion,
    best_trial,
    compute_seconds,
    cost_to,
    costs_to,
    examples,
    fewest,
    final,
    first_met,
    good_share,
    ideal_costs,
    iterations,
    quantile,
    scales_until,
    score,
    selected_run,
    speedups,
    stage_targets,
    step_cost,
    value_at,
    wall_seconds,
)


def loss(value: float) -> Criterion:
    return Criterion(metric="loss", value=value)


def accuracy(value: float) -> Criterion:
    return Criterion(metric="accuracy", value=value)


def test_the_first_point_that_meets_a_target() -> None:
    made = curve([3.0, 2.0, 2.5, 1.0], accuracies=[10.0, 40.0, 30.0, 50.0])
    assert first_met(made, loss(2.0)) == 1
    assert first_met(made, loss(0.5)) is None
    assert first_met(made, accuracy(40.1)) == 3
    assert first_met(curve([math.nan, 1.0]), loss(2.0)) == 1


def test_k_is_the_least_over_all_configurations_in_each_cost() -> None:
    quick = trial("sgd", 64, 0.1, curve([3.0, 1.0], steps=10, seconds=9.0))
    slow = trial("sgd", 64, 0.2, curve([3.0, 2.0, 1.0], steps=10, seconds=1.0))
    never = trial("sgd", 64, 0.3, curve([3.0, 3.0]))
    found = fewest([slow, never, quick], loss(1.0))
    assert found is not None
    assert (found.cost, found.trial) == (20, quick)
    cheap = fewest([slow, never, quick], loss(1.0), compute_seconds)
    assert cheap is not None
    assert (cheap.cost, cheap.trial) == (3.0, slow)
    halfway = fewest([slow, quick], loss(2.5))
    assert halfway is not None
    assert (halfway.cost, halfway.trial) == (12.5, quick)  # a quarter of 10 to 20
    wall = fewest([slow], loss(1.0), wall_seconds)
    assert wall is not None
    assert wall.cost == 6.0
    assert fewest([never], loss(1.0)) is None
    assert costs_to([quick, slow], loss(1.0), examples) == {64: 1280}


def test_a_target_reached_before_diverging_counts() -> None:
    made = trial("sgd", 64, 0.1, curve([3.0, 1.0], ending="diverged"))
    assert costs_to([made], loss(1.0)) == {64: 20}


def scaling(method: str, iterations: dict[int, int]) -> list:
    """Trials that reach loss 1 after so many updates."""
    return [
        trial(method, m, 0.1, curve([3.0, 2.0, 1.0, 0.5], steps=k // 3))
        for m, k in iterations.items()
    ]


def test_between_two_points_a_curve_is_a_straight_line() -> None:
    made = trial("sgd", 64, 0.1, started([3.0, 1.0, 2.0, 0.5]))
    assert cost_to(made, loss(1.5), iterations) == 7.5
    assert cost_to(made, loss(1.0), iterations) == 10
    assert cost_to(made, loss(0.8), iterations) == pytest.approx(20 + 10 * 1.2 / 1.5)
    assert cost_to(made, loss(0.8), examples) == pytest.approx(64 * 28)
    assert cost_to(made, accuracy(75.0), iterations) == pytest.approx(2.5)
    assert cost_to(made, loss(3.0), iterations) == 0
    unknown = trial("sgd", 64, 0.1, curve([math.nan, 1.0]))
    assert cost_to(unknown, loss(2.0), iterations) == 20
    assert speedups({64: 10.0, 128: 0.0}, 64) == {64: 1.0}


def test_speedups_and_where_scaling_ends() -> None:
    trials = scaling("sgd", {64: 1200, 256: 300, 1024: 150, 4096: 147})
    costs = costs_to(trials, loss(1.0))
    assert costs == {64: 1200, 256: 300, 1024: 150, 4096: 147}
    gained = speedups(costs, 64)
    assert gained == pytest.approx({64: 1, 256: 4, 1024: 8, 4096: 1200 / 147})
    assert ideal_costs(costs, 64) == {64: 1200, 256: 300, 1024: 75, 4096: 18.75}
    sizes = list(costs)
    assert scales_until(gained, sizes, 64) == 1024  # 8 of 16 is just half
    assert scales_until(gained, sizes, 64, share=0.6) == 256
    assert scales_until(gained, sizes, 64, share=0.1) == 4096
    assert scales_until({64: 1.0}, [64], 64) == 64
    assert speedups({256: 3.0}, 64) == {}
    assert ideal_costs({256: 3.0}, 64) == {}


def test_a_batch_that_misses_the_target_ends_the_climb() -> None:
    assert scales_until({64: 1.0, 1024: 16.0}, [64, 256, 1024], 64) == 64


def test_the_best_and_the_selected_run() -> None:
    good = trial("sgd", 64, 0.1, curve([3.0, 0.1]))
    bad = trial("sgd", 64, 0.2, curve([3.0, 1.0]))
    large = trial("sgd", 1024, 0.1, curve([3.0, 0.7]))
    worst = trial("kfac", 1024, 0.1, curve([3.0, 0.9]))
    worse = trial("kfac", 1024, 0.2, curve([3.0, 2.0]))
    failed = trial("kfac", 1024, 0.3, curve([0.01], ending="diverged"))
    everything = [good, bad, large, worst, worse, failed]
    assert best_trial([bad, good], "loss") is good
    assert best_trial([failed, worse], "loss") is worse
    assert selected_run(everything, "loss") is worst
    assert selected_run(everything, "accuracy") is worst


def test_scores_of_failures() -> None:
    assert score(curve([2.0, 1.0, 1.5]), "loss") == 1.0
    assert score(curve([2.0], accuracies=[7.0]), "accuracy") == 7.0
    assert score(curve([2.0], ending="diverged"), "loss") == math.inf
    assert score(curve([2.0], ending="diverged"), "accuracy") == 0.0
    assert score(Curve(), "accuracy") == 0.0


def test_the_end_is_not_the_best() -> None:
    assert final(curve([2.0, 1.0, 1.5]), "loss") == 1.5
    assert final(curve([2.0, 1.0, 1.5]), "accuracy") == 85.0
    assert final(curve([2.0], ending="diverged"), "accuracy") == 0.0
    assert final(curve([2.0, math.nan]), "loss") == math.inf
    assert final(Curve(), "loss") == math.inf


def test_one_target_a_stage_at_80_percent_of_its_gain() -> None:
    # epochs 1..10, decays at 4 and 8: stages 5 -> 3, 3 -> 1, 1 -> 0.5
    made = curve([5, 4.5, 4, 3, 2.5, 2, 1.5, 1, 0.7, 0.5])
    targets = stage_targets(made, (4.0, 8.0), "loss")
    assert [each.value for each in targets] == pytest.approx([3.4, 1.4, 0.6])
    rising = stage_targets(made, (4.0, 8.0), "accuracy")  # 100 - 10 x loss
    assert [each.value for each in rising] == pytest.approx([66.0, 86.0, 94.0])


def test_a_stage_without_gain_or_points_has_no_target() -> None:
    made = curve([5, 4, 3, 3.5])
    assert [t.value for t in stage_targets(made, (3.0,), "loss")] == pytest.approx(
        [3.4]
    )
    assert len(stage_targets(made, (0.5, 2.0), "loss")) == 2
    assert stage_targets(Curve(), (1.0,), "loss") == ()


def test_stopping_early_is_simulated() -> None:
    made = curve([4.0, 3.0, 2.0], steps=10)
    assert value_at(made, "loss", epoch=2.0) == 3.0
    assert value_at(made, "loss", epoch=2.9) == pytest.approx(2.1)
    assert value_at(made, "loss", step=30) == 2.0
    assert value_at(made, "accuracy", step=9) == 0.0
    assert value_at(made, "loss", step=9) == math.inf
    whole = started([4.0, 3.0, 2.0])
    assert value_at(whole, "loss", step=0) == 4.0
    assert value_at(whole, "loss", step=5) == 3.5
    assert value_at(whole, "accuracy", step=1) == pytest.approx(61.0)
    assert value_at(started([math.nan, 3.0]), "loss", step=1) == math.inf
    lost = started([4.0], ending="diverged")  # before its first evaluation
    assert value_at(lost, "accuracy", step=1) == 0.0
    broken = curve([4.0, 3.0], ending="diverged")
    assert value_at(broken, "loss", epoch=1.0) == 4.0
    assert value_at(broken, "loss", epoch=3.0) == math.inf


def test_robustness_is_a_share() -> None:
    assert good_share([90.0, 95.0, 0.0, 97.0], accuracy(95.0)) == 0.5
    assert good_share([math.inf, 0.5], loss(1.0)) == 0.5
    assert good_share([], loss(1.0)) == 0.0


def test_quantiles_know_infinities() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([0.0, 10.0], 0.25) == 2.5
    assert quantile([1.0, math.inf, math.inf], 1.0) == math.inf
    assert quantile([1.0, 2.0, math.inf, math.inf, math.inf], 0.75) == math.inf


def test_the_cost_of_an_update_is_a_line_without_negative_parts() -> None:
    cost = step_cost({64: 0.5 + 0.64, 256: 0.5 + 2.56, 1024: 0.5 + 10.24})
    assert (cost.fixed, cost.example) == pytest.approx((0.5, 0.01))
    assert cost.alone(100) == pytest.approx(1.5)
    assert cost.shared(64) == pytest.approx(1.14)
    through_zero = step_cost({1: 0.5, 2: 2.0})
    assert through_zero.fixed == 0
    assert through_zero.example == pytest.approx((0.5 + 4.0) / 5)
    flat = step_cost({1: 2.0, 2: 1.0})
    assert (flat.fixed, flat.example) == (1.5, 0.0)
    assert math.isnan(step_cost({}).fixed)


def test_a_curve_from_records() -> None:
    spent = {"seconds": 1.0, "cpu_seconds": 2.0}
    records = [
        {"kind": "test", "step": 0, "epoch": 0.0, "loss": 9, "accuracy": 10.0, **spent},
        {"kind": "start", "step": 1, "loss": 7.0},
        {"kind": "train", "step": 2, "loss": 4.0},
        {"kind": "train", "step": 3, "loss": 1.0},
        {"kind": "test", "step": 3, "epoch": 1.0, "loss": 9, "accuracy": 50.0, **spent},
        {"kind": "test", "step": 4, "epoch": 1.5, "loss": 9, "accuracy": 55.0, **spent},
        {"kind": "train", "step": 5, "loss": 2.0},
        {"kind": "test", "step": 5, "epoch": 2.0, "loss": 9, "accuracy": 60.0, **spent},
        {"kind": "end", "step": 5, "reason": "done"},
    ]
    made = from_records(records, "done")
    assert made.steps == (0, 3, 4, 5)
    assert made.losses == pytest.approx((7.0, 3.0, 3.0, 2.0))  # (2 x 4 + 1 x 1) / 3
    assert made.accuracies == (10.0, 50.0, 55.0, 60.0)
    first = from_records(records[:1], "diverged")
    assert first.steps == (0,)
    assert math.isnan(first.losses[0])
    assert math.isnan(first.step_seconds)
    assert made.step_seconds == pytest.approx(2 / 5)
    assert from_plain(to_plain(made)) == made
    assert math.isnan(from_plain(to_plain(curve([math.inf]))).losses[0])


def test_repeats_are_averaged_and_one_failure_fails_them() -> None:
    mean = mean_curve([curve([4.0, 2.0]), curve([2.0, 1.0])])
    assert mean.losses == (3.0, 1.5)
    assert mean.steps == (10, 20)
    failed = mean_curve([curve([4.0, 2.0]), curve([2.0], ending="diverged")])
    assert failed.diverged
    assert failed.losses == (3.0,)
    mixed = mean_curve([started([8.0, 4.0, 2.0]), curve([2.0, 1.0])])
    assert (mixed.steps, mixed.losses) == ((10, 20), (3.0, 1.5))


def test_made_up_falls_are_what_they_say() -> None:
    made = curve(falling(1.0))
    assert first_met(made, loss(1.0)) == 2
