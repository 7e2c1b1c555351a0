"""Profiles, seconds of exchanges, the choice of a strategy, and column splits."""

from pathlib import Path

import pytest
import torch

from natgrad.plan import BlockSpec, HardwareProfile, StatisticSpec, make_plan
from natgrad.plan.choice import choose_strategy
from natgrad.plan.predict import added_seconds, exchange_seconds
from natgrad.plan.profile import Collective, Curve, Link, ModelTimes
from natgrad.plan.profile_file import (
    load_profile,
    profile_from_dict,
    save_profile,
)
from natgrad.plan.split import (
    loads_of,
    lower_bound,
    split_large,
    split_seconds,
)


def block(name: str, rows: int, cols: int) -> BlockSpec:
    sides = (("A", "right", cols), ("G", "left", rows))
    statistics = tuple(
        StatisticSpec(
            name=f"{name}/{kind}", block=name, kind=kind, side=side, stack=1, size=size
        )
        for kind, side, size in sides
    )
    return BlockSpec(name=name, stack=1, rows=rows, cols=cols, statistics=statistics)


BLOCKS = [block(f"l{i}", 8 * (i + 1), 16) for i in range(4)] + [block("big", 64, 256)]


def machine(**changes: object) -> HardwareProfile:
    values: dict[str, object] = {
        "name": "made up",
        "ranks_per_node": 2,
        "inside": {"latency": 1e-6, "bandwidth": 1e9},
        "between": {"latency": 1e-5, "bandwidth": 1e8},
    }
    return profile_from_dict(values | changes)


def test_a_profile_survives_the_disk(tmp_path: Path) -> None:
    times = ModelTimes(batch=4, forward=0.1, backward=0.2, statistics=0.3)
    profile = HardwareProfile(
        name='odd "name"',
        eigen=Curve(call=1e-3, cube=1e-12),
        inside=Link(latency=0.0, bandwidth=5e9),
        models={"mlp": times},
        crowding=(1.0, 1.5),
        collectives=(Collective(kind="gather", ranks=2, call=1e-4, byte=1e-9),),
    )
    save_profile(profile, tmp_path / "p.toml")
    assert load_profile(tmp_path / "p.toml") == profile


@pytest.mark.parametrize(
    ("key", "value"),
    [("flop", 0.0), ("algorithm", "star"), ("crowding", [0.5]), ("speed", 1.0)],
)
def test_a_bad_profile_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=key):
        machine(**{key: value})


def test_collectives_cost_what_the_formula_says() -> None:
    profile = machine()
    assert profile.move(1e6, 1) == 0
    assert profile.move(1e6, 2) == pytest.approx(0.5e6 / 1e9 + 1e-6)
    eight = 0.5e6 / 1e9 + 1e-6 + 0.75e6 / 1e8 + 3 * 1e-5
    assert profile.move(1e6, 8) == pytest.approx(eight)
    tree = machine(algorithm="tree")
    assert profile.move(1e6, 8) - tree.move(1e6, 8) == pytest.approx(1e-5)


def test_interleaved_groups_share_the_link_of_a_node() -> None:
    profile = machine()
    one = profile.move_strided(1e6, 4, 1)
    two = profile.move_strided(1e6, 4, 2)
    assert two - one == pytest.approx(0.75e6 / 1e8)


def test_an_all_reduce_is_two_ways_and_a_reduction_one() -> None:
    profile = machine()
    size = 4 * sum(b.elements for b in BLOCKS)
    wise = {s: make_plan(BLOCKS, world=8, strategy=s) for s in ("factor_wise", "spngd")}
    way = profile.move(size, 8)
    both = exchange_seconds(wise["factor_wise"], "reduce_gradients", profile)
    one = exchange_seconds(wise["spngd"], "reduce_gradients", profile)
    assert both == pytest.approx(2 * way)
    assert one == pytest.approx(way)
    assert exchange_seconds(wise["factor_wise"], "share_updates", profile) == 0


