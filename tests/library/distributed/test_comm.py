"""Exchanges on real processes against sums and copies done by hand."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.library.plan.test_plan import layer, norm_layer, plain
from tests.support.fleet import store_of_test
from tests.support.world import RankError, run_world
from torch import Tensor

from natgrad.distributed.communicator import (
    CommError,
    CommOptions,
    Communicator,
    world_of,
)
from natgrad.distributed.loads import Spares
from natgrad.plan import EXCHANGES, Plan, make_plan
from natgrad.plan.buckets import make_buckets
from natgrad.plan.hosts import nodes_of

STRATEGIES = ("spngd", "layer_wise", "factor_wise", "hybrid(0.5)", "hybrid(0.75)")
TIMEOUT = 20.0


def small_plan(world: int, strategy: str, **keywords: Any) -> Plan:
    blocks = [
        layer("conv", 4, 9, stack=2),
        norm_layer("bn", 4, "unit"),
        plain("scale", 3),
        layer("wide", 7, 5),
        norm_layer("bn2", 5, "diag"),
        layer("fc", 10, 6),
    ]
    return make_plan(blocks, world=world, strategy=strategy, **keywords)


def value(rank: int, name: str, elements: int, round_: int = 0) -> Tensor:
    """A float64 tensor that any rank can compute for any other."""
    seed = hash_of(f"{rank} {name} {round_}")
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(elements, generator=generator, dtype=torch.float64)


def hash_of(text: str) -> int:
    return sum((i + 1) * byte for i, byte in enumerate(text.encode()))


def total(plan: Plan, name: str, elements: int, round_: int = 0) -> Tensor:
    parts = [value(rank, name, elements, round_) for rank in range(plan.world)]
    return torch.stack(parts).sum(0)


def expected(plan: Plan, exchange: str, rank: int) -> dict[str, Tensor]:
    """What a rank must receive when every source puts `value` once."""
    moves = plan.exchanges[exchange]
    if moves.reduces:
        items = [item for item in moves.items if rank in item.destinations]
        return {item.name: total(plan, item.name, item.elements) for item in items}
    # Sources of one item hold the same tensor: that of the first.
    return {
        item.name: value(item.sources[0], item.name, item.elements)
        for item in moves.items
        if rank in item.destinations and rank not in item.sources
    }


def run(comm: Communicator, exchange: str, dtype: torch.dtype) -> dict[str, Tensor]:
    moves = comm.plan.exchanges[exchange]
    flight = comm.begin(exchange, [item.name for item in moves.items], dtype)
    for item in moves.items:
        first = comm.rank if moves.reduces else item.sources[0]
        if comm.rank in item.sources:
            flat = value(first, item.name, item.elements)
            flight.put(item.name, flat.to(dtype))
    return flight.finish()


def same(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float) -> None:
    assert set(got) == set(want)
    for name, tensor in want.items():
        assert got[name].shape == tensor.shape
        error = (got[name].double() - tensor).abs().max() / tensor.abs().max()
        assert error <= tolerance, f"{name}: {error}"


def every_exchange(
    rank: int, strategy: str, options: CommOptions, hosts: list[str] | None = None
) -> None:
    """All exchanges, the bytes they moved, twice in turn, and in float64."""
    plan = small_plan(world_of(), strategy)
    comm = Communicator(plan, options, hosts=hosts)
    for _ in range(2):
        for exchange in EXCHANGES:
            got = run(comm, exchange, torch.float64)
            same(got, expected(plan, exchange, rank), 1e-14)
        comm.end_step()
    check_bytes(comm, 8)
    for x, n in comm.traffic()["step"].items():
        assert {k: 2 * v for k, v in n.items()} == comm.traffic()["total"][x]
    comm.close()


def check_bytes(
    comm: Communicator, size: int, names: Sequence[str] = EXCHANGES
) -> None:
    counts = comm.traffic()["step"]
    for name in names:
        sent, received = comm.plan.exchanges[name].volumes()
        count = counts.get(name, {"sent": 0, "received": 0})
        assert count["sent"] == size * sent[comm.rank], name
        assert count["received"] == size * received[comm.rank], name


OPTIONS = (
    CommOptions(bucket_bytes=1, timeout=TIMEOUT),
    CommOptions(bucket_bytes=500, timeout=TIMEOUT),
    CommOptions(bucket_bytes=10**9, timeout=TIMEOUT),
    CommOptions(overlap=False, bucket_bytes=800, timeout=TIMEOUT),
    CommOptions(collectives="padded", bucket_bytes=1, timeout=TIMEOUT),
    CommOptions(collectives="padded", bucket_bytes=10**9, timeout=TIMEOUT),
)


def every_option(rank: int, strategy: str) -> None:
    for options in OPTIONS:
        every_exchange(rank, strategy, options)


@pytest.mark.processes
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_exchanges_match_brute_force(world: int, strategy: str) -> None:
    run_world(world, every_option, strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_process_group(strategy: str) -> None:
    every_option(0, strategy)


def test_plan_of_another_world() -> None:
    with pytest.raises(ValueError, match="Invalid plan for 2 ranks"):
        Communicator(small_plan(2, "spngd"))


# -- hosts ----------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize("strategy", ["spngd", "factor_wise", "hybrid(0.5)"])
@pytest.mark.parametrize("hosts", ["aabb", "abba"])
def test_hierarchical(strategy: str, hosts: str) -> None:
    run_world(4, by_host, strategy, list(hosts))


def by_host(rank: int, strategy: str, hosts: list[str]) -> None:
    for collectives in ("rooted", "padded"):
        options = CommOptions(
            hierarchical=True,
            collectives=collectives,
            bucket_bytes=600,
            timeout=TIMEOUT,
        )
        every_exchange(rank, strategy, options, hosts)


def test_nodes() -> None:
    assert nodes_of("aabb", "auto") == ((0, 1), (2, 3))
    assert nodes_of("abab", True) == ((0, 2), (1, 3))
    for hosts, wanted in (
        ("aabb", False),
        ("aab", "auto"),
        ("abcd", True),
        ("aa", True),
    ):
        assert nodes_of(hosts, wanted) == ()
    with pytest.raises(ValueError, match=r"by host \{.a.: 2, .b.: 1\}"):
        nodes_of("aab", True)


# -- half precision -------------------------------------------------------------------


def half_exchanges(rank: int, strategy: str, precision: torch.dtype) -> None:
    plan = small_plan(world_of(), strategy)
    half = EXCHANGES if precision == torch.bfloat16 else CommOptions().half
    options = CommOptions(precision=precision, half=half, timeout=TIMEOUT)
    comm = Communicator(plan, options)
    for exchange in half:
        got = run(comm, exchange, torch.float32)
        assert all(tensor.dtype == torch.float32 for tensor in got.values())
        want = expected(plan, exchange, rank)
        if not plan.exchanges[exchange].reduces:
            for item in plan.exchanges[exchange].items:
                if rank in item.sources:
                    own = value(item.sources[0], item.name, item.elements)
                    want[item.name] = own
            rounded = {k: v.float().to(precision).double() for k, v in want.items()}
            same(got, rounded, 0.0)
        same(got, want, 4 * torch.finfo(precision).eps)
    check_bytes(comm, 2, half)


@pytest.mark.processes
@pytest.mark.parametrize("precision", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("strategy", ["spngd", "hybrid(0.5)"])
def test_half_precision(strategy: str, precision: torch.dtype) -> None:
    run_world(3, half_exchanges, strategy, precision)


def test_only_shares_are_halved_by_default() -> None:
    options = CommOptions(precision=torch.bfloat16)
    dtypes = [options.wire_dtype(exchange, torch.float32) for exchange in EXCHANGES]
    assert dtypes == [torch.float32] * 2 + [torch.bfloat16] * 2


# -- puts -----------------------------------------------------------------------------


def uneven_puts(rank: int, strategy: str, overlap: bool) -> None:
    """Rank r puts each item r times in rounds; a rank that has none sends zeros."""
    plan = small_plan(world_of(), strategy)
    options = CommOptions(bucket_bytes=400, overlap=overlap, timeout=TIMEOUT)
    comm = Communicator(plan, options)
    for exchange in ("reduce_statistics", "reduce_gradients"):
        items = plan.exchanges[exchange].items
        flight = comm.begin(exchange, [item.name for item in items], torch.float64)
        for round_ in range(rank):
            for item in items:
                flight.put(item.name, value(rank, item.name, item.elements, round_))
        want = {
            item.name: torch.stack(
                [
                    value(r, item.name, item.elements, round_)
                    for r in range(comm.world)
                    for round_ in range(r)
                ]
            ).sum(0)
            for item in items
            if rank in item.destinations
        }
        same(flight.finish(), want, 1e-14)


@pytest.mark.processes
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("strategy", ["spngd", "factor_wise", "hybrid(0.75)"])
def test_second_puts_add(strategy: str, overlap: bool) -> None:
    run_world(4, uneven_puts, strategy, overlap)


@pytest.mark.parametrize("overlap", [True, False])
def test_second_puts_add_without_processes(overlap: bool) -> None:
    comm = Communicator(small_plan(1, "spngd"), CommOptions(overlap=overlap))
    flight = comm.begin("reduce_gradients", ["scale"], torch.float32)
    for _ in range(3):
        flight.put("scale", torch.ones(3))
    assert flight.finish()["scale"].tolist() == [3.0] * 3


def partial_names(rank: int) -> None:
    """Only what is due moves, and puts may come in any order."""
    plan = small_plan(world_of(), "layer_wise")
    comm = Communicator(plan, CommOptions(bucket_bytes=300, timeout=TIMEOUT))
    names = ["fc/A", "conv/G", "bn/unit"]
    flight = comm.begin("reduce_statistics", names, torch.float64)
    items = plan.exchanges["reduce_statistics"].select(names)
    for item in items if rank else items[::-1]:
        flight.put(item.name, value(rank, item.name, item.elements))
    all_ = expected(plan, "reduce_statistics", rank)
    same(flight.finish(), {k: v for k, v in all_.items() if k in names}, 1e-14)
    sent = plan.exchanges["reduce_statistics"].volumes(names)[0]
    moved = comm.traffic()["total"]["reduce_statistics"]["sent"]
    assert moved == 8 * sent[rank]


@pytest.mark.processes
def test_only_what_is_named_moves() -> None:
    run_world(3, partial_names)


def results_are_the_callers(rank: int) -> None:
    plan = small_plan(world_of(), "factor_wise")
    comm = Communicator(plan, CommOptions(timeout=TIMEOUT))
    for exchange in EXCHANGES:
        first = run(comm, exchange, torch.float64)
        for tensor in first.values():
            tensor.fill_(-1)
        same(run(comm, exchange, torch.float64), expected(plan, exchange, rank), 1e-14)
        assert all((tensor == -1).all() for tensor in first.values())


@pytest.mark.processes
def test_results_are_the_callers_to_change() -> None:
    run_world(2, results_are_the_callers)


def test_buckets_leave_in_order_as_they_fill() -> None:
    plan = small_plan(3, "spngd")
    moves = plan.exchanges["reduce_statistics"]
    names = [item.name for item in moves.items]
    sizes = {item.name: item.elements for item in moves.items}
    buckets, after = make_buckets(moves, names, 120)
    assert not after
    assert [n for b in buckets for n in sorted(b.slots, key=names.index)] == names
    for bucket in buckets:
        assert len(bucket.parcels) == 1 or bucket.elements <= 120
        assert bucket.elements == sum(sizes[name] for name in bucket.slots)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda f: f.put("other", torch.zeros(3)), "Invalid name='other'"),
        (lambda f: f.put("fc/A", torch.zeros(3)), r"Invalid shape \(3,\) of 'fc/A'"),
        (lambda f: (f.finish(), f.finish()), "has finished"),
    ],
)
def test_misuse(act: Callable[..., Any], message: str) -> None:
    comm = Communicator(small_plan(1, "spngd"))
    flight = comm.begin("reduce_statistics", ["fc/A"], torch.float32)
    with pytest.raises(ValueError, match=message):
        act(flight)


def test_unknown_exchange() -> None:
    with pytest.raises(ValueError, match="Invalid exchange='gossip'"):
        Communicator(small_plan(1, "spngd")).begin("gossip", [], torch.float32)


@pytest.mark.parametrize(
    "keywords",
    [
        {"bucket_bytes": 0},
        {"precision": torch.float64},
        {"half": ("everything",)},
        {"hierarchical": "yes"},
        {"collectives": "ring"},
        {"timeout": 0.0},
    ],
)
def test_illegal_options(keywords: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"Invalid {next(iter(keywords))}="):
        CommOptions(**keywords)


def agreed(rank: int) -> list[float]:
    comm = Communicator(small_plan(world_of(), "spngd"), CommOptions(timeout=TIMEOUT))
    vector = torch.tensor([1.0, float(rank)])
    result = comm.agree(vector)
    assert vector.tolist() == [1.0, float(rank)]
    assert comm.traffic()["total"]["agree"] == {
        "calls": 1,
        "sent": 8,
        "received": 8,
        "padding": 0,
    }
    return result.tolist()


@pytest.mark.processes
def test_agree() -> None:
    assert run_world(3, agreed) == [[3.0, 3.0]] * 3


# -- faults ---------------------------------------------------------------------------


def error_of(act: Callable[[], Any]) -> tuple[str, str, float]:
    start = time.monotonic()
    try:
        act()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "", time.monotonic() - start


def disagree(rank: int, what: str) -> tuple[str, str, float]:
    odd = rank == 1
    strategy = "layer_wise" if odd and what == "plans" else "spngd"
    options = CommOptions(timeout=TIMEOUT, bucket_bytes=7 if what == "options" else 8)
    text = {"damping": "0.1" if odd and what == "fingerprint" else "0.2"}
    if what == "options" and not odd:
        options = CommOptions(timeout=TIMEOUT)
    plan = small_plan(world_of(), strategy)
    return error_of(lambda: Communicator(plan, options, fingerprint=text))


@pytest.mark.processes
@pytest.mark.parametrize("what", ["plans", "options", "fingerprint"])
def test_ranks_that_disagree_raise_alike(what: str) -> None:
    errors = run_world(3, disagree, what)
    assert len({(kind, message) for kind, message, _ in errors}) == 1
    kind, message, _ = errors[0]
    noun = "plans" if what == "plans" else "options"
    assert kind == "ValueError"
    assert f"different {noun}" in message
    assert "ranks [0, 2]" in message
    assert "ranks [1]" in message


def disagree_on_names(rank: int, odd: list[str]) -> tuple[str, str, float]:
    plan = small_plan(world_of(), "spngd")
    comm = Communicator(plan, CommOptions(timeout=TIMEOUT))
    names = ["fc/A", "fc/G"] if rank else odd
    flight = comm.begin("reduce_statistics", names, torch.float32)
    return error_of(flight.finish)


@pytest.mark.processes
@pytest.mark.parametrize("odd", [[], ["fc/A"], ["fc/G", "fc/A"]])
def test_different_names_raise_alike(odd: list[str]) -> None:
    errors = run_world(3, disagree_on_names, odd)
    assert {kind for kind, _, _ in errors} == {"ValueError"}
    assert all("different names" in message for _, message, _ in errors)


def forget(rank: int) -> tuple[str, str, float]:
    plan = small_plan(world_of(), "spngd", placement="round_robin")
    comm = Communicator(plan, CommOptions(timeout=TIMEOUT))
    flight = comm.begin("share_updates", ["conv"], torch.float32)
    return error_of(lambda: [x.isnan().all().item() for x in flight.finish().values()])


@pytest.mark.processes
def test_a_share_that_was_not_put() -> None:
    """The source raises; the others get NaN instead of waiting for ever."""
    kinds = [kind for kind, _, _ in run_world(3, forget, checked=False)]
    assert kinds == ["ValueError", "", ""]


def die(rank: int, dead: int) -> tuple[str, str, float]:
    plan = small_plan(world_of(), "factor_wise")
    comm = Communicator(plan, CommOptions(timeout=TIMEOUT))
    run(comm, "reduce_statistics", torch.float32)
    if rank == dead:
        os._exit(3)
    return error_of(lambda: run(comm, "reduce_statistics", torch.float32))


@pytest.mark.processes
@pytest.mark.parametrize("dead", [0, 2])
def test_a_rank_that_dies_is_named(dead: int) -> None:
    results = run_world(4, die, dead, may_die=[dead])
    for rank, result in enumerate(results):
        if rank != dead:
            kind, message, seconds = result
            assert kind == CommError.__name__
            assert f"Rank {dead} is gone" in message
            assert seconds < TIMEOUT


def told(act: Callable[[], Any]) -> tuple[str, str, float]:
    """As `error_of`; then a rank that lingers may go."""
    found = error_of(act)
    store_of_test().add("told", 1)
    return found


def linger(ranks: int) -> None:
    """Live until so many others were told, and do nothing."""
    while store_of_test().add("told", 0) < ranks:
        time.sleep(0.05)


def hang(rank: int) -> tuple[str, str, float]:
    plan = small_plan(world_of(), "spngd")
    comm = Communicator(plan, CommOptions(timeout=3.0))
    if rank == 1:
        linger(1)
        return "", "", 0.0
    return told(lambda: comm.agree(torch.ones(1)))


@pytest.mark.processes
def test_a_rank_that_is_stuck_ends_the_wait() -> None:
    kind, message, _ = run_world(2, hang, checked=False)[0]
    assert kind == CommError.__name__
    assert "All ranks live, but rank 1 is stuck: rank 0 in agree, rank 1" in message


def raise_and_live(rank: int) -> tuple[str, str, float]:
    plan = small_plan(world_of(), "spngd")
    comm = Communicator(plan, CommOptions(timeout=60.0))
    if rank == 1:
        comm.fail(KeyError("lost"))
        linger(2)
        return "", "", 0.0
    if rank == 2:
        return told(lambda: run(comm, "reduce_statistics", torch.float32))
    return told(lambda: comm.agree(torch.ones(1)))


@pytest.mark.processes
def test_nobody_waits_for_a_rank_that_raised_and_lives() -> None:
    results = run_world(3, raise_and_live, checked=False)
    for kind, message, seconds in (results[0], results[2]):
        assert kind == CommError.__name__
        assert "Rank 1 failed: KeyError: 'lost'" in message
        assert seconds < 8


def never_arrives(rank: int) -> tuple[str, str, float]:
    if rank == 1:
        linger(1)
        return "", "", 0.0
    plan = small_plan(world_of(), "spngd")
    return told(lambda: Communicator(plan, CommOptions(timeout=2.0)))


@pytest.mark.processes
def test_a_rank_that_never_arrives_is_named() -> None:
    kind, message, _ = run_world(2, never_arrives, checked=False)[0]
    assert kind == CommError.__name__
    assert "Rank 1 is gone" in message


# -- a group that is not the world ----------------------------------------------------


def in_subgroup(rank: int) -> None:
    import torch.distributed as dist

    group = dist.new_group([1, 3])
    if rank in (1, 3):
        plan = small_plan(2, "hybrid(0.5)")
        comm = Communicator(plan, CommOptions(timeout=TIMEOUT), group)
        assert comm.rank == (rank - 1) // 2
        for exchange in EXCHANGES:
            got = run(comm, exchange, torch.float64)
            same(got, expected(plan, exchange, comm.rank), 1e-14)


@pytest.mark.processes
def test_group_within_the_world() -> None:
    run_world(4, in_subgroup)


def two_groups(rank: int) -> list[tuple[str, str, float]]:
    """In one group a rank fails; in the other the second is only late."""
    import torch.distributed as dist

    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine, place = rank // 2, rank % 2
    options = CommOptions(timeout=TIMEOUT)
    plan = small_plan(2, "spngd")
    for _ in range(mine):  # not as many in both
        Communicator(plan, options, groups[mine])
    comm = Communicator(plan, options, groups[mine])
    whole = Communicator(small_plan(4, "spngd"), options)
    if rank == 3:
        comm.fail(KeyError("lost"))
    if place == 1:
        time.sleep(4)
    errors = [("", "", 0.0)]
    if mine == 0:
        errors = [error_of(lambda: comm.agree(torch.ones(1)))]
    if rank == 3:
        whole.fail(KeyError("found"))
        linger(3)
        return errors
    return [*errors, told(lambda: whole.agree(torch.ones(1)))]


@pytest.mark.processes
def test_groups_do_not_hear_of_each_others_failures() -> None:
    results = run_world(4, two_groups, checked=False)
    for rank in (0, 1):
        assert results[rank][0][0] == "", results[rank]
    for rank in (0, 1, 2):
        kind, message, _ = results[rank][1]
        assert kind == CommError.__name__
        assert "Rank 3 failed: KeyError: 'found'" in message


def groups_open() -> int:
    from torch.distributed import distributed_c10d

    return len(distributed_c10d._world.pg_map)


def open_and_close(rank: int) -> list[int]:
    counts = [groups_open()]
    for strategy in ("spngd", "factor_wise"):
        comm = Communicator(small_plan(world_of(), strategy), CommOptions())
        run(comm, "reduce_statistics", torch.float32)
        comm.begin("reduce_statistics", ["fc/A"], torch.float32)  # never finished
        comm.close()
        comm.close()
        counts.append(groups_open())
    disagree(rank, "plans")
    return [*counts, groups_open()]


@pytest.mark.processes
def test_closing_leaves_no_process_group() -> None:
    assert run_world(2, open_and_close) == [[1] * 4] * 2


# -- the helper -----------------------------------------------------------------------


def fail_on_one(rank: int) -> None:
    if rank == 1:
        raise KeyError("lost")
    time.sleep(30)


def sleep(rank: int) -> None:
    time.sleep(30)


@pytest.mark.processes
def test_run_world_reports_failures() -> None:
    with pytest.raises(RankError, match=r"rank 1 failed:[\s\S]*KeyError: 'lost'"):
        run_world(2, fail_on_one)
    with pytest.raises(TimeoutError, match=r"ranks \[0, 1\] still run"):
        run_world(2, sleep, timeout=3)


def test_spare_buffers_are_as_many_as_were_taken_at_once_whatever_their_sizes() -> None:
    spares, cpu = Spares(), torch.device("cpu")
    generator = torch.Generator().manual_seed(0)
    for sizes in torch.randint(1, 100, (200, 3), generator=generator).tolist():
        taken = [spares.take(size, torch.float32, cpu) for size in sizes]
        assert all(x.numel() >= n for x, n in zip(taken, sizes, strict=True))
        assert len({x.data_ptr() for x in taken}) == 3
        for buffer in taken:
            spares.give(buffer, cpu)
    sizes = [spares.take(1, torch.float32, cpu).numel() for _ in range(4)]
    assert max(sizes) < 100
    assert sizes[3] == 1  # a new one: three were kept
