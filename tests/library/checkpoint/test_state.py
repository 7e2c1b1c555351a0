"""Saving and loading: the same run after it, to the last bit, or a clear error."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.construct import construct
from tests.support.toys import (
    backward,
    mlp,
    parameters,
    same,
    sgd,
    snapshot,
    tensors,
    train,
)
from torch import nn
from torch.optim import Optimizer

import natgrad
from natgrad.math.packing import unpack_upper
from natgrad.schedules import DampingWarmup, PolynomialDecay

REFRESH: dict[str, natgrad.Refresh] = {
    "every": natgrad.Every(statistics=2, inverses=5),
    "scheduled": natgrad.Scheduled(
        steps_per_epoch=3, rule=lambda e: e + 1, always_fresh=2
    ),
    "adaptive": natgrad.Adaptive(tolerance=0.3),
}
Make = Callable[[nn.Module, dict[str, Any]], Optimizer]


def make_sgd(model: nn.Module, options: dict[str, Any]) -> Optimizer:
    return sgd(model, factor_decay=0.6, norm="unit", **options)[0]


def make_adam(model: nn.Module, options: dict[str, Any]) -> Optimizer:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    construct(natgrad.KFAC, model, optimizer, norm="diag", **options)
    return optimizer


def make_spngd(model: nn.Module, options: dict[str, Any]) -> Optimizer:
    return construct(natgrad.SPNGD, model, lr=0.02, weight_decay=1e-3, **options)


def make_adaptive(model: nn.Module, options: dict[str, Any]) -> Optimizer:
    return construct(
        natgrad.SPNGD,
        model,
        lr=0.02,
        rule=natgrad.EigenAdam(),
        fallback=natgrad.Adam(),
        length=natgrad.LayerTrust(),
        average=natgrad.AverageGradients(),
        refresh=options["refresh"],
    )


def make_corrected(model: nn.Module, options: dict[str, Any]) -> Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    natgrad.KFAC(model, optimizer, rule=natgrad.EKFAC(), refresh=options["refresh"])
    return optimizer


def make_polar(model: nn.Module, options: dict[str, Any]) -> Optimizer:
    return natgrad.Polar(model, lr=0.02, refresh=options["refresh"])


MAKERS: dict[str, Make] = {
    "sgd": make_sgd,
    "adam": make_adam,
    "spngd": make_spngd,
    "adaptive": make_adaptive,
    "polar": make_polar,
    "corrected": make_corrected,
}


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("style", ["eigen", "factored"])
@pytest.mark.parametrize("refresh", REFRESH)
@pytest.mark.parametrize("maker", MAKERS)
def test_a_resumed_run_is_the_same_run(maker: str, refresh: str, style: Any) -> None:
    dtype = torch.float32
    options = {"refresh": REFRESH[refresh], "rule": natgrad.Kronecker(style=style)}
    model = mlp(dtype)
    optimizer = MAKERS[maker](model, options)
    train(model, optimizer, range(8))  # no policy has everything due at step 8
    saved = through_a_file([model.state_dict(), optimizer.state_dict()])
    expected = train(model, optimizer, range(8, 16))

    other = mlp(dtype, seed=1)
    resumed = MAKERS[maker](other, options)
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    assert same(expected, train(other, resumed, range(8, 16)))
    assert same(snapshot(model, optimizer), snapshot(other, resumed))
    assert timings(optimizer) == timings(resumed)


def test_roots_that_were_saved_before_they_were_packed_are_loaded() -> None:
    model, other = mlp(torch.float32), mlp(torch.float32, seed=1)
    options: dict[str, Any] = {"lr": 0.01, "refresh": natgrad.Every(2, 4)}
    optimizer = natgrad.Polar(model, **options)
    train(model, optimizer, range(2))
    saved = through_a_file([model.state_dict(), optimizer.state_dict()])
    for name, entry in saved[1]["natgrad"]["statistics"].items():
        size = optimizer.engine.statistics.states[name].spec.size
        entry["inverse"] = [unpack_upper(x, size) for x in entry["inverse"]]
    expected = train(model, optimizer, range(2, 7))

    resumed = natgrad.Polar(other, **options)
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    assert same(expected, train(other, resumed, range(2, 7)))
    assert same(snapshot(model, optimizer), snapshot(other, resumed))


def timings(optimizer: Optimizer) -> dict[str, Any]:
    statistics = optimizer.state_dict()["natgrad"]["statistics"]
    return {name: entry["timing"] for name, entry in statistics.items()}


def test_kfac_without_an_optimizer() -> None:
    model = mlp()
    kfac = natgrad.KFAC(
        model, length=natgrad.KLClip(lr=0.1), refresh=natgrad.Every(2, 3)
    )
    for step in range(4):
        backward(model, step)
        kfac.step()
    other = mlp()
    fresh = natgrad.KFAC(
        other, length=natgrad.KLClip(lr=0.1), refresh=natgrad.Every(2, 3)
    )
    fresh.load_state_dict(through_a_file(kfac.state_dict()))
    for step in range(4, 8):
        for m, k in ((model, kfac), (other, fresh)):
            backward(m, step)
            k.step()
        assert same(grads(model), grads(other))
    assert kfac.refreshes() == fresh.refreshes()


def grads(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_statistics_keep_their_dtype_beside_half_precision_weights() -> None:
    model = mlp(torch.bfloat16)
    optimizer, kfac = sgd(model, refresh=natgrad.Every(1, 1))
    train(model, optimizer, range(2))
    other = mlp(torch.bfloat16)
    resumed, fresh = sgd(other, refresh=natgrad.Every(1, 1))
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    assert {x.dtype for x in tensors(fresh.state_dict())} == {torch.float32}
    assert same(snapshot(kfac), snapshot(fresh))


def test_loading_copies() -> None:
    model = mlp()
    optimizer, kfac = sgd(model, refresh=natgrad.Every(1, 1), factor_decay=0.5)
    train(model, optimizer, range(2))
    other = mlp()
    _, fresh = sgd(other, refresh=natgrad.Every(1, 1), factor_decay=0.5)
    fresh.load_state_dict(kfac.state_dict())
    before = snapshot(fresh)
    train(model, optimizer, range(2, 4))
    assert same(before, snapshot(fresh))


def test_loading_drops_what_was_captured_before_it() -> None:
    model = mlp()
    optimizer, _ = sgd(model, refresh=natgrad.Every(1, 1))
    train(model, optimizer, range(2))
    saved = through_a_file([model.state_dict(), optimizer.state_dict()])
    expected = train(model, optimizer, range(2, 4))
    backward(model, 50)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert same(expected, train(model, optimizer, range(2, 4)))


# -- what does not match ------------------------------------------------------------


def bad_states() -> dict[str, tuple[Callable[[dict[str, Any]], None], str]]:
    def version(state: dict[str, Any]) -> None:
        state["version"] = 99

    def missing(state: dict[str, Any]) -> None:
        del state["statistics"]["3/G"]

    def extra(state: dict[str, Any]) -> None:
        state["statistics"]["head/A"] = state["statistics"]["3/A"]

    def size(state: dict[str, Any]) -> None:
        state["statistics"]["3/G"]["size"] = 17

    def broken(state: dict[str, Any]) -> None:
        del state["statistics"]["3/G"]["history"]

    def shape(state: dict[str, Any]) -> None:
        state["statistics"]["3/G"]["average"] = torch.zeros(2)

    def older(state: dict[str, Any]) -> None:
        """As natgrad wrote it when rules were strings."""
        state |= {"version": 2, "damping_style": "eigen"}
        for key in ("rules", "references"):
            del state[key]

    return {
        "version": (version, "version=99.*by a newer natgrad.*Must be 3"),
        "older": (older, "version=2.*by natgrad 0.1.0 from before.*Must be 3"),
        "missing": (missing, "'3/G' is missing in the saved state"),
        "extra": (extra, "'head/A' is missing in this model"),
        "size": (size, "'3/G'.*size 17.*Must be 3"),
        "broken": (broken, "'3/G'.*history"),
        "shape": (shape, "'3/G'.*average"),
    }


@pytest.mark.parametrize("case", bad_states())
@pytest.mark.parametrize("maker", ["sgd", "spngd"])
def test_a_state_that_does_not_fit_changes_nothing(case: str, maker: str) -> None:
    spoil, message = bad_states()[case]
    options = {"refresh": natgrad.Every(1, 1)}
    model, target = mlp(), mlp(seed=1)
    optimizer, resumed = MAKERS[maker](model, options), MAKERS[maker](target, options)
    train(model, optimizer, range(3))
    train(target, resumed, range(3, 4))
    saved = through_a_file(optimizer.state_dict())
    spoil(saved["natgrad"])
    before, when = snapshot(target, resumed), timings(resumed)
    with pytest.raises(ValueError, match=message):
        resumed.load_state_dict(saved)
    assert same(before, snapshot(target, resumed))
    assert when == timings(resumed)
    train(target, resumed, range(4, 6))


def budgeted(decay: float = 0.0) -> tuple[nn.Module, Optimizer]:
    model = mlp()
    refresh = natgrad.Budget(overhead=0.5)
    optimizer = construct(
        natgrad.SPNGD, model, lr=0.02, refresh=refresh, factor_decay=decay
    )
    return model, optimizer


BAD_BUDGETS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "extra": (lambda b: b["books"].update(debt=1.0), "budget.books.*'debt'.*just"),
    "missing": (lambda b: b["books"].pop("credit"), "budget.books.*without credit"),
    "negative": (lambda b: b["books"].update(plain=-1.0), "budget.books.plain=-1.0"),
    "part": (lambda b: b["books"].update(windows=2.5), "budget.books.windows=2.5"),
    "cost": (lambda b: b["costs"]["0/A"].update(more=0.0), "costs.'0/A'.*'more'"),
    "text": (lambda b: b["costs"]["0/A"].update(change="x"), "'0/A'.*change='x'"),
}


@pytest.mark.parametrize("case", BAD_BUDGETS)
def test_a_bad_budget_changes_nothing(case: str) -> None:
    spoil, message = BAD_BUDGETS[case]
    (model, optimizer), (target, resumed) = budgeted(), budgeted()
    train(model, optimizer, range(4))
    train(target, resumed, range(1))
    saved = through_a_file(optimizer.state_dict())
    spoil(saved["natgrad"]["budget"])
    before, when = snapshot(target, resumed), repr(resumed.state_dict())
    with pytest.raises(ValueError, match=message):
        resumed.load_state_dict(saved)
    assert same(before, snapshot(target, resumed))
    assert when == repr(resumed.state_dict())


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_averages_that_only_a_budget_or_a_watch_keeps_are_loaded(decay: float) -> None:
    (model, optimizer), (_, resumed) = budgeted(decay), budgeted(decay)
    train(model, optimizer, range(4))
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    assert same(snapshot(optimizer), snapshot(resumed))
    watched, other = mlp(), construct(natgrad.SPNGD, mlp(), lr=0.02, factor_decay=decay)
    spngd = construct(natgrad.SPNGD, watched, lr=0.02, factor_decay=decay)
    spngd.watch(every=2)
    train(watched, spngd, range(4))
    other.load_state_dict(through_a_file(spngd.state_dict()))
    assert same(snapshot(spngd), snapshot(other))


def test_skipped_steps_are_still_known_after_loading() -> None:
    model = mlp()
    optimizer, kfac = sgd(model)
    backward(model, 0)
    next(model.parameters()).grad.fill_(float("nan"))  # type: ignore[union-attr]
    with pytest.warns(UserWarning, match="Step 0 is skipped"):
        optimizer.step()
    saved = through_a_file(optimizer.state_dict())
    resumed, fresh = sgd(mlp())
    resumed.load_state_dict(saved)
    assert kfac.health()["skipped_steps"] == fresh.health()["skipped_steps"] == 1
    del saved["natgrad"]["skipped_steps"]  # as states were saved before
    resumed.load_state_dict(saved)
    assert fresh.health()["skipped_steps"] == 0


FOREIGN: dict[str, Any] = {
    "of a model": mlp().state_dict(),
    "a list": [1, 2],
    "empty": {},
    "half": {"state": {}, "param_groups": [{"lr": 0.1}]},
}


@pytest.mark.parametrize("case", FOREIGN)
@pytest.mark.parametrize("maker", ["sgd", "spngd"])
def test_a_state_of_something_else(case: str, maker: str) -> None:
    optimizer = MAKERS[maker](mlp(), {})
    with pytest.raises(
        ValueError, match=r"Invalid optimizer state, a .*'param_groups'"
    ):
        optimizer.load_state_dict(FOREIGN[case])
    kfac = natgrad.KFAC(mlp(), length=natgrad.KLClip(lr=0.1))
    with pytest.raises(ValueError, match=r"Invalid state=.*natgrad optimizer returned"):
        kfac.load_state_dict(FOREIGN[case])


BAD_MOMENTUM: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "shape": (
        lambda s: s["state"][0].update(velocity=torch.ones(2)),
        "velocity of .*0",
    ),
    "none": (lambda s: s["state"][1].update(velocity=None), "velocity of parameter 1"),
    "nan": (lambda s: s["state"][0]["velocity"].fill_(float("nan")), "finite tensor"),
    "mass": (lambda s: s["state"][0].update(mass=7.0), r"mass=7.0 of parameter 0"),
    "no mass": (lambda s: s["state"][0].pop("mass"), r"mass=None.*AverageGradients"),
    "lr": (lambda s: s["param_groups"][0].update(lr="fast"), "lr='fast'"),
    "momentum": (lambda s: s["param_groups"][0].update(momentum=1.5), "momentum=1.5"),
}


@pytest.mark.parametrize("case", BAD_MOMENTUM)
def test_bad_momentum_or_groups_change_nothing(case: str) -> None:
    spoil, message = BAD_MOMENTUM[case]
    model, target = mlp(), mlp(seed=1)
    optimizer, resumed = (
        construct(natgrad.SPNGD, m, lr=0.02, average=natgrad.AverageGradients())
        for m in (model, target)
    )
    train(model, optimizer, range(3))
    train(target, resumed, range(1))
    saved = through_a_file(optimizer.state_dict())
    spoil(saved)
    before = snapshot(target, resumed)
    with pytest.raises(ValueError, match=message):
        resumed.load_state_dict(saved)
    assert same(before, snapshot(target, resumed))
    assert resumed.engine.step == 1


def test_an_optimizer_state_that_does_not_fit_changes_no_statistics() -> None:
    model, target = mlp(), mlp(seed=1)
    optimizer, _ = sgd(model)
    resumed, kfac = sgd(target)
    train(model, optimizer, range(3))
    train(target, resumed, range(1))
    saved = through_a_file(optimizer.state_dict())
    saved["param_groups"].append(saved["param_groups"][0])
    before = snapshot(kfac)
    with pytest.raises(ValueError, match="parameter groups"):
        resumed.load_state_dict(saved)
    assert same(before, snapshot(kfac))
    assert kfac.engine.step == 1


def test_another_damping_style_has_other_inverses() -> None:
    model, target = mlp(), mlp()
    optimizer, _ = sgd(model, rule=natgrad.Kronecker(style="factored"))
    resumed, _ = sgd(target, rule=natgrad.Kronecker(style="eigen"))
    train(model, optimizer, range(1))
    with pytest.raises(ValueError, match="style"):
        resumed.load_state_dict(optimizer.state_dict())


def test_a_plain_optimizers_state_is_refused() -> None:
    model = mlp()
    plain = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    train(model, plain, range(2))
    optimizer, kfac = sgd(model)
    before = snapshot(optimizer, kfac)
    with pytest.raises(ValueError, match="no 'natgrad' entry"):
        optimizer.load_state_dict(plain.state_dict())
    assert same(before, snapshot(optimizer, kfac))


def test_a_plain_optimizer_takes_a_state_with_statistics() -> None:
    model = mlp()
    optimizer, _ = sgd(model)
    train(model, optimizer, range(2))
    plain = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    plain.load_state_dict(optimizer.state_dict())
    assert "natgrad" not in plain.state_dict()


def test_a_closed_kfac_no_longer_travels() -> None:
    model = mlp()
    optimizer, kfac = sgd(model)
    assert "natgrad" in optimizer.state_dict()
    kfac.close()
    assert "natgrad" not in optimizer.state_dict()
    optimizer.load_state_dict(optimizer.state_dict())


# -- company ------------------------------------------------------------------------


@pytest.mark.parametrize("maker", ["sgd", "spngd"])
def test_schedulers_continue(maker: str) -> None:
    def start() -> tuple[nn.Module, Optimizer, list[Any]]:
        model = mlp()
        optimizer = MAKERS[maker](
            model, {"damping": DampingWarmup(initial=1.0, target=0.01, steps=20)}
        )
        polynomial = PolynomialDecay(optimizer, start=2, end=12, power=2.0)
        plateau = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
        return model, optimizer, [polynomial, plateau]

    def run(model: nn.Module, optimizer: Optimizer, also: list[Any], n: range) -> None:
        for step in n:
            train(model, optimizer, range(step, step + 1))
            for scheduler in also:
                scheduler.step()

    model, optimizer, schedulers = start()
    run(model, optimizer, schedulers, range(5))
    parts = [model, optimizer, *schedulers]
    saved = through_a_file([x.state_dict() for x in parts])
    run(*(model, optimizer, schedulers), range(5, 10))

    other, resumed, fresh = start()
    for x, state in zip([other, resumed, *fresh], saved, strict=True):
        x.load_state_dict(state)
    run(other, resumed, fresh, range(5, 10))
    assert same(parameters(model), parameters(other))
    assert optimizer.param_groups[0]["lr"] == resumed.param_groups[0]["lr"]
    assert optimizer.param_groups[0]["momentum"] == resumed.param_groups[0]["momentum"]


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copied_model_is_not_watched(how: str) -> None:
    """`torch.optim.swa_utils.AveragedModel` and `torch.save(model)` copy models."""
    model = mlp()
    optimizer, kfac = sgd(model, refresh=natgrad.Every(1, 1))
    train(model, optimizer, range(2))
    backward(model, 2)
    copied = (
        copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    )
    before = snapshot(kfac)
    plain = torch.optim.SGD(copied.parameters(), lr=0.1)
    train(copied, plain, range(3))
    assert same(before, snapshot(kfac))
    optimizer.step()
    assert kfac.engine.step == 3


def test_the_original_goes_on_as_if_never_copied() -> None:
    model, other = mlp(), mlp()
    optimizer, _ = sgd(model, refresh=natgrad.Every(1, 1))
    reference, _ = sgd(other, refresh=natgrad.Every(1, 1))
    for step in range(4):
        backward(model, step)
        copied = copy.deepcopy(model)
        backward(copied, step + 100)
        optimizer.step()
        train(other, reference, range(step, step + 1))
    assert same(parameters(model), parameters(other))