def test_weights_scale_what_is_due() -> None:
    plan, profile = (
        make_plan(BLOCKS, world=2),
        machine(inside={"latency": 0.0, "bandwidth": 1e9}),
    )
    names = [s.name for s in plan.statistics]
    full = exchange_seconds(plan, "reduce_statistics", profile)
    some = exchange_seconds(
        plan, "reduce_statistics", profile, weights=dict.fromkeys(names, 0.25)
    )
    assert some == pytest.approx(full / 4)


def test_ranks_that_share_cores_finish_as_a_fair_scheduler_lets_them() -> None:
    """Against a simulation in small slices of time."""
    profile = machine(crowding=[1.0, 1.2, 1.9, 2.4], ranks_per_node=4)
    loads = [0.5, 0.0, 2.0, 0.5, 1.0, 1.0, 0.25]  # the last three are another node
    left, ends, slice_ = list(loads), [0.0] * len(loads), 1e-3
    for step in range(10_000):
        for node in (range(4), range(4, 7)):
            busy = [rank for rank in node if left[rank] > 1e-9]
            for rank in busy:
                left[rank] -= slice_ / profile.crowding[len(busy) - 1]
                ends[rank] = (step + 1) * slice_
    assert profile.finish(loads) == pytest.approx(ends, abs=5e-3)
    assert machine().finish(loads) == loads


def test_crowding_grows_in_proportion_beyond_what_was_measured() -> None:
    profile = machine(crowding=[1.0, 1.5], ranks_per_node=8)
    assert [profile.slowdown(n) for n in (1, 2, 4)] == [1.0, 1.5, 3.0]


def test_a_measured_exchange_costs_its_calls_items_and_bytes() -> None:
    measured = [
        {"kind": "reduce", "ranks": 4, "begin": 1.0, "call": 0.1, "byte": 1e-6},
        {"kind": "gather", "ranks": 4, "call": 0.2, "item": 0.01},
        {"kind": "agree", "ranks": 4, "begin": 0.5},
    ]
    profile = machine(collectives=measured, ranks_per_node=4)
    plan = make_plan(BLOCKS, world=4, strategy="layer_wise")
    size = 4 * sum(s.packed for s in plan.statistics)
    owners = len(set(plan.owners.values()))
    seconds = exchange_seconds(plan, "reduce_statistics", profile)
    assert seconds == pytest.approx(1.0 + 0.1 * owners + 1e-6 * size)
    items = len(plan.exchanges["share_updates"].items)
    workers = len({ranks[0] for ranks in plan.workers.values()})
    seconds = exchange_seconds(plan, "share_updates", profile)
    assert seconds == pytest.approx(0.2 * workers + 0.01 * items)
    parts = added_seconds(plan, profile, 10, 100)
    assert parts["overhead"] == pytest.approx(2 * 0.5)


def test_traffic_dear_and_compute_cheap_choose_few_shared_inverses() -> None:
    slow = machine(
        flop=1e-15,
        between={"latency": 0.0, "bandwidth": 1e5},
        inside={"latency": 0.0, "bandwidth": 1e5},
    )
    rare = choose_strategy(
        BLOCKS, 8, slow, statistics=1000, inverses=1000, gradients="ddp"
    )
    assert rare.strategy == "factor_wise"
    often = choose_strategy(BLOCKS, 8, slow, statistics=1, inverses=1, gradients="ddp")
    # On 8 ranks hybrid(0.125) is layer_wise by another name.
    assert often.strategy == "layer_wise"
    assert "hybrid(0.125)" not in often.seconds
    assert "factor_wise" in often.reasons
    assert "share_updates" in often.reasons


