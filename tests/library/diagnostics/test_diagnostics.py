"""What diagnostics say against dense matrices, on one rank and two."""

import math
from typing import Any

import pytest
import torch
from tests.support.construct import construct
from tests.support.replicas import Case, batches, build
from tests.support.toys import backward, mlp, parameters, same, sgd
from tests.support.toys import train as run
from tests.support.world import run_world
from torch import Tensor

import natgrad

DAMPING = 0.03


def dense_fisher(kfac: natgrad.KFAC, name: str) -> Tensor:
    """The block of the Fisher for a gradient ``(1, m, n)`` flattened row by row."""
    return torch.kron(kfac.statistic(f"{name}/G")[0], kfac.statistic(f"{name}/A")[0])


@pytest.mark.parametrize("style", ["eigen", "factored"])
def test_a_block_against_its_dense_fisher(style: Any) -> None:
    model = mlp()
    optimizer, kfac = sgd(
        model,
        damping=DAMPING,
        rule=natgrad.Kronecker(style=style),
        refresh=natgrad.Every(1, 1),
        length=natgrad.Free(),
    )
    kfac.watch(every=1)
    run(model, optimizer, range(3))
    backward(model, 3)
    block = kfac.engine.block["3"]
    g = block.fold([p.grad for p in block.parameters if p.grad is not None]).flatten()
    optimizer.step()
    u = block.fold([p.grad for p in block.parameters if p.grad is not None]).flatten()
    values = torch.linalg.eigvalsh(dense_fisher(kfac, "3")).clamp_min(0.0)
    found = kfac.diagnostics()["blocks"]["3"]
    expected = {
        "largest": values.max(),
        "effective_rank": values.sum() ** 2 / values.square().sum(),
        "condition": (values.max() + DAMPING) / (values.min() + DAMPING),
        "damping_ratio": DAMPING / values.max(),
        "gradient_norm": g.norm(),
        "norm_ratio": u.norm() / g.norm(),
        "angle": math.degrees(math.acos(float(g @ u / g.norm() / u.norm()))),
        "kl": 0.05**2 * (g @ u),
        "size": len(values),
        "damping": DAMPING,
        "age": 0,
        "next": 1,
    }
    for key, value in expected.items():
        assert found[key] == pytest.approx(float(value), rel=1e-6), key
    above = float((values > DAMPING).double().mean())
    assert found["above_damping"] == pytest.approx(above, abs=0.15)
    assert values[5] <= found["median"] <= values[9]  # 15 values, as 33 x 33 points


def test_relative_damping_is_what_is_added_where_nothing_is() -> None:
    model = mlp()
    optimizer, kfac = sgd(model, damping=0.2, rule=natgrad.Kronecker(style="relative"))
    kfac.watch(every=1)
    run(model, optimizer, range(1))
    means = [kfac.statistic(f"0/{k}")[0].diagonal().mean() for k in "AG"]
    expected = 0.2**2 * float(means[0] * means[1])
    assert kfac.diagnostics()["blocks"]["0"]["damping"] == pytest.approx(expected)


@pytest.mark.parametrize("steps", [1, 2])
def test_relative_damping_of_ekfac_is_that_of_the_mean_curvature(steps: int) -> None:
    """Of K-FAC's scale at the first step, of S from the second on."""
    model = mlp()
    options = {"rule": natgrad.EKFAC(style="relative"), "length": natgrad.Free()}
    optimizer, kfac = sgd(model, damping=0.2, refresh=natgrad.Every(1, 100), **options)
    kfac.watch(every=1)
    run(model, optimizer, range(steps))
    means = [kfac.statistic(f"0/{k}")[0].diagonal().mean() for k in "AG"]
    mean = means[0] * means[1] if steps == 1 else kfac.statistic("0/S").mean()
    found = kfac.diagnostics()["blocks"]["0"]["damping"]
    assert found == pytest.approx(0.2 * float(mean))


def test_an_adaptive_rule_has_no_damping_to_compare_with_the_spectrum() -> None:
    model = mlp()
    optimizer, kfac = sgd(model, rule=natgrad.EigenAdam())
    kfac.watch(every=1)
    run(model, optimizer, range(1))
    found = kfac.diagnostics()["blocks"]["0"]
    names = ("damping", "damping_ratio", "above_damping", "condition")
    assert [found[name] for name in names] == [None] * 4


