"""When statistics are refreshed: the policies alone, and in a training run."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from tests.support.toys import backward, mlp, sgd, train
from torch import Tensor, nn

import natgrad
from natgrad.factors.refresh import Timing
from natgrad.layers.block import Observed
from natgrad.layers.matrices import Linear
from natgrad.math.staleness import is_similar, next_interval

DAMPING = 0.03
STYLES = ("eigen", "factored")


class Clock:
    """Records at which steps each statistic is refreshed, from the public counts."""

    def __init__(self, kfac: natgrad.KFAC | natgrad.SPNGD) -> None:
        self.kfac = kfac
        self.steps: dict[str, list[int]] = {name: [] for name in self.counts()}

    def counts(self, what: str = "refreshed") -> dict[str, int]:
        statistics = self.kfac.refreshes()["statistics"]
        return {name: counts[what] for name, counts in statistics.items()}

    def run(self, model: nn.Module, optimizer: Any, steps: int) -> None:
        for step in range(steps):
            before = self.counts()
            train(model, optimizer, range(step, step + 1))
            self.note(step, before)

    def note(
        self, step: int, before: dict[str, int], what: str = "refreshed"
    ) -> set[str]:
        now = self.counts(what)
        new = {name for name in now if now[name] > before[name]}
        for name in new:
            self.steps[name].append(step)
        return new


def run_policy(refresh: natgrad.Refresh, steps: int) -> Clock:
    model = mlp()
    optimizer, kfac = sgd(model, refresh=refresh, norm="unit")
    clock = Clock(kfac)
    clock.run(model, optimizer, steps)
    return clock


# -- Every --------------------------------------------------------------------------


@pytest.mark.parametrize(("statistics", "inverses"), [(1, 1), (3, 6), (4, 4), (2, 5)])
def test_every_n_steps(statistics: int, inverses: int) -> None:
    clock = run_policy(natgrad.Every(statistics=statistics, inverses=inverses), 13)
    assert set(map(tuple, clock.steps.values())) == {tuple(range(0, 13, statistics))}
    assert set(clock.counts("inverted").values()) == {len(range(0, 13, inverses))}


def test_early_inverses_last_as_long_as_the_training_before_them() -> None:
    refresh = natgrad.Every(statistics=2, inverses=10, early=True)
    steps, step = [0], 0
    while step < 40:
        step = refresh.after_inverse(step, Timing())
        steps.append(step)
    assert steps == [0, 2, 4, 8, 16, 26, 36, 46]
    clock = run_policy(refresh, 13)
    assert set(clock.counts("inverted").values()) == {len((0, 2, 4, 8))}


def test_every_takes_functions_of_the_step() -> None:
    refresh = natgrad.Every(
        statistics=lambda step: 1 if step < 3 else 4,
        inverses=lambda step: 2 if step < 4 else 5,
    )
    clock = run_policy(refresh, 16)
    assert set(map(tuple, clock.steps.values())) == {(0, 1, 2, 3, 7, 11, 15)}
    assert set(clock.counts("inverted").values()) == {len((0, 2, 4, 9, 14))}


def test_every_between_inverses_keeps_the_old_one() -> None:
    model = mlp()
    optimizer, kfac = sgd(model, refresh=natgrad.Every(statistics=1, inverses=3))
    seen: list[Tensor] = []
    for step in range(5):
        train(model, optimizer, range(step, step + 1))
        inverse = kfac.engine.statistics.states["0/A"].inverse
        assert inverse is not None
        seen.append(inverse[1])
    assert [torch.equal(a, b) for a, b in itertools.pairwise(seen)] == [
        True,
        True,
        False,
        True,
    ]


@pytest.mark.parametrize("bad", [0, -1, 1.5, "ten", True, None])
@pytest.mark.parametrize("name", ["statistics", "inverses"])
def test_every_refuses(name: str, bad: Any) -> None:
    with pytest.raises(ValueError, match=rf"{name}={bad!r}.*integer >= 1"):
        natgrad.Every(**{name: bad})


def test_a_function_of_the_step_is_checked_when_it_is_asked() -> None:
    model = mlp()
    optimizer, _ = sgd(model, refresh=natgrad.Every(statistics=lambda step: -step))
    before = [p.detach().clone() for p in model.parameters()]
    backward(model, 0)
    with pytest.raises(ValueError, match=r"statistics\(0\)=0.*integer >= 1"):
        optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))


# -- Scheduled ----------------------------------------------------------------------


def staircase(epoch: int) -> int:
    """Osawa et al. 2019, eq. 20."""
    return min(20, 5 * math.floor(epoch / 5) + 1)


def late(epoch: int) -> int:
    """Osawa et al. 2019, eq. 21."""
    if epoch < 13:
        return 1
    return 20


@pytest.mark.parametrize(("rule", "paper"), [("staircase", staircase), ("late", late)])
def test_the_rules_of_the_paper(rule: str, paper: Callable[[int], int]) -> None:
    refresh = natgrad.Scheduled(steps_per_epoch=7, rule=rule, always_fresh=0)
    for step in range(7 * 30):
        assert refresh.interval(step) == paper(step // 7)


def test_staircase_by_hand() -> None:
    refresh = natgrad.Scheduled(steps_per_epoch=1, always_fresh=0)
    values = [refresh.interval(epoch) for epoch in (0, 4, 5, 9, 10, 15, 19, 20, 34)]
    assert values == [1, 1, 6, 6, 11, 16, 16, 20, 20]


def test_the_first_500_steps_are_always_fresh() -> None:
    refresh = natgrad.Scheduled(steps_per_epoch=10)
    assert {refresh.interval(step) for step in range(500)} == {1}
    assert refresh.interval(500) == 20


def test_scheduled_in_a_run() -> None:
    refresh = natgrad.Scheduled(
        steps_per_epoch=4, rule=lambda epoch: epoch + 1, always_fresh=6
    )
    clock = run_policy(refresh, 16)
    # epochs: 0-3 is 0, 4-7 is 1, 8-11 is 2, 12-15 is 3
    assert set(map(tuple, clock.steps.values())) == {(0, 1, 2, 3, 4, 5, 6, 8, 11, 14)}
    assert clock.counts("inverted") == clock.counts()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps_per_epoch": 0}, "steps_per_epoch=0.*>= 1"),
        ({"steps_per_epoch": 5, "rule": "early"}, "'early'.*'staircase', 'late'"),
        ({"steps_per_epoch": 5, "always_fresh": -1}, "always_fresh=-1.*>= 0"),
    ],
)
def test_scheduled_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        natgrad.Scheduled(**options)


# -- Adaptive -----------------------------------------------------------------------


class Literal:
    """SP-NGD, Algorithms 1 and 2, for one statistic; steps count from 1 as there."""

    def __init__(self, tolerance: float) -> None:
        self.alpha = tolerance
        self.t_x = 1
        self.x_1: Tensor | None = None
        self.x_2: Tensor | None = None
        self.delta_1, self.delta_2 = 1, 1

    def similar(self, a: Tensor, b: Tensor | None) -> bool:
        if b is None:
            return False
        return float((a - b).pow(2).sum().sqrt() / b.pow(2).sum().sqrt()) < self.alpha

    def refresh(self, x: Tensor) -> None:
        if not self.similar(x, self.x_1):
            delta = max(1, math.floor(self.delta_1 / 2))
        elif not self.similar(x, self.x_2):
            delta = self.delta_1
        else:
            delta = self.delta_1 + self.delta_2
        self.delta_1, self.delta_2 = delta, self.delta_1
        self.t_x += delta
        self.x_1, self.x_2 = x, self.x_1


def damped_inverse(kfac: natgrad.KFAC, name: str) -> Tensor:
    """From the averages alone: the pi-split (eq. 12), or all of the damping."""
    block, _, kind = name.rpartition("/")
    matrix = kfac.statistic(name)
    damping = DAMPING
    if kind in "AG":
        a, g = kfac.statistic(f"{block}/A"), kfac.statistic(f"{block}/G")
        means = [float(x.diagonal(dim1=-2, dim2=-1).mean()) for x in (a, g)]
        pi = math.sqrt(means[0] / means[1])
        damping = math.sqrt(DAMPING) * (pi if kind == "A" else 1 / pi)
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype)
    return torch.linalg.inv(matrix + damping * eye)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("tolerance", [0.02, 0.1, 0.25])
def test_adaptive_is_the_papers_algorithm(style: Any, tolerance: float) -> None:
    model = mlp()
    optimizer, kfac = sgd(
        model,
        refresh=natgrad.Adaptive(tolerance=tolerance),
        damping=DAMPING,
        rule=natgrad.Kronecker(style=style),
        factor_decay=0.5,
        norm="unit",
    )
    clock = Clock(kfac)
    literal = {name: Literal(tolerance) for name in clock.steps}
    for step in range(60):
        before = clock.counts()
        train(model, optimizer, range(step, step + 1))
        refreshed = clock.note(step, before)
        assert refreshed == {n for n, x in literal.items() if x.t_x == step + 1}
        for name in refreshed:
            literal[name].refresh(damped_inverse(kfac, name))
    intervals = {n: s["interval"] for n, s in kfac.refreshes()["statistics"].items()}
    assert intervals == {n: x.delta_1 for n, x in literal.items()}
    if tolerance == 0.1:  # the test is worth its name only if something was decided
        assert len(set(map(tuple, clock.steps.values()))) > 1


def test_intervals_grow_as_fibonacci_when_nothing_changes() -> None:
    model = mlp()
    optimizer, kfac = sgd(model, refresh=natgrad.Adaptive(), norm="skip")
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    clock = Clock(kfac)
    for step in range(40):
        before = clock.counts()
        train(model, optimizer, range(1))
        clock.note(step, before)
    # Two refreshes are needed before there are two to compare with.
    assert set(map(tuple, clock.steps.values())) == {(0, 1, 2, 4, 7, 12, 20, 33)}


def test_intervals_halve_when_statistics_change() -> None:
    timing = Timing(interval=13, previous=8)
    seen: list[int] = []
    for _ in range(5):
        interval = natgrad.Adaptive().judge(False, True, timing)
        timing.previous, timing.interval = timing.interval, interval
        seen.append(interval)
    assert seen == [6, 3, 1, 1, 1]


def test_a_changed_statistic_is_watched_more_closely_in_a_run() -> None:
    model = mlp()
    optimizer, kfac = sgd(model, refresh=natgrad.Adaptive(0.5), factor_decay=0.0)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for _ in range(20):  # the next refresh is at step 20
        train(model, optimizer, range(1))
    interval = kfac.refreshes()["statistics"]["0/A"]["interval"]
    assert interval == 8
    x = 10 * torch.randn(16, 5, dtype=torch.float64)
    model(x).sum().backward()
    optimizer.step()
    assert kfac.refreshes()["statistics"]["0/A"]["interval"] == interval // 2


@pytest.mark.parametrize(
    ("last", "before", "expected"), [(True, True, 8), (True, False, 5), (False, 0, 2)]
)
def test_next_interval(last: bool, before: bool, expected: int) -> None:
    interval = next_interval(
        similar_to_last=last, similar_to_before=before, last=5, before=3
    )
    assert interval == expected


def test_similar_is_relative_to_the_old_one_and_strict() -> None:
    old = torch.tensor([3.0, 4.0])
    assert is_similar(old + torch.tensor([0.0, 0.49]), old, 0.1)
    assert not is_similar(old + torch.tensor([0.0, 0.5]), old, 0.1)
    assert not is_similar(old, torch.zeros(2), 0.1)


@pytest.mark.parametrize("bad", [0, -0.1, math.nan, math.inf, "0.1", None])
def test_adaptive_refuses(bad: Any) -> None:
    with pytest.raises(ValueError, match=r"tolerance=.*Must be a number > 0"):
        natgrad.Adaptive(tolerance=bad)


# -- counts -------------------------------------------------------------------------


def test_refreshed_and_skipped_add_up_to_the_reduction_rate() -> None:
    model = mlp()
    optimizer, kfac = sgd(model, refresh=natgrad.Adaptive(0.2), norm="unit")
    clock = Clock(kfac)
    clock.run(model, optimizer, 30)
    done = every = 0
    for name, counts in kfac.refreshes()["statistics"].items():
        assert counts["refreshed"] == len(clock.steps[name])
        assert counts["refreshed"] + counts["skipped"] == 30
        assert counts["inverted"] == counts["refreshed"]
        stack, size, _ = kfac.statistic(name).shape
        triangle = stack * size * (size + 1) // 2
        done += triangle * counts["refreshed"]
        every += triangle * 30
    assert kfac.refreshes()["reduction_rate"] == pytest.approx(done / every)
    assert 0 < done / every < 1


def test_nothing_was_refreshed_before_the_first_step() -> None:
    _, kfac = sgd(mlp())
    assert kfac.refreshes()["reduction_rate"] == 0.0


def test_only_due_statistics_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: Counter[str] = Counter()
    observe, moments = Linear.observe, Linear.gradient_moments

    def counted_observe(
        self: Linear, module: nn.Module, x: Tensor, y: Tensor, want: Collection[str]
    ) -> Observed:
        result = observe(self, module, x, y, want)
        wanted.update(list(result.moments))
        return result

    def counted_moments(self: Linear, *args: Any) -> dict[str, Tensor]:
        result = moments(self, *args)
        wanted.update(list(result))
        return result

    monkeypatch.setattr(Linear, "observe", counted_observe)
    monkeypatch.setattr(Linear, "gradient_moments", counted_moments)
    model = mlp()
    optimizer, kfac = sgd(model, refresh=natgrad.Adaptive(0.15), factor_decay=0.5)
    train(model, optimizer, range(40))
    done = kfac.refreshes()["statistics"]
    for kind in "AG":
        expected = done[f"0/{kind}"]["refreshed"] + done[f"3/{kind}"]["refreshed"]
        assert wanted[kind] == expected < 80


def test_hooks_do_nothing_when_nothing_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    optimizer, _ = sgd(model, refresh=natgrad.Every(statistics=10, inverses=10))
    train(model, optimizer, range(1))

    def never(*_: Any) -> Any:
        raise AssertionError("computed a statistic that is not due")

    monkeypatch.setattr(Linear, "observe", never)
    monkeypatch.setattr(Linear, "gradient_moments", never)
    train(model, optimizer, range(1, 10))
    with pytest.raises(AssertionError, match="not due"):
        train(model, optimizer, range(10, 11))


def test_an_inverse_waits_for_an_estimate_that_was_thrown_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = mlp()
    optimizer, kfac = sgd(model, refresh=natgrad.Every(4, 4), factor_decay=0.5)
    moments = Linear.gradient_moments

    def spoiled(self: Linear, *args: Any) -> dict[str, Tensor]:
        return {k: v * math.nan for k, v in moments(self, *args).items()}

    estimates, inverses = Clock(kfac), Clock(kfac)
    for step in range(10):
        estimated, inverted = estimates.counts(), inverses.counts("inverted")
        with monkeypatch.context() as patch:
            if step == 4:
                patch.setattr(Linear, "gradient_moments", spoiled)
            train(model, optimizer, range(step, step + 1))
        estimates.note(step, estimated)
        inverses.note(step, inverted, "inverted")
    assert estimates.steps["0/A"] == inverses.steps["0/A"] == [0, 4, 8]
    assert estimates.steps["0/G"] == inverses.steps["0/G"] == [0, 5, 9]