def test_the_choice_is_the_least_of_its_own_predictions() -> None:
    choice = choose_strategy(BLOCKS, 4, machine(), compute=0.01)
    least = min(choice.seconds.values())
    assert least <= choice.seconds[choice.strategy] <= 1.05 * least + 0.05 * 0.01
    plan = make_plan(
        BLOCKS, world=4, strategy=choice.strategy, costs=machine().cost("eigen")
    )
    parts = added_seconds(plan, machine(), 10, 100)
    assert choice.seconds[choice.strategy] == pytest.approx(sum(parts.values()))
    sgd = 2 * machine().move(4 * sum(b.elements for b in BLOCKS), 4)
    added = sum(parts.values()) - sgd
    assert choice.overhead == pytest.approx(added / (0.01 + sgd))


def test_one_rank_has_no_exchange_to_choose_by() -> None:
    choice = choose_strategy(BLOCKS, 1, machine(), compute=0.01)
    assert len({round(s, 15) for s in choice.seconds.values()}) == 1
    assert choice.strategy == "layer_wise"


def test_steps_that_the_model_cannot_tell_apart_go_to_the_first() -> None:
    """A long forward and backward makes any difference between strategies small."""
    order = ("factor_wise", "spngd", "layer_wise")
    found = choose_strategy(BLOCKS, 4, machine(), candidates=order)
    others = [s for name, s in found.seconds.items() if name != found.strategy]
    gap = max(others) - found.seconds[found.strategy]
    assert gap > 0
    assert found.strategy != order[0]
    long = choose_strategy(BLOCKS, 4, machine(), compute=100 * gap, candidates=order)
    assert long.strategy == order[0]


def test_columns_of_an_inverse_need_only_the_rows_below() -> None:
    """The proposal is exact: helpers' columns, rows i >= j, are the inverse."""
    generator = torch.Generator().manual_seed(0)
    n, helpers = 12, 3
    x = torch.randn(n, n, generator=generator, dtype=torch.float64)
    matrix = x @ x.T + torch.eye(n, dtype=torch.float64)
    found = torch.zeros_like(matrix)
    for helper in range(helpers):
        lower = torch.linalg.cholesky(matrix)
        for j in range(helper, n, helpers):
            corner = lower[j:, j:]
            unit = torch.zeros(n - j, 1, dtype=torch.float64)
            unit[0] = 1
            y = torch.linalg.solve_triangular(corner, unit, upper=False)
            column = torch.linalg.solve_triangular(corner.T, y, upper=True)
            found[j:, j] = found[j, j:] = column[:, 0]
    torch.testing.assert_close(found, torch.linalg.inv(matrix), rtol=1e-10, atol=1e-10)


def test_a_factor_larger_than_a_fair_share_is_divided() -> None:
    cost = machine(cholesky={"call": 0.0, "square": 0.0, "cube": 1e-9}).cost("factored")
    plan = make_plan(BLOCKS, world=8, inverse="factored", costs=cost)
    splits, loads = split_large(plan)
    assert splits[0].name == "big/A"
    whole = 1e-9 * 256**3
    assert splits[0].whole == pytest.approx(whole)
    assert splits[0].seconds == pytest.approx(
        whole * (1 / 3 + 2 / 3 / len(splits[0].ranks))
    )
    assert max(loads) < lower_bound(plan) <= max(loads_of(plan))
    assert splits[0].elements == 256 * 257 // 2


def test_more_helpers_are_never_worse_than_a_third() -> None:
    plan = make_plan(BLOCKS, world=8, inverse="factored")
    spec = next(s for s in plan.statistics if s.name == "big/A")
    seconds = [split_seconds(plan, spec, r) for r in (1, 2, 8, 10**6)]
    assert seconds[0] == pytest.approx(plan.cost.invert(spec))
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] > seconds[0] / 3


def test_an_eigendecomposition_is_not_divided() -> None:
    with pytest.raises(ValueError, match="inverse='eigen'"):
        split_large(make_plan(BLOCKS, world=8))


def test_a_dear_network_keeps_factors_whole() -> None:
    slow = machine(
        between={"latency": 10.0, "bandwidth": 1.0},
        inside={"latency": 10.0, "bandwidth": 1.0},
    )
    plan = make_plan(BLOCKS, world=8, inverse="factored")
    assert split_large(plan, profile=slow)[0] == []
