"""What inverting costs by the model: how often it is done, and what is said of it."""

import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.construct import construct
from tests.support.toys import backward, mlp, sgd
from torch import nn

import natgrad
from natgrad import KFAC, SPNGD, Adaptive, Budget, Every, Paced, Polar
from natgrad.layers import find_blocks
from natgrad.plan import BlockSpec, StatisticSpec, pace
from natgrad.plan.pace import CORE, built_in_cost, paces, refresh_seconds


def blocks_of(model: nn.Module) -> list[BlockSpec]:
    return [block.spec for block in find_blocks(model)]


def seen(blocks: list[BlockSpec], vectors: float) -> dict[str, float]:
    return {s.name: vectors for b in blocks for s in b.statistics}


MODEL = nn.Sequential(nn.Linear(900, 8), nn.Linear(40, 200), nn.Embedding(300, 20))


@pytest.mark.parametrize("share", [0.01, 0.25])
@pytest.mark.parametrize("vectors", [1.0, 64.0])
def test_inversions_cost_their_share_of_a_step(vectors: float, share: float) -> None:
    blocks = blocks_of(MODEL)
    found = paces(blocks, seen(blocks, vectors), CORE, share)
    step = sum(CORE.precondition(b) + CORE.passes(b, vectors) for b in blocks)
    specs = [s for b in blocks for s in b.statistics]
    spent = sum(CORE.invert(s) / found[s.name] for s in specs)
    assert spent <= share * step
    # and not much less: each interval is rounded up by less than a step
    assert sum(CORE.invert(s) / (found[s.name] - 1) for s in specs) > share * step
    by_cost = sorted(specs, key=CORE.invert)
    intervals = [found[s.name] for s in by_cost]
    assert intervals == sorted(intervals)
    assert intervals[-1] > intervals[0]


def test_more_examples_in_a_step_pay_for_more_inversions() -> None:
    blocks = blocks_of(MODEL)
    few, many = (paces(blocks, seen(blocks, n), CORE, 0.01) for n in (1.0, 4096.0))
    assert all(few[name] > many[name] for name in few)


def test_forward_and_backward_multiply_three_times() -> None:
    linear, _, embedding = blocks_of(MODEL)
    assert CORE.passes(linear, 5) == pytest.approx(6 * CORE.flop * 8 * 901 * 5)
    assert CORE.passes(embedding, 5) == pytest.approx(6 * CORE.flop * 20 * 5)


def test_seconds_are_those_of_the_busiest_owner() -> None:
    specs = [
        StatisticSpec(name=n, block=n, kind="A", side="right", stack=1, size=size)
        for n, size in (("a", 100), ("b", 200), ("c", 300))
    ]
    want = CORE.invert(specs[0]) + CORE.invert(specs[2])
    found = refresh_seconds(specs, {"a": 1, "b": 0, "c": 1}, CORE)
    assert found == pytest.approx(want)


def test_a_gpu_has_other_rates() -> None:
    spec = StatisticSpec(name="a", block="a", kind="A", side="right", stack=1, size=512)
    cpu, gpu = (
        built_in_cost(torch.device(kind), "eigen", "kronecker").invert(spec)
        for kind in ("cpu", "cuda")
    )
    assert cpu != gpu


# -- the policy ------------------------------------------------------------------------


def run(refresh: natgrad.Refresh, steps: int = 9, largest: int | None = None) -> KFAC:
    model = mlp()
    options: dict[str, Any] = {"refresh": refresh, "largest_factor": largest}
    optimizer, kfac = sgd(model, **options)
    for step in range(steps):
        backward(model, step)
        optimizer.step()
    return kfac


def inverted(kfac: KFAC) -> list[int]:
    return [s.timing.inverted for s in kfac.engine.statistics.states.values()]


def test_what_costs_little_is_refreshed_as_the_policy_says() -> None:
    paced, plain = run(Paced(Every(2, 3), share=1e6)), run(Every(2, 3))
    assert paced.refreshes()["statistics"] == plain.refreshes()["statistics"]
    assert inverted(paced) == [3] * 4


