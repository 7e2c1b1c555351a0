"""The step on several ranks against one process on the same global batch."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from tests.support.construct import construct
from tests.support.replicas import Case, build, rank_and_world, train
from tests.support.world import RankError, run_world
from torch import Tensor

import natgrad
from natgrad import Adaptive, CommOptions, Every, Scheduled

pytestmark = pytest.mark.processes


def _growing(epoch: int) -> int:
    """Of two steps an epoch: all is refreshed in steps 0, 1, 2, 4, 7."""
    return 1 + epoch


STEPS = 8
"""Enough for two inversions that are followed by steps without (every, scheduled)."""
REFRESH = {
    "every": Every(statistics=2, inverses=3),
    "scheduled": Scheduled(steps_per_epoch=2, rule=_growing, always_fresh=1),
    # the tiny net's inverses move fast: a wide tolerance makes intervals grow
    "adaptive": Adaptive(tolerance=2.0),
}
STRATEGIES = ("spngd", "layer_wise", "factor_wise", "hybrid(0.5)")
STYLES = ("eigen", "factored")


def _cases(world: int) -> dict[str, Case]:
    """The whole grid; the method and the norm take turns, others for another world."""
    cases: dict[str, Case] = {}
    grid = itertools.product(STRATEGIES, STYLES, REFRESH)
    for i, (strategy, style, refresh) in enumerate(grid):
        options = {
            "strategy": strategy,
            "rule": natgrad.Kronecker(style=style),
            "refresh": REFRESH[refresh],
            "norm": ("unit", "diag", "full")[(i + world) % 3],
            "damping": 0.1,
        }
        method = ("spngd", "kfac", "ddp")[(i + i // 3 + world) % 3]
        name = f"{method} {strategy} {style} {refresh}"
        cases[name] = Case(method=method, steps=STEPS, options=options)
    return cases


def _train_all(rank: int, cases: dict[str, Case]) -> dict[str, Tensor]:
    return {name: train(case)[0] for name, case in cases.items()}


def _corners(world: int) -> dict[str, Case]:
    """Every strategy in every style, the refresh policies in turns."""
    cases, count = _cases(world), len(REFRESH)
    return {
        name: case
        for i, (name, case) in enumerate(cases.items())
        if i % count == (i // count + world) % count
    }


@pytest.mark.parametrize("world", [3, 4])
def test_corners_of_the_strategies_equal_one_process(world: int) -> None:
    """On two ranks the next test has the whole grid."""
    _require_equal(_corners(world), world)


@pytest.mark.parametrize(
    "world",
    [
        2,
        pytest.param(3, marks=pytest.mark.long),
        pytest.param(4, marks=pytest.mark.long),
    ],
)
def test_every_strategy_equals_one_process(world: int) -> None:
    _require_equal(_cases(world), world)


def _require_equal(cases: dict[str, Case], world: int) -> None:
    alone = _train_all(0, cases)
    together = run_world(world, _train_all, cases, timeout=280)
    for name, expected in alone.items():
        for rank, result in enumerate(together):
            error = (result[name] - expected).abs().max()
            assert error < 1e-10, f"{name}, rank {rank} of {world}: {error}"


RULES: dict[str, tuple[str, dict[str, Any]]] = {
    "polar": ("polar", {"damping": 0.5}),
    "polar in ddp": ("polar ddp", {"damping": 0.5}),
    # G has full rank; in A's null space any basis is as good, and rounding decides
    "adaptive": (
        "spngd",
        {
            "rule": natgrad.EigenAdam(sides="outputs"),
            "fallback": natgrad.Adam(),
            "length": natgrad.LayerTrust(),
            "factor_decay": 0.5,
        },
    ),
    "adaptive K-FAC": (
        "kfac",
        {"rule": natgrad.EigenAdam(sides="outputs"), "length": natgrad.Free()},
    ),
    # layer 6 has more inputs than there are examples: a null space again
    "corrected": (
        "kfac",
        {"rule": natgrad.EKFAC(), "damping": 0.3, "factor_decay": 0.5, "skip": ("6",)},
    ),
    "corrected in ddp": (
        "ddp",
        {"rule": natgrad.EKFAC(), "damping": 0.3, "norm": "unit", "skip": ("6",)},
    ),
    "tracked": (
        "spngd",
        {
            "rule": natgrad.EigenAdam(sides="outputs", basis="tracked"),
            "length": natgrad.LayerTrust(),
            "factor_decay": 0.5,
        },
    ),
    "orthogonal, both": (
        "spngd ddp",
        {
            "rule": natgrad.Orthogonal(),
            "damping": 1.0,
            "average": natgrad.AverageUpdates(nesterov=True),
            "length": natgrad.LayerTrust(),
        },
    ),
}


def _rule_cases() -> dict[str, Case]:
    """Every rule under every strategy; the refresh policies take turns."""
    cases: dict[str, Case] = {}
    for i, strategy in enumerate(STRATEGIES):
        for j, (rule, (method, options)) in enumerate(RULES.items()):
            refresh = ("every", "scheduled", "adaptive")[(i + j) % 3]
            given = {"strategy": strategy, "refresh": REFRESH[refresh], **options}
            name = f"{rule} {strategy} {refresh}"
            cases[name] = Case(method=method, steps=5, options=given)
    return cases


def _input_moment(rank: int) -> Tensor:
    """A of a layer after a step on this rank's part of 256 examples."""
    world = rank_and_world()[1]
    torch.manual_seed(0)
    x, y = torch.randn(256, 3).double(), torch.randint(2, (256,))
    mine = slice(rank * 256 // world, (rank + 1) * 256 // world)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2)).double()
    optimizer = natgrad.Polar(model, lr=0.1)
    torch.nn.functional.cross_entropy(model(x[mine]), y[mine]).backward()
    optimizer.step()
    optimizer.gather()
    return optimizer.statistic("0/A")


def test_ranks_look_at_as_many_examples_together_as_one_process_alone() -> None:
    """At 64 of 256, and each rank at every fourth of its own."""
    alone = _input_moment(0)
    for together in run_world(4, _input_moment):
        assert torch.allclose(together, alone, rtol=1e-12)


def test_every_rule_under_every_strategy_equals_one_process() -> None:
    cases = _rule_cases()
    alone = _train_all(0, cases)
    for rank, result in enumerate(run_world(2, _train_all, cases, timeout=120)):
        for name, expected in alone.items():
            error = (result[name] - expected).abs().max()
            assert error < 1e-8, f"{name}, rank {rank}: {error}"


def _resume_rules(rank: int, cases: dict[str, Case]) -> dict[str, bool]:
    """Whether a run that was saved whole and resumed is the same, to the last bit."""
    same: dict[str, bool] = {}
    for name, case in cases.items():
        whole = train(case)[0]
        first = train(case, slice(0, 3), save=True)[1]
        again = train(case, slice(3, None), start=first.saved)[0]
        same[name] = torch.equal(whole, again)
    return same


def test_rules_resume_exactly_on_two_ranks() -> None:
    cases = {n: c for n, c in _rule_cases().items() if "layer_wise" in n}
    for result in run_world(2, _resume_rules, cases):
        assert all(result.values()), result


def test_float32_equals_one_process() -> None:
    cases = {
        method: Case(
            method=method,
            dtype=torch.float32,
            options={"norm": "unit", "damping": 0.1, "refresh": Every()},
        )
        for method in ("spngd", "kfac", "ddp")
    }
    alone = _train_all(0, cases)
    for result in run_world(2, _train_all, cases):
        for name, expected in alone.items():
            assert (result[name] - expected).abs().max() < 1e-5, name


def test_accumulation_without_no_sync_equals_one_process() -> None:
    """A second backward arrives after the first has been sent: both must count."""
    cases = {
        method: Case(
            method=method,
            micro=2,
            steps=6,
            # batch statistics of micro-batches differ, so norms stay out of it
            options={"damping": 0.1, "refresh": Every(), "norm": "skip"},
        )
        for method in ("spngd", "kfac", "ddp")
    }
    for result in run_world(2, _accumulate, cases):
        for name, (split, whole) in result.items():
            assert (split - whole).abs().max() < 1e-10, name


def _accumulate(rank: int, cases: dict[str, Case]) -> dict[str, tuple[Tensor, Tensor]]:
    results: dict[str, tuple[Tensor, Tensor]] = {}
    for name, case in cases.items():
        results[name] = (_linear(case, case.micro), _linear(case, 1))
    return results


def _linear(case: Case, micro: int) -> Tensor:
    """Train a network without batch statistics, in ``micro`` parts a step."""
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    if case.method == "spngd":
        optimizer: Any = construct(natgrad.SPNGD, model, lr=0.05, **case.options)
        natural = optimizer
    else:
        model = DistributedDataParallel(model) if case.method == "ddp" else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        natural = construct(natgrad.KFAC, model, optimizer, **case.options)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(case.steps):
        x = torch.randn(8, 4, generator=generator, dtype=torch.float64)
        y = torch.randint(0, 3, (8,), generator=generator)
        optimizer.zero_grad()
        for part in torch.arange(8).chunk(micro):
            loss = nn.functional.cross_entropy(model(x[part]), y[part])
            (loss / micro).backward()
        optimizer.step()
    natural.close()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


RESUMED = {
    "spngd": Case(
        method="spngd",
        steps=10,
        options={
            "refresh": Adaptive(tolerance=2.0),
            "damping": 0.1,
            "strategy": "layer_wise",
        },
    ),
    "ddp": Case(
        method="ddp",
        steps=10,
        options={"refresh": Every(2, 3), "damping": 0.1, "norm": "unit"},
    ),
    # roots, second moments and S, which go where their blocks are worked on
    **{
        rule: Case(
            method=RULES[rule][0],
            steps=8,
            options={"strategy": "layer_wise", **RULES[rule][1], "refresh": refresh},
        )
        for rule, refresh in (
            ("polar", Every(2, 3)),
            ("adaptive", Adaptive(tolerance=2.0)),
            ("corrected", Every(2, 3)),
        )
    },
}


def _first_part(rank: int) -> dict[str, Any]:
    return {
        name: train(case, slice(0, 5), save=True)[1].saved
        for name, case in RESUMED.items()
    }


def _second_part(rank: int, saved: dict[str, Any]) -> dict[str, Tensor]:
    return {
        name: train(case, slice(5, None), start=saved[name])[0]
        for name, case in RESUMED.items()
    }


def test_one_rank_can_save_for_any_number_of_ranks() -> None:
    expected = {name: train(case)[0] for name, case in RESUMED.items()}
    saved = run_world(3, _first_part)[2]
    for result in [*run_world(2, _second_part, saved), _second_part(0, saved)]:
        for name, weights in result.items():
            assert (weights - expected[name]).abs().max() < 1e-9, name


def _part_of_another(rank: int) -> str:
    case = RESUMED["ddp"]
    _, _, natural = build(case)
    part = natural.state_dict()
    part["part"] = [1 - rank, *part["part"][1:]]
    try:
        natural.load_state_dict(part)
    except ValueError as error:
        return str(error)
    return "no error"


def test_another_ranks_part_is_refused() -> None:
    assert "the part of rank 1 of 2" in run_world(2, _part_of_another)[0]


def _measured(rank: int) -> tuple[dict[str, Tensor], bool]:
    weights: dict[str, Tensor] = {}
    for method in ("spngd", "ddp"):
        weights[method], natural, _ = train(_placed(method, "measured"))
        costs = natural.engine.plan.cost.measured
    return weights, set(costs) == set(natural.engine.statistics.states)


def _placed(method: str, placement: str) -> Case:
    options = {"placement": placement, "damping": 0.1, "refresh": Every(2, 3)}
    return Case(method=method, options={**options, "norm": "unit"})


def test_measured_placement_moves_owners_and_changes_nothing() -> None:
    expected = {m: train(_placed(m, "measured"))[0] for m in ("spngd", "ddp")}
    for weights, replaced in run_world(3, _measured):
        assert replaced
        for method, result in weights.items():
            assert (result - expected[method]).abs().max() < 1e-10, method


def _bytes(rank: int, case: Case) -> tuple[list[Any], dict[str, Any], list[int]]:
    _, natural, traffic = train(case)
    plan = natural.engine.plan
    names = list(natural.engine.statistics.states)
    packed = [s.spec.packed for s in natural.engine.statistics.states.values()]
    expected = {
        name: [plan.exchanges[name].volumes(None)[way][rank] for way in (0, 1)]
        for name in plan.exchanges
    }
    expected["names"] = names
    return traffic, expected, packed


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_traffic_is_what_the_plan_says(strategy: str) -> None:
    options = {"strategy": strategy, "refresh": Every(), "norm": "unit"}
    case = Case(method="spngd", steps=3, options=options)
    results = run_world(3, _bytes, case)
    sent_statistics = 0
    for traffic, expected, _ in results:
        last = traffic[-1]
        for name in natgrad.plan.EXCHANGES:
            moved = last.get(name, {"sent": 0, "received": 0})
            sent, received = (8 * n for n in expected[name])
            assert (moved["sent"], moved["received"]) == (sent, received), name
        sent_statistics += last["reduce_statistics"]["sent"]
    # each statistic leaves every rank but its owner, as n (n + 1) / 2 numbers
    packed = sum(results[0][2])
    assert sent_statistics == 8 * packed * 2


def test_spngd_moves_no_more_than_an_all_reduce() -> None:
    case = Case(method="spngd", steps=2, options={"refresh": Every()})
    results = run_world(3, _bytes, case)
    parameters = sum(p.numel() for p in build(case)[0].parameters())
    moved = sum(
        traffic[-1][name]["received"]
        for traffic, _, _ in results
        for name in ("reduce_gradients", "share_updates")
    )
    sent = sum(
        traffic[-1][name]["sent"]
        for traffic, _, _ in results
        for name in ("reduce_gradients", "share_updates")
    )
    # a ring all-reduce sends 2 (world - 1) / world of the gradient from each rank
    assert sent <= 8 * 3 * parameters
    assert moved <= 8 * 3 * parameters


def test_adaptive_moves_less_as_training_settles() -> None:
    case = Case(
        method="spngd",
        lr=1e-4,
        options={"refresh": Adaptive(tolerance=1.0), "damping": 1.0, "norm": "unit"},
    )
    traffic, _, _ = run_world(2, _bytes, case)[0]
    moved = [t.get("reduce_statistics", {"sent": 0})["sent"] for t in traffic]
    assert sum(moved[10:]) < 0.6 * sum(moved[:10])


def _different(rank: int, what: str) -> str:
    options: dict[str, Any] = {"comm": CommOptions(timeout=20)}
    if what == "damping":
        options["damping"] = 0.1 * (rank + 1)
    if what == "strategy":
        options["strategy"] = ("layer_wise", "spngd")[rank % 2]
    model = torch.nn.Linear(3, 4 if what == "model" and rank else 2)
    try:
        construct(natgrad.SPNGD, model, lr=0.1, **options)
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("what", ["damping", "strategy", "model"])
def test_ranks_that_disagree_raise_alike(what: str) -> None:
    messages = run_world(3, _different, what)
    assert len(set(messages)) == 1
    assert "different" in messages[0]
    assert "ranks [0" in messages[0]


def _dies(rank: int) -> str:
    import os

    case = Case(method="spngd", options={"comm": CommOptions(timeout=15)})
    model, optimizer, _ = build(case)
    x = torch.randn(4, 1, 8, 8, dtype=torch.float64)
    try:
        for step in range(3):
            if rank == 1 and step == 1:
                os._exit(7)
            optimizer.zero_grad()
            model[0](x).sum().backward()
            optimizer.step()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_dead_rank_ends_the_others_with_its_name() -> None:
    messages = run_world(2, _dies, may_die=(1,), timeout=60)
    assert "Rank 1 is gone" in messages[0]


def _poisoned(rank: int, where: str) -> dict[str, Any]:
    case = Case(method="spngd", options={"norm": "unit", "refresh": Every()})
    model, optimizer, natural = build(case)
    for step in range(3):
        x = torch.randn(4, 1, 8, 8, dtype=torch.float64)
        bad = rank == 1 and step == 1
        if bad and where == "batch":
            x[0, 0, 0, 0] = float("nan")
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if bad and where == "gradient":
            next(model.parameters()).grad.fill_(float("inf"))
        optimizer.step()
    finite = all(bool(torch.isfinite(p).all()) for p in model.parameters())
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    return {"finite": finite, "weights": flat, **natural.health()}


@pytest.mark.filterwarnings("ignore:Step 1 is skipped")
@pytest.mark.parametrize("where", ["batch", "gradient"])
def test_a_poisoned_rank_skips_the_step_on_all(where: str) -> None:
    first, second = run_world(2, _poisoned, where)
    assert first["finite"]
    assert second["finite"]
    assert first["skipped_steps"] == second["skipped_steps"] == 1
    assert torch.equal(first["weights"], second["weights"])


def _quarantine(rank: int) -> dict[str, Any]:
    options = {"refresh": Every(), "comm": CommOptions(overlap=False)}
    case = Case(method="spngd", options=options)
    model, optimizer, natural = build(case)
    for step in range(3):
        x = torch.randn(4, 1, 8, 8, dtype=torch.float64)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if rank == 1 and step == 1:
            natural.engine.capture.current.sums["6/A"].fill_(float("nan"))
        optimizer.step()
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    return {"weights": flat, **natural.health()}


def test_a_poisoned_statistic_is_quarantined_on_all() -> None:
    first, second = run_world(2, _quarantine)
    assert first["quarantined"] == second["quarantined"] == {"6/A": 1}
    assert torch.isfinite(first["weights"]).all()
    assert torch.equal(first["weights"], second["weights"])


def _half(rank: int) -> Tensor:
    comm = CommOptions(precision=torch.bfloat16)
    case = Case(method="spngd", dtype=torch.float32, options={"comm": comm})
    return train(case)[0]


def test_half_precision_keeps_ranks_alike() -> None:
    first, second = run_world(2, _half)
    assert torch.equal(first, second)


def _raises(rank: int) -> None:
    raise RankError(rank, "on purpose")


def test_a_failing_rank_fails_the_test() -> None:
    with pytest.raises(RankError, match="on purpose"):
        run_world(2, _raises)
