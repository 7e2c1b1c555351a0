"""The benchmarks run and their arithmetic is right; the numbers are not judged."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import (
    constant_rate,
    factors,
    images,
    memory,
    phases,
    predict,
    scaling,
    step_time,
    trace,
    zoo,
)
from benchmarks import distributed as ranks
from benchmarks.cases import QUICK_CASES
from benchmarks.common import (
    FULL,
    PLAIN,
    REFRESHING,
    STATISTICS,
    Contender,
    Sample,
    interleave,
    run_step,
    summarise,
    tensor_bytes,
    turns,
)
from benchmarks.contenders import CYCLE, cycle, make_all
from benchmarks.pictures import write_imagenet

import natgrad
from natgrad_lab.data.cache import Form, write_cache
from natgrad_lab.data.imagenet import originals
from natgrad_lab.simulate import modeltimes


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def contender(name: str, **settings: Any) -> Contender:
    return Contender(name=name, step=lambda: None, **settings)


def sampled(seconds: list[float]) -> list[Sample]:
    return [Sample(round=i + 1, wall=x, cpu=2 * x) for i, x in enumerate(seconds)]


def test_the_mean_of_a_policy_is_that_of_its_hundred_steps():
    ours = contender("ours", kinds=CYCLE, policies=REFRESHING)
    samples = {
        ("SGD", PLAIN): sampled([2.0, 2.0, 9.0]),
        ("ours", FULL): sampled([20.0, 20.0, 20.0]),
        ("ours", STATISTICS): sampled([6.0, 6.0, 6.0]),
        ("ours", PLAIN): sampled([4.0, 4.0, 4.0]),
    }
    _, every, seldom = summarise(samples, [contender("SGD"), ours], "wall")
    hundred = [20.0, *[6.0] * 9, *[4.0] * 90]
    assert every["ratio"] == pytest.approx(10.0)
    assert seldom["seconds"] == pytest.approx(sum(hundred) / 100)
    assert seldom["ratio"] == pytest.approx(sum(hundred) / 200)


def test_an_adaptive_policy_is_compared_by_means():
    ours = contender("ours", mean=True)
    samples = {
        ("SGD", PLAIN): sampled([1.0, 1.0, 4.0]),
        ("ours", PLAIN): sampled([2.0, 2.0, 8.0]),
    }
    row = summarise(samples, [contender("SGD"), ours], "cpu")[1]
    assert row["seconds"] == pytest.approx(8.0)
    assert row["ratio"] == pytest.approx(2.0)


def test_everyone_has_a_turn_for_each_kind_and_the_order_rotates():
    everyone = [contender("SGD"), contender("a", kinds=CYCLE[:3]), contender("b")]
    first, second = ([*turns(everyone, r)] for r in (0, 1))
    assert [(c.name, k) for c, k in first] == [
        ("SGD", PLAIN),
        *[("a", kind) for kind in CYCLE[:3]],
        ("b", PLAIN),
    ]
    assert [c.name for c, _ in second] == ["SGD", "b", "a", "a", "a"]


def test_warm_up_is_not_counted_and_slow_peers_sit_out():
    peer = contender("peer", max_rounds=1)
    samples = interleave([contender("SGD"), peer], seconds=0, least=3)
    assert len(samples["SGD", PLAIN]) == 3
    assert len(samples["peer", PLAIN]) == 1


def test_images_are_compared_within_a_round():
    before, now = sampled([8.0, 8.0, 80.0]), sampled([2.0, 2.0, 20.0])
    row = images.row("ours", now, before, batch=4, threads=2)
    assert (row["times_cpu"], row["times_wall"]) == (4.0, 4.0)
    assert row["images_a_second"] == 2.0
    assert row["cpu_ms"] == 1000.0
    assert row["cores_for_a_step"] == pytest.approx(32_768 / 0.187)


def test_every_way_to_make_a_batch_of_images_is_measured(tmp_path: Path):
    write_imagenet(tmp_path, train=1, val=1, sizes=[(60, 80)])
    splits, classes = originals(tmp_path)
    write_cache(tmp_path / "cache", splits, classes, Form())
    rows = images.measure(tmp_path, tmp_path / "cache", batch=2, threads=1, seconds=0)
    assert [row["rounds"] for row in rows[1:]] == [2] * 6
    assert all(row["cpu_ms"] > 0 for row in rows)
    assert "The cache has 9.0 kB an image" in images.report(rows, [8000, 10_000])


def test_a_cycle_makes_the_kinds_of_steps_it_names():
    case = QUICK_CASES["small mlp"]
    kfac = make_all(case, "contiguous", ["KFAC eigen"])[1]
    engine = kfac.target.engine
    timing = next(iter(engine.statistics.states.values())).timing
    made: list[tuple[int, int]] = []
    for kind in CYCLE * 2:
        before = timing.refreshed, timing.inverted
        run_step(kfac, kind)
        made.append((timing.refreshed - before[0], timing.inverted - before[1]))
    made_by = {FULL: (1, 1), STATISTICS: (1, 0), PLAIN: (0, 0)}
    assert made == [made_by[kind] for kind in CYCLE * 2]


def test_a_cycle_of_full_steps_is_every_step():
    policy = cycle((FULL,))
    assert isinstance(policy, natgrad.Every)
    assert [policy.after_inverse(s, None) for s in (0, 1, 7)] == [1, 2, 8]  # type: ignore[arg-type]


def test_phases_add_up_and_are_charged_where_they_belong():
    kfac = make_all(QUICK_CASES["resnet8"], "contiguous", ["KFAC eigen"])[1]
    for kind in CYCLE:
        run_step(kfac, kind)
    found = phases.measure(kfac, "wall", rounds=1)
    assert found[FULL]["inverses"] > 10 * found[STATISTICS]["inverses"]
    assert found[STATISTICS]["statistics"] > 3 * found[PLAIN]["statistics"]
    assert all(x > 0 for x in found[FULL].values())


def test_polar_is_charged_for_its_update():
    polar = make_all(QUICK_CASES["small mlp"], "contiguous", ["Polar"])[1]
    found = phases.measure(polar, "wall", rounds=1)
    assert all(each["update"] > 0 for each in found.values())


def test_a_contender_out_of_step_with_its_kinds_is_noticed():
    kfac = make_all(QUICK_CASES["small mlp"], "contiguous", ["KFAC eigen"])[1]
    with pytest.raises(RuntimeError, match="about to make a full, not a plain"):
        run_step(kfac, PLAIN)


def test_nested_phases_are_not_counted_twice():
    found = {("step", ""): 5.0, ("refresh", ""): 2.0, ("invert", "a"): 1.5}
    split = phases.split(9.0, {**found, ("estimate", "a"): 1.0})
    assert list(split.values()) == [3.0, 1.5, 1.5, 0.0, 3.0]


def test_peak_memory_is_that_of_what_lives_at_once():
    def step() -> None:
        for _ in range(3):
            torch.empty(250_000)
        keep = torch.empty(500_000)
        del keep

    found = memory.peak(Contender(name="x", step=step), PLAIN)
    assert 2_000_000 <= found < 2_100_000


def test_bytes_of_views_count_once():
    x = torch.zeros(10)
    assert tensor_bytes({"a": [x, x[:5]], "b": (torch.zeros(2), None, 3)}) == 48


def event(name: str, begin: float, end: float) -> dict[str, Any]:
    return {"name": name, "ph": "X", "tid": 1, "ts": begin, "dur": end - begin}


@pytest.mark.parametrize(
    ("begin", "end", "overlaps"),
    [(1, 4, True), (1, 2, False), (7, 9, False), (10, 12, False)],
)
def test_overlap_needs_work_of_the_backward_during_a_collective(
    begin: float, end: float, overlaps: bool
):
    events = [
        event("backward", 0, 8),
        event("aten::convolution_backward", 3, 6),
        event("aten::mm", 11, 12),
        event("gloo:reduce", begin, end),
    ]
    assert bool(trace.find_overlap(events)) is overlaps
    assert bool(trace.sent_early(events)) is (begin < 3)


def test_the_committed_trace_shows_communication_under_backward():
    path = Path(trace.__file__).parent / "results" / "overlap_trace.json.gz"
    assert trace.find_overlap(trace.read(path))


def test_step_time_runs(tmp_path: Path):
    options = ["--quick", "--only", "small mlp", "--threads", "1"]
    who = ["--contenders", "KFAC factored", "SPNGD adaptive", "SOAP"]
    step_time.main([*options, *who, "--out", str(tmp_path)])
    result = json.loads((tmp_path / "step_time.json").read_text())
    rows = result["cases"][0]["rows"]
    assert {"every step", "10/100", "adaptive", "1/10"} == {r["policy"] for r in rows}
    assert all(row["seconds"] > 0 and row["state_bytes"] > 0 for row in rows)
    assert "natgrad SPNGD adaptive" in (tmp_path / "step_time.md").read_text()
    assert (tmp_path / "step_time.png").stat().st_size > 0


def test_scaling_runs(tmp_path: Path):
    scaling.main(["--quick", "--only", "depth", "--out", str(tmp_path)])
    result = json.loads((tmp_path / "scaling_depth.json").read_text())
    assert len(result["panels"]) == 2
    assert (tmp_path / "scaling_depth.png").stat().st_size > 0


@pytest.mark.processes
def test_distributed_runs_and_sends_before_the_backward_ends(tmp_path: Path):
    options = ["--quick", "--only", "spngd", "--bucket", "65536"]
    ranks.main([*options, "--out", str(tmp_path)])
    result = json.loads((tmp_path / "distributed.json").read_text())
    moved = result["rows"][1]["sent_bytes"]
    assert moved[FULL]["reduce_statistics"] > 0
    assert moved[PLAIN].get("reduce_statistics", 0) == 0
    assert moved[PLAIN]["share_updates"] > 0
    assert trace.sent_early(trace.read(tmp_path / "overlap_trace.json.gz"))


def test_a_choice_is_judged_and_equal_strategies_are_one():
    cycles = {
        "sgd": [0.1, 0.1],
        "layer_wise": [1.0, 1.0],
        "hybrid(0.5)": [1.5, 1.5],
        "factor_wise": [2.0, 2.0],
    }
    found = predict.judge("mlp", 2, cycles, "factor_wise")
    assert found["best"] == "layer_wise = hybrid(0.5)"
    assert found["loss"] == pytest.approx(2.0 / 1.25 - 1)
    assert found["noise"] == pytest.approx(0.5)
    assert predict.judge("mlp", 2, cycles, "hybrid(0.5)")["loss"] == 0
    assert predict.judge("mlp", 4, cycles, "factor_wise")["loss"] == pytest.approx(1.0)
    assert predict.judge("mlp", 1, cycles, "factor_wise")["loss"] == 0


def test_predictions_are_counted_and_drawn(tmp_path: Path):
    profile = natgrad.plan.HardwareProfile(name="made up")
    rows = [
        predict.row("mlp", 1, s, [x, x, x], profile)
        for s, x in (("sgd", 1e-3), ("layer_wise", 1.0), ("spngd", 1e-6))
    ]
    exact = predict.predict("mlp", "spngd", 1, profile)
    rows.append(predict.row("mlp", 1, "factor_wise", [exact] * 3, profile))
    assert rows[-1]["error"] == pytest.approx(0.0)
    cycles = {"layer_wise": [1.0], "spngd": [2.0]}
    report = {"rows": rows, "rounds": 3, "machine": predict.machine()}
    report |= {"batch": 16, "when": "before", "notes": ["A remark."]}
    report["choices"] = [predict.judge("mlp", 1, cycles, "layer_wise")]
    assert predict.summary(report).startswith("1 of 3 predictions within 20%")
    predict.write(report, tmp_path)
    page = (tmp_path / "predict.md").read_text()
    assert "| factor_wise" in page
    assert "A remark." in page
    assert (tmp_path / "predict.png").stat().st_size > 0


def test_a_models_seconds_add_up_to_its_step(monkeypatch: pytest.MonkeyPatch):
    """The parts of steps whose seconds are made up."""
    plain = [[(1.0, 2.0, 0.5)]] * 4
    curved = [
        [(1.0, 2.0, 7.0)],
        [(1.0, 2.0, 2.0)],
        [(1.0, 4.0, 2.0)],
        [(1.0, 2.0, 2.0)],
    ]
    measured = iter([plain, curved])
    monkeypatch.setattr(modeltimes, "_steps", lambda *_: next(measured))
    monkeypatch.setattr(modeltimes, "_precondition", lambda *_: 0.5)
    times = modeltimes.model_times("resnet8", 2)
    assert (times.forward, times.backward, times.update) == (1.0, 2.0, 0.5)
    assert (times.statistics, times.invert) == (2.0, 3.0)
    assert (times.precondition, times.overhead) == (0.5, 1.0)
    assert predict.mean_times(times, times) == times


def test_a_model_is_measured():
    times = modeltimes.model_times("resnet8", 2, cycles=1)
    assert min(times.forward, times.backward, times.update, times.precondition) > 0
    # differences of measurements: on a busy machine nothing may be left
    assert min(times.statistics, times.invert, times.overhead) >= 0


def test_factors_run(tmp_path: Path):
    factors.main(["--sizes", "8", "--seconds", "0", "--out", str(tmp_path)])
    rows = (tmp_path / "factors.md").read_text().splitlines()
    assert rows[-1].startswith("| 8 ")
    assert rows[-1].count("|") == 2 + len(factors.OPERATIONS)


def test_the_zoo_runs(tmp_path: Path):
    where = ["--only", "list of inputs", "--steps", "2", "--out", str(tmp_path)]
    zoo.main(where)
    kept = json.loads((tmp_path / "zoo.json").read_text())["members"]["list of inputs"]
    assert set(kept) == {"start", "seconds", *zoo.ALL}
    zoo.main([*where, "--again", "Polar"])
    again = json.loads((tmp_path / "zoo.json").read_text())["members"]["list of inputs"]
    assert {**again, "seconds": 0} == {**kept, "seconds": 0}
    assert "| list of inputs |" in (tmp_path / "zoo.md").read_text()


def test_what_a_loss_of_the_zoo_may_be():
    outcome: dict[str, Any] = {"start": 2.0, "AdamW": {"0.01": 1.0, "0.1": 3.0}}
    outcome |= {"SGD": {"0.1": 1.0}, "Polar": 1.12, "SPNGD": float("nan")}
    outcome |= {"KFAC on SGD": 1.13, "KFAC on AdamW": 0.5}
    assert zoo.bound(outcome) == pytest.approx(1.12)
    assert zoo.misses(outcome) == ["KFAC on SGD", "SPNGD"]
    assert zoo.row("x", outcome)[-1] == "**nan**"


def test_the_snippet_runs(tmp_path: Path):
    constant_rate.main(["--seeds", "0", "--steps", "1", "--out", str(tmp_path)])
    page = (tmp_path / "constant_rate.md").read_text()
    assert page.count("| constant ") == page.count("| falls to zero ") == 4
