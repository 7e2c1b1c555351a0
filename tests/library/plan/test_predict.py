"""Profiles, seconds of exchanges, the and the choice of a strategy."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from natgrad.math.polar import FIRST, SECOND
from natgrad.plan import (
    BlockSpec,
    CostModel,
    HardwareProfile,
    StatisticSpec,
    make_plan,
)
from natgrad.plan.autotune.choice import choose_strategy
from natgrad.plan.autotune.predict import (
    added_seconds,
    exchange_seconds,
    message_seconds,
)
from natgrad.plan.autotune.profile import Collective, Curve, Link, ModelTimes
from natgrad.plan.autotune.profile_file import (
    load_profile,
    profile_from_dict,
    save_profile,
)
from natgrad.plan.cost import POLAR_STEPS


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


# -- rules and sizes of products ------------------------------------------------------


def test_polar_pays_for_its_iterations() -> None:
    assert len((FIRST, SECOND)) == POLAR_STEPS
    plain, polar = (CostModel(inverse="factored", scale=s) for s in RULES)
    one = block("b", 8, 16)
    steps = POLAR_STEPS * (4 * 8 * 8 * 16 + 6 * 8**3)
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


def test_all_to_alls_of_pieces_are_priced_by_their_busiest_ends() -> None:
    plan = make_plan(BLOCKS, world=4, gradients="sharded")
    profile = machine()  # two nodes of two ranks
    (message,) = (m for m in plan.sequence() if m.exchange == "reduce_gradients")
    assert message.kind == "all_to_all"
    near, far = [[0] * 4, [0] * 4], [[0] * 2, [0] * 2]
    for item in plan.exchanges["reduce_gradients"].items:
        (source,), (to,) = item.sources, item.destinations
        same = source // 2 == to // 2
        for way, rank in ((0, source), (1, to)):
            if same:
                near[way][rank] += 4 * item.elements
            else:
                far[way][rank // 2] += 4 * item.elements
    wanted = max(map(max, near)) / 1e9 + max(map(max, far)) / 1e8 + 1e-6 + 1e-5
    assert message_seconds(message, profile) == pytest.approx(wanted)
    assert exchange_seconds(plan, "reduce_gradients", profile) == pytest.approx(wanted)
    once = Collective(kind="all_to_all", ranks=4, begin=1.0, call=0.5, byte=0.25)
    measured = machine(
        collectives=[
            asdict(once),
            {"kind": "reduce", "ranks": 4},
            {"kind": "gather", "ranks": 4, "begin": 3.0},
        ]
    )
    size = 4 * plan.exchanges["reduce_gradients"].elements()
    seconds = exchange_seconds(plan, "reduce_gradients", measured)
    assert seconds == pytest.approx(1.0 + 0.5 + 0.25 * size)
    older = replace(measured, collectives=measured.collectives[1:])
    assert exchange_seconds(plan, "reduce_gradients", older) == pytest.approx(3.0)
