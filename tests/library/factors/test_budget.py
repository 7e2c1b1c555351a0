"""The budget: what it decides from given seconds, and that a run keeps to it."""

from typing import Any

import pytest
import torch
from tests.support.replicas import Case, train
from tests.support.toys import backward, mlp, sgd
from tests.support.world import run_world

import natgrad
from natgrad.diagnostics.timer import Meter, Reader
from natgrad.factors.budget import Account, Candidate, bill, choose
from natgrad.factors.refresh import Timing


class FakeClock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


def candidate(name: str, **values: Any) -> Candidate:
    default: dict[str, Any] = {"owner": 0, "estimate": 1.0, "invert": 1.0}
    default |= {"change": 1.0, "age": 1}
    return Candidate(name=name, **(default | values))


# -- the decision -------------------------------------------------------------------


def test_the_stalest_is_refreshed_first() -> None:
    old, changed, calm = (
        candidate("old", age=10),
        candidate("changed", age=4, change=3.0),
        candidate("calm", age=9),
    )
    order = choose([calm, old, changed], credit=100.0)
    assert [c.name for c in order] == ["changed", "old", "calm"]


def test_a_second_goes_where_it_removes_most() -> None:
    dear, cheap = candidate("dear", invert=9.0, age=4), candidate("cheap")
    assert [c.name for c in choose([dear, cheap], 2.0)] == ["cheap"]
    assert choose([candidate("dear", invert=9.0, age=6), cheap], 2.0) == []


def test_what_cannot_be_paid_is_saved_for() -> None:
    """A cheaper statistic does not overtake, or the dear one would wait for ever."""
    stale, small = candidate("stale", invert=5.0, age=100), candidate("small")
    assert choose([stale, small], credit=5.9) == []
    assert [c.name for c in choose([stale, small], credit=6.0)] == ["stale"]


def test_owners_invert_side_by_side() -> None:
    here, too = candidate("here", invert=3.0), candidate("too", invert=2.0)
    there = candidate("there", owner=1, invert=4.0)
    assert bill([here, too]) == 2.0 + 5.0
    assert bill([here, too, there]) == 3.0 + 5.0
    assert bill([here, there]) == 2.0 + 4.0


# -- the account, on a clock of its own ---------------------------------------------


class Machine:
    """A training loop in which everything takes a given time."""

    def __init__(
        self,
        overhead: float,
        costs: dict[str, float],
        *,
        drift: dict[str, float] | None = None,
        plain: float = 1.0,
        fixed: float = 0.02,
    ) -> None:
        self.clock = FakeClock()
        self.meter = Meter(torch.device("cpu"), self.clock)
        self.account = Account(overhead, list(costs), self.meter)
        self.costs, self.drift = costs, drift or dict.fromkeys(costs, 0.1)
        self.plain, self.fixed = plain, fixed
        self.timings = {name: Timing() for name in costs}
        self.due = set(costs)
        self.step = 0
        self.spent: list[float] = []

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.one()

    def one(self) -> None:
        began = self.clock.now
        self.clock.wait(self.plain)
        for name in sorted(self.due):
            with self.meter("estimate", name):
                self.clock.wait(self.costs[name] / 2)
        with self.meter("step"):
            facts = self.account.facts(torch.zeros(()))
            with self.meter("refresh"):
                self.account.learn(facts.tolist(), world=1)
                self.refresh()
                owners = dict.fromkeys(self.costs, 0)
                due = self.account.decide(self.step, self.timings, owners)
            self.clock.wait(self.fixed)
        self.due = due
        self.step += 1
        self.spent.append(self.clock.now - began - self.plain)

    def refresh(self) -> None:
        for name in sorted(self.due):
            with self.meter("invert", name):
                self.clock.wait(self.costs[name] / 2)
            t = self.timings[name]
            if t.refreshed:
                change = self.drift[name] * (self.step - t.refreshed_at)
                self.account.note_change(name, torch.tensor(change))
            t.refreshed, t.refreshed_at = t.refreshed + 1, self.step