def test_change_age_and_motion() -> None:
    model = mlp()
    optimizer, kfac = sgd(model, refresh=natgrad.Every(3, 3), factor_decay=0.5)
    kfac.watch(every=2)
    run(model, optimizer, range(1))
    old = kfac.statistic("0/A").clone()
    first = kfac.diagnostics()
    assert first["statistics"]["0/A"]["change"] is None
    assert first["blocks"]["0"]["motion"] is None
    run(model, optimizer, range(1, 5))
    second = kfac.diagnostics()["statistics"]["0/A"]
    change = (kfac.statistic("0/A") - old).norm() / old.norm()
    assert second["change"] == pytest.approx(float(change))
    assert (second["age"], second["next"], second["refreshed"]) == (1, 2, 1)
    assert kfac.diagnostics()["step"] == 4


def test_motion_is_from_look_to_look() -> None:
    model = mlp()
    optimizer, kfac = sgd(model)
    kfac.watch(every=2)
    weights: list[Tensor] = []
    for step in range(5):  # at a look the optimizer has not moved the weights yet
        weights.append(model.get_parameter("0.weight").detach().clone())
        run(model, optimizer, range(step, step + 1))
    motion = (weights[4] - weights[2]).norm() / weights[4].norm()
    assert kfac.diagnostics()["blocks"]["0"]["motion"] == pytest.approx(float(motion))


def test_a_layer_that_never_moves_has_no_motion() -> None:
    model = mlp()
    still, *rest = (list(layer.parameters()) for layer in model)
    groups: list[dict[str, Any]] = [{"params": still, "lr": 0.0}]
    groups.append({"params": [p for params in rest for p in params]})
    optimizer = torch.optim.SGD(groups, lr=0.05)
    kfac = natgrad.KFAC(model, optimizer)
    kfac.watch(every=2)
    run(model, optimizer, range(5))
    blocks = kfac.diagnostics()["blocks"]
    assert blocks["0"]["motion"] == 0.0
    assert blocks["3"]["motion"] > 1e-6


@pytest.mark.parametrize("decay", [0.0, 0.9])
@pytest.mark.parametrize("style", ["eigen", "factored"])
def test_watching_changes_nothing(style: Any, decay: float) -> None:
    results: list[list[Tensor]] = []
    for watched in (False, True):
        model = mlp(dtype=torch.float32)
        options: dict[str, Any] = {
            "rule": natgrad.Kronecker(style=style),
            "factor_decay": decay,
        }
        spngd = construct(natgrad.SPNGD, model, lr=0.02, damping=0.1, **options)
        if watched:
            spngd.watch(every=2)
        run(model, spngd, range(9))
        results.append(parameters(model))
    assert same(*results)


def test_it_is_off_by_default() -> None:
    _, kfac = sgd(mlp())
    assert not kfac.engine.meter.running
    with pytest.raises(RuntimeError, match=r"watch\(every=\.\.\.\)"):
        kfac.diagnostics()
    with pytest.raises(ValueError, match=r"every=0.*integer >= 1"):
        kfac.watch(every=0)


def test_seconds_are_shared_out() -> None:
    model = mlp()
    optimizer, kfac = sgd(model, norm="unit")
    kfac.watch(every=4)
    run(model, optimizer, range(5))
    record = kfac.diagnostics()
    parts = ("estimate", "invert", "precondition")
    total = sum(block["seconds"] for block in record["blocks"].values())
    assert total == pytest.approx(sum(record["seconds"][p] for p in parts))
    assert 0 < total < record["seconds"]["all"]
    shares = [block["bytes_share"] for block in record["blocks"].values()]
    assert sum(shares) == pytest.approx(1.0)


# -- several ranks ------------------------------------------------------------------

TIMED = ("kind", "seconds", "time_share", "bytes", "bytes_share", "bytes_moved")


def _look(rank: int, cases: list[Case]) -> list[Any]:
    records: list[Any] = []
    for case in cases:
        model, optimizer, natural = build(case)
        natural.watch(every=2)
        for x, y in batches(case):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        records.append(natural.diagnostics())
        natural.close()
    return records


@pytest.mark.processes
def test_two_ranks_see_what_one_sees() -> None:
    options: dict[str, Any] = {"damping": 0.1, "norm": "unit"}
    options["refresh"] = natgrad.Every(2, 2)
    cases = [
        Case(method="kfac", options=options, steps=5),
        Case(method="spngd", options=options, steps=5),
    ]
    alone = _look(0, cases)
    first, second = run_world(2, _look, cases)
    for one, here, there in zip(alone, first, second, strict=True):
        assert here == there
        assert here["world"] == 2
        for kind in ("blocks", "statistics"):
            for name, values in one[kind].items():
                for key in values.keys() - set(TIMED):
                    found = here[kind][name][key]
                    expected = pytest.approx(values[key], rel=1e-6, abs=1e-5)
                    assert found == expected, (kind, name, key)
        moved = sum(block["bytes_moved"] for block in here["blocks"].values())
        assert moved == pytest.approx(sum(here["traffic"].values()))
        assert moved > 0
