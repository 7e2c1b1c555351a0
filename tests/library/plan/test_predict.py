"""Profiles, seconds of exchanges, the choice of a strategy, and column splits."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.world import run_world

from natgrad.distributed.communicator import Communicator
from natgrad.math.polar import STEPS
from natgrad.plan import (
    EXCHANGES,
    BlockSpec,
    CostModel,
    HardwareProfile,
    Plan,
    StatisticSpec,
    make_plan,
)
from natgrad.plan.autotune.choice import choose_strategy
from natgrad.plan.autotune.predict import added_seconds, exchange_seconds
from natgrad.plan.autotune.profile import Collective, Curve, Link, ModelTimes
from natgrad.plan.autotune.profile_file import (
    load_profile,
    profile_from_dict,
    save_profile,
)
from natgrad.plan.cost import POLAR_STEPS
from natgrad.plan.split import (
    SPLIT_EXCHANGES,
    loads_of,
    lower_bound,
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
        "way": "rooted",
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
    links = {"latency": 0.0, "bandwidth": 1e9}
    profile = machine(inside=links, between=links)
    size = 4 * sum(b.elements for b in BLOCKS)
    wise = {s: make_plan(BLOCKS, world=8, strategy=s) for s in ("factor_wise", "spngd")}
    way = profile.move(size, 8)
    both = exchange_seconds(wise["factor_wise"], "reduce_gradients", profile)
    one = exchange_seconds(wise["spngd"], "reduce_gradients", profile)
    assert both == pytest.approx(2 * way)
    assert one == pytest.approx(way)
    assert exchange_seconds(wise["factor_wise"], "share_updates", profile) == 0


def test_a_collective_costs_its_latency_and_its_padding() -> None:
    """A reduce for each owner; or one reduce-scatter of equal parts; or, where few
    ranks own anything, one all-reduce."""
    blocks = [block(f"l{i}", 8, 16) for i in range(4)]
    each = 4 * 8 * 16
    for world, way, expected in (
        (4, "rooted", lambda move: 4 * move(each)),
        (4, "padded", lambda move: move(4 * each)),
        (16, "padded", lambda move: 2 * move(4 * each)),
    ):
        profile = machine(way=way)
        plan = make_plan(blocks, world=world, strategy="spngd")
        seconds = exchange_seconds(plan, "reduce_gradients", profile)
        wanted = expected(lambda size, w=world, p=profile: p.move(size, w))
        assert seconds == pytest.approx(wanted), (world, way)


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
    # by what they send, not by in how many messages
    inside, between = {"latency": 0.0, "bandwidth": 1e9}, {"latency": 0.0}
    made_up = machine(inside=inside, between=between | {"bandwidth": 1e8})
    found = choose_strategy(BLOCKS, 4, made_up, candidates=order)
    others = [s for name, s in found.seconds.items() if name != found.strategy]
    gap = max(others) - found.seconds[found.strategy]
    assert gap > 0
    assert found.strategy != order[0]
    long = choose_strategy(BLOCKS, 4, made_up, compute=100 * gap, candidates=order)
    assert long.strategy == order[0]


def test_a_choice_says_what_its_five_percent_are_of() -> None:
    """Without the seconds of the passes, of what is added to them."""
    added = choose_strategy(BLOCKS, 4, machine())
    assert "least seconds beside forward and backward" in added.reasons
    least = min(added.seconds.values())
    assert added.seconds[added.strategy] <= 1.05 * least
    assert (
        "of the least step"
        in choose_strategy(BLOCKS, 4, machine(), compute=1.0).reasons
    )


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


CUBIC = machine(cholesky={"call": 0.0, "square": 0.0, "cube": 1e-9}).cost("factored")


def divided(world: int = 8, **changes: Any) -> Plan:
    options: dict[str, Any] = {"inverse": "factored", "costs": CUBIC, "split": 8}
    return make_plan(BLOCKS, world=world, **(options | changes))


def test_a_factor_larger_than_a_fair_share_is_divided() -> None:
    plan = divided()
    plan.check()
    first = plan.splits[0]
    assert first.name == "big/A"
    assert first.ranks[0] == plan.owners["big/A"]
    whole = 1e-9 * 256**3
    part = whole * (1 / 3 + 2 / 3 / len(first.ranks))
    assert first.seconds(CUBIC) == pytest.approx(part)
    alone = divided(split=1)
    assert alone.splits == ()
    assert max(loads_of(plan)) < lower_bound(plan) <= max(loads_of(alone))


def test_a_split_is_part_of_the_plan() -> None:
    """Its groups, exchanges and elements; in the digest, the data and the table."""
    plan, alone = divided(), divided(split=1)
    split, world = plan.splits[0], plan.world
    packed = 256 * 257 // 2
    out, back = (plan.exchanges[name] for name in SPLIT_EXCHANGES)
    assert out.elements([split.name]) == packed
    assert out.wire([split.name]) == (len(split.ranks) - 1) * packed
    mine = [i for i in back.items if i.name.startswith(f"{split.name}#")]
    assert [i.sources for i in mine] == [(rank,) for rank in split.ranks[1:]]
    assert split.columns(0) + sum(i.elements for i in mine) == packed
    sent, received = back.volumes()
    assert received[split.ranks[0]] == sum(sent) == back.elements()
    assert plan.digest() != alone.digest()
    # Other helpers move as much: who they are counts.
    other = replace(split, ranks=(*split.ranks[:1], *split.ranks[:0:-1]))
    moved = replace(plan, splits=(other, *plan.splits[1:]))
    assert moved.digest() != plan.digest()
    assert set(alone.exchanges) == set(EXCHANGES)
    found = plan.to_dict()
    assert found["splits"][0]["ranks"] == list(split.ranks)
    assert sum(found["splits"][0]["elements"]) == packed
    seconds = [rank["seconds"] for rank in found["ranks"]]
    assert max(seconds) < max(r["seconds"] for r in alone.to_dict()["ranks"])
    assert f"big/A: {1e-9 * 256**3:.3g} s ->" in plan.describe()
    assert len(seconds) == world


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"share_factors": {"destinations": (0, 1)}}, "misses the factor 'big/A'"),
        ({"gather_columns": {"sources": (0,)}}, "'big/A' do not return from"),
        ({"gather_columns": {"elements": 3}}, "'big/A' have .* Must be 32896"),
        ({"gather_columns": {"name": "odd#1"}}, "'big/A' do not return from"),
    ],
)
def test_a_faulty_split_is_found(
    change: dict[str, dict[str, Any]], message: str
) -> None:
    plan = divided()
    exchanges = dict(plan.exchanges)
    for name, changes in change.items():
        old = exchanges[name]
        first = replace(old.items[0], **changes)
        exchanges[name] = replace(old, items=(first, *old.items[1:]))
    with pytest.raises(ValueError, match=message):
        replace(plan, exchanges=exchanges).check()


def test_exchanges_without_their_split_are_found() -> None:
    with pytest.raises(ValueError, match="split that the plan does not have"):
        replace(divided(), splits=()).check()


def test_more_helpers_are_never_worse_than_a_third() -> None:
    plan = make_plan(BLOCKS, world=8, inverse="factored")
    spec = next(s for s in plan.statistics if s.name == "big/A")
    seconds = [split_seconds(plan.cost, spec, r) for r in (1, 2, 8, 10**6)]
    assert seconds[0] == pytest.approx(plan.cost.invert(spec))
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] > seconds[0] / 3


def test_an_eigendecomposition_is_not_divided() -> None:
    with pytest.raises(ValueError, match="split=8 with inverse='eigen'"):
        make_plan(BLOCKS, world=8, split=8)
    with pytest.raises(ValueError, match="Invalid split=0"):
        make_plan(BLOCKS, world=8, split=0)


def test_a_dear_network_keeps_factors_whole() -> None:
    slow = machine(
        between={"latency": 10.0, "bandwidth": 1.0},
        inside={"latency": 10.0, "bandwidth": 1.0},
    )
    assert divided(profile=slow).splits == ()
    # Without a machine the constants' links count: a small gain is not worth them.
    cheap = machine(cholesky={"call": 0.0, "square": 0.0, "cube": 1e-12})
    assert divided(costs=cheap.cost("factored")).splits == ()


def test_a_split_takes_the_links_that_its_ranks_are_on() -> None:
    profile = machine()
    assert profile.move_among(1e6, (0, 1)) == profile.move(1e6, 2)
    assert profile.move_among(1e6, (0, 2)) == pytest.approx(0.5e6 / 1e8 + 1e-5)
    plan = divided(profile=profile)
    each = [exchange_seconds(plan, name, profile) for name in SPLIT_EXCHANGES]
    ranks = plan.splits[0].ranks
    least = profile.move_among(4 * plan.splits[0].spec.packed, ranks)
    assert each[0] == each[1] >= least > 0


def execute(rank: int) -> str:
    plan = divided(world=2)
    assert plan.splits
    try:
        Communicator(plan)
    except ValueError as error:
        return str(error)
    return "executed"


@pytest.mark.processes
def test_the_runtime_refuses_a_plan_with_splits() -> None:
    said = run_world(2, execute)
    assert all("Must be made with split=1" in text for text in said)


# -- rules and sizes of products ------------------------------------------------------


def test_polar_pays_for_its_iterations() -> None:
    assert POLAR_STEPS == STEPS
    plain, polar = (CostModel(inverse="factored", scale=s) for s in RULES)
    one = block("b", 8, 16)
    steps = POLAR_STEPS * (4 * 8 * 8 * 16 + 2 * 8**3)
    whitened = 2 * 2 * 8 * 16 * (8 + 16)
    assert polar.precondition(one) == pytest.approx(
        polar.call + polar.flop * (steps + whitened)
    )
    assert plain.precondition(one) < polar.precondition(one)


RULES = ("kronecker", "orthogonal")


def test_a_second_moment_is_shared_as_often_as_it_is_estimated() -> None:
    name, n = "b", 4
    moment = StatisticSpec(
        name="b/S",
        block=name,
        kind="S",
        side="both",
        stack=1,
        size=n * n,
        diagonal=True,
    )
    one = block(name, n, n)
    both = replace(one, statistics=(*one.statistics, moment))
    plan = make_plan([both], world=8, strategy="factor_wise")
    profile = machine(
        inside={"latency": 0.0, "bandwidth": 1e9},
        between={"latency": 0.0, "bandwidth": 1e9},
    )
    factors = 2 * 4 * (n * n + n)
    expected = profile.move(4 * n * n, 8) / 2 + profile.move(factors, 8) / 10
    found = added_seconds(plan, profile, 2, 10)["share_inverses"]
    assert found == pytest.approx(expected)
    half = added_seconds(plan, profile, 2, 10, half=("share_inverses",))
    assert half["share_inverses"] == pytest.approx(found / 2)


def test_products_have_the_rate_of_their_size(tmp_path: Path) -> None:
    profile = machine(flops=[[10, 4e-9], [1000, 1e-9]])
    rates = [profile.product(n) for n in (1, 10, 100, 1000, 10**5)]
    assert rates == pytest.approx([4e-9, 4e-9, 2e-9, 1e-9, 1e-9])
    cost = profile.cost("factored")
    one = block("b", 10, 10)
    assert cost.precondition(one) == pytest.approx(cost.call + 4e-9 * 2 * 2 * 1000)
    save_profile(profile, tmp_path / "p.toml")
    assert load_profile(tmp_path / "p.toml") == profile
    # A profile written before there were any has one rate.
    assert machine(flop=3e-9).product(7) == 3e-9
    with pytest.raises(ValueError, match="flops"):
        machine(flops=[[10, 1e-9], [5, 1e-9]])