COSTS = {"a": 0.01, "b": 0.05, "c": 0.2, "d": 1.5}


@pytest.mark.parametrize("overhead", [0.05, 0.1, 0.5])
def test_the_mean_step_keeps_within_the_overhead(overhead: float) -> None:
    machine = Machine(overhead, COSTS)
    machine.run(600)
    later = machine.spent[10:]
    achieved = sum(later) / len(later) / machine.plain
    assert achieved <= 1.01 * overhead
    assert achieved > 0.9 * overhead  # and it is spent, not saved
    assert min(t.refreshed for t in machine.timings.values()) > 5
    summary = machine.account.summary()
    assert summary["preconditioning"] == pytest.approx(machine.fixed)
    assert summary["refreshes"] == pytest.approx(achieved - machine.fixed, abs=0.01)
    assert summary["always_fresh"] == pytest.approx(sum(COSTS.values()))


def test_intervals_follow_drift_and_cost() -> None:
    """Proportional to sqrt(cost / drift), as the least sum of drifts asks for."""
    kinds = {"base": (0.1, 0.1), "dear": (0.4, 0.1), "calm": (0.1, 0.1 / 16)}
    costs = {f"{kind}{i}": cost for i in range(6) for kind, (cost, _) in kinds.items()}
    drift = {name: kinds[name[:-1]][1] for name in costs}
    machine = Machine(0.1, costs, drift=drift, fixed=0.0)
    machine.run(3000)
    times = dict.fromkeys(kinds, 0)
    for name, t in machine.timings.items():
        times[name[:-1]] += t.refreshed
    assert times["base"] / times["dear"] == pytest.approx(2.0, rel=0.15)
    assert times["base"] / times["calm"] == pytest.approx(4.0, rel=0.15)


def test_with_room_for_all_everything_is_fresh() -> None:
    machine = Machine(1.0, {"a": 0.1, "b": 0.2})
    machine.run(50)
    assert [t.refreshed for t in machine.timings.values()] == [48, 48]
    assert "Nothing had to be given up." in machine.account.summary()["says"]


def test_what_stood_still_is_looked_at_again() -> None:
    machine = Machine(0.3, COSTS, drift=dict.fromkeys(COSTS, 0.1) | {"a": 0.0})
    machine.run(600)
    assert machine.timings["a"].refreshed > 3


def test_it_says_what_was_given_up() -> None:
    machine = Machine(0.1, COSTS)
    machine.run(300)
    says = machine.account.summary()["says"]
    assert "Budget of 10.0% over the plain step (1000.0 ms)" in says
    assert "Given up: refreshing everything at every step" in says
    assert "176.0%" in says


def test_preconditioning_that_is_over_the_budget_is_told() -> None:
    machine = Machine(0.1, COSTS, fixed=0.3)
    machine.run(400)
    assert "it cannot be kept" in machine.account.summary()["says"]
    refreshes = machine.account.summary()["refreshes"]
    assert 0.005 < refreshes < 0.011  # a tenth of the overhead, so nothing freezes


def test_a_pause_does_not_buy_refreshes() -> None:
    machine = Machine(0.1, COSTS)
    machine.run(100)
    before = sum(t.refreshed for t in machine.timings.values())
    credit = machine.account.books.credit
    machine.clock.wait(1000.0)  # an evaluation
    machine.one()
    assert machine.account.books.credit <= credit + 0.1
    assert sum(t.refreshed for t in machine.timings.values()) <= before + 2


def test_books_are_saved() -> None:
    machine, other = Machine(0.1, COSTS), Machine(0.1, COSTS)
    machine.run(120)
    other.account.load_state_dict(machine.account.state_dict())
    assert other.account.state_dict() == machine.account.state_dict()
    chosen = [
        m.account.decide(120, machine.timings, dict.fromkeys(COSTS, 0))
        for m in (machine, other)
    ]
    assert chosen[0] == chosen[1]


@pytest.mark.parametrize("bad", [0, -0.1, "ten", True, None, float("inf")])
def test_it_refuses(bad: Any) -> None:
    with pytest.raises(ValueError, match=r"overhead=.*a number > 0"):
        natgrad.Budget(bad)