def test_what_costs_much_is_inverted_more_rarely_and_estimated_as_often() -> None:
    kfac = run(Paced(Every(2, 3), share=1e-6))
    states = kfac.engine.statistics.states.values()
    assert inverted(kfac) == [1] * 4
    assert [s.timing.refreshed for s in states] == [5] * 4
    assert all(s.timing.inverses_at > 1000 for s in states)


def test_an_interval_between_steps_is_kept() -> None:
    """Between two steps in which all is estimated, and so counted."""
    kfac = run(Paced(Every(5, 1), share=0.5), steps=12)
    states = kfac.engine.statistics.states.values()
    for s in states:
        assert s.timing.interval > 1
        assert s.timing.inverted == -(-12 // s.timing.interval)


def test_a_paced_run_resumes_exactly() -> None:
    policy = Paced(Every(2, 1), share=0.5)
    whole = mlp()
    optimizer, kfac = sgd(whole, refresh=policy)
    file = io.BytesIO()
    for step in range(10):
        if step == 5:
            torch.save((whole.state_dict(), optimizer.state_dict()), file)
        backward(whole, step)
        optimizer.step()
    model = mlp()
    other, resumed = sgd(model, refresh=policy)
    file.seek(0)
    weights, state = torch.load(file)
    model.load_state_dict(weights)
    other.load_state_dict(state)
    for step in range(5, 10):
        backward(model, step)
        other.step()
    assert resumed.refreshes()["statistics"] == kfac.refreshes()["statistics"]
    assert 1 < inverted(kfac)[0] < 10
    for a, b in zip(whole.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_defaults_follow_cost_and_what_is_given_is_obeyed() -> None:
    with KFAC(mlp(), length=natgrad.Free()) as kfac:
        assert kfac.engine.options.refresh == Paced(Every(10, 100, early=True))
    with Polar(mlp(), lr=1.0) as polar:
        assert polar.engine.options.refresh == Paced(Every(5, 5))
    with Polar(mlp(), lr=1.0, refresh=Every(5, 5)) as given:
        assert given.engine.options.refresh.share_of_step() is None


@pytest.mark.parametrize("policy", [Adaptive(), Budget(), Paced(), 5, None])
def test_what_cannot_be_paced_is_refused(policy: Any) -> None:
    with pytest.raises(ValueError, match=r"Invalid policy=.*Must be Every"):
        Paced(policy)


@pytest.mark.parametrize("share", [0.0, -1.0, float("inf"), "all", True])
def test_an_illegal_share_is_refused(share: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"Invalid share=.*a number > 0"):
        Paced(Every(), share)


# -- what is said ----------------------------------------------------------------------


def wide() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(60, 3)


def step(model: nn.Module, natural: Any) -> None:
    x, y = torch.randn(8, 60), torch.arange(8) % 3
    F.cross_entropy(model(x), y).backward()
    natural.step()


def test_a_slow_first_refresh_is_announced_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = wide()
    monkeypatch.setattr(pace, "SLOW", 0.0)
    with construct(SPNGD, model, lr=0.1, largest_factor=40) as spngd:
        step(model, spngd)
        said = capsys.readouterr().err
        assert said.startswith("natgrad: inverting 2 statistics for the first time")
        assert "s expected" in said
        assert "model/A (2x31)" in said
        step(model, spngd)
        saved = spngd.state_dict()
    other = wide()
    with construct(SPNGD, other, lr=0.1, largest_factor=40) as resumed:
        resumed.load_state_dict(saved)
        step(other, resumed)
    assert not capsys.readouterr().err


def test_a_quick_first_refresh_is_not_announced(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = wide()
    with SPNGD(model, lr=0.1) as spngd:
        step(model, spngd)
    assert not capsys.readouterr().err


def test_the_report_says_what_a_refresh_takes() -> None:
    with KFAC(nn.Linear(2400, 3), length=natgrad.Free()) as kfac:
        (spec, _) = kfac.engine.block["model"].spec.statistics
        seconds = built_in_cost(torch.device("cpu"), "eigen", "kronecker").invert(spec)
        assert f"{seconds:.2g} s of it for model/A" in str(kfac)