# -- the meter ----------------------------------------------------------------------


def test_a_meter_counts_only_when_somebody_reads() -> None:
    clock = FakeClock()
    meter = Meter(torch.device("cpu"), clock)
    with meter("refresh"):
        clock.wait(1.0)
    first = Reader(meter)
    with meter("invert", {"x": 1.0, "y": 3.0}):
        clock.wait(2.0)
    second = Reader(meter)
    with meter("invert", "x"):
        clock.wait(1.0)
    assert first.take() == {("invert", "x"): 1.5, ("invert", "y"): 1.5}
    assert second.take() == {("invert", "x"): 1.0, ("invert", "y"): 0.0}
    assert set(first.take().values()) == {0.0}


# -- in a run -----------------------------------------------------------------------


@pytest.mark.parametrize("decay", [0.0, 0.9])
def test_a_run_refreshes_some_of_it(decay: float) -> None:
    model = mlp()
    optimizer, kfac = sgd(
        model,
        refresh=natgrad.Budget(0.05),
        norm="unit",
        factor_decay=decay,
        damping=0.1,
    )
    clock = FakeClock()
    kfac.engine.meter.clock = clock
    states = kfac.engine.statistics.states
    seen: list[int] = []
    for step in range(60):
        backward(model, step)
        clock.wait(1.0)
        invert = kfac.engine.statistics._decompose
        due = len(kfac.engine.statistics.due())
        seen.append(due)

        def slow(mine: Any, invert: Any = invert) -> Any:
            clock.wait(0.1 * len(mine))
            return invert(mine)

        kfac.engine.statistics._decompose = slow  # pyright: ignore
        optimizer.step()
        del kfac.engine.statistics._decompose
    assert seen[0] == len(states) == 5
    assert seen[1] == 0
    # half of a statistic a step: 0.05 s of 0.1 s
    assert sum(seen[2:]) == pytest.approx(0.5 * len(seen[2:]), abs=3)
    assert min(s.timing.refreshed for s in states.values()) >= 3
    assert kfac.refreshes()["budget"]["refreshes"] == pytest.approx(0.05, abs=0.01)
    assert "Given up" in kfac.report()


def test_it_resumes() -> None:
    model = mlp()
    optimizer, kfac = sgd(model, refresh=natgrad.Budget(0.3))
    for step in range(8):
        backward(model, step)
        optimizer.step()
    saved = optimizer.state_dict()
    again = mlp()
    again.load_state_dict(model.state_dict())
    optimizer, resumed = sgd(again, refresh=natgrad.Budget(0.3))
    optimizer.load_state_dict(saved)
    account, other = (k.engine.statistics.account for k in (kfac, resumed))
    assert account is not None
    assert other is not None
    assert other.state_dict() == account.state_dict()
    assert other.books.plain > 0
    for step in range(8, 12):
        backward(again, step)
        optimizer.step()
    assert resumed.engine.step == 12


def _on_ranks(rank: int, cases: list[Case]) -> list[Any]:
    results: list[Any] = []
    for case in cases:
        flat, natural, _ = train(case)
        account = natural.engine.statistics.account.state_dict()
        results.append((natural.refreshes()["statistics"], account, flat))
    return results


@pytest.mark.processes
def test_all_ranks_decide_alike() -> None:
    """Though each rank measures seconds of its own."""
    options: dict[str, Any] = {"refresh": natgrad.Budget(0.2), "damping": 0.1}
    cases = [
        Case(method="spngd", options=options),
        Case(method="ddp", options={**options, "strategy": "factor_wise"}),
    ]
    first, second = run_world(2, _on_ranks, cases)
    for here, there in zip(first, second, strict=True):
        assert here[0] == there[0]
        assert here[1] == there[1]
        assert torch.allclose(here[2], there[2], rtol=0, atol=1e-12)
        refreshed = [counts["refreshed"] for counts in here[0].values()]
        assert min(refreshed) >= 1
        assert sum(refreshed) < 20 * len(refreshed)
