"""What the curves say: pure functions, after Ma et al. 2019, sections III.C and IV.

A criterion c is a target loss or accuracy. k_c(m) is the least cost, over all
configurations, to reach it at batch size m; s_c(m; m0) = k_c(m0) / k_c(m) is the
speedup, m / m0 when batches scale ideally.

Between two evaluations a curve is taken for a straight line: where it meets a target,
and where stopping is simulated, does not depend on how often it was evaluated.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from natgrad_lab.study.curves import Curve, Metric, Trial

STAGE_SHARE = 0.8
"""How far into a stage of training its target is (Ma et al., section IV.C)."""
HALF = 0.5
"""Share of the ideal speedup below which a batch size no longer scales."""
Cost = Callable[[Trial], Sequence[float]]


@dataclass(frozen=True, kw_only=True)
class Criterion:
    """A target: a training loss to fall to, or a test accuracy to rise to."""

    metric: Metric
    value: float

    def met(self, value: float) -> bool:
        """Whether a value is good enough; what is not a number never is."""
        if self.metric == "loss":
            return value <= self.value
        return value >= self.value

    @property
    def label(self) -> str:
        """For legends: loss 0.12, accuracy 91.3 %."""
        if self.metric == "loss":
            return f"loss {self.value:.3g}"
        return f"accuracy {self.value:.2f} %"


def first_met(curve: Curve, criterion: Criterion) -> int | None:
    """Index of the first point of a curve that meets a criterion."""
    for index, value in enumerate(curve.values(criterion.metric)):
        if criterion.met(value):
            return index
    return None


def iterations(trial: Trial) -> Sequence[float]:
    """Cost: updates, at each point of the curve."""
    return trial.curve.steps


def examples(trial: Trial) -> Sequence[float]:
    """Cost: examples processed, updates x batch size."""
    return [step * trial.batch for step in trial.curve.steps]


def wall_seconds(trial: Trial) -> Sequence[float]:
    """Cost: training seconds by the wall clock, K-FAC's own work included."""
    return trial.curve.seconds


def compute_seconds(trial: Trial) -> Sequence[float]:
    """Cost: processor seconds, K-FAC's own work included."""
    return trial.curve.cpu_seconds


def cost_to(trial: Trial, criterion: Criterion, cost: Cost) -> float | None:
    """What a trial spends until it meets a criterion; None when it does not.

    Between the last point that misses it and the first that meets it, linearly.
    """
    index = first_met(trial.curve, criterion)
    if index is None:
        return None
    spent, values = cost(trial), trial.curve.values(criterion.metric)
    if not index or not math.isfinite(values[index - 1]):
        return float(spent[index])
    missed, met = values[index - 1], values[index]
    share = (criterion.value - missed) / (met - missed)
    return spent[index - 1] + share * (spent[index] - spent[index - 1])


@dataclass(frozen=True, kw_only=True)
class Fewest:
    """k_c(m): the least cost of all configurations, and the trial that has it."""

    cost: float
    trial: Trial


def fewest(
    trials: Sequence[Trial], criterion: Criterion, cost: Cost = iterations
) -> Fewest | None:
    """The configuration that meets a criterion at least cost; None when none does.

    A trial that diverged later counts: it did reach the target.
    """
    best: Fewest | None = None
    for trial in trials:
        spent = cost_to(trial, criterion, cost)
        if spent is not None and (best is None or spent < best.cost):
            best = Fewest(cost=spent, trial=trial)
    return best


def by_batch(trials: Sequence[Trial]) -> dict[int, list[Trial]]:
    """Trials grouped by batch size, least first."""
    sizes = sorted({trial.batch for trial in trials})
    return {m: [each for each in trials if each.batch == m] for m in sizes}


def costs_to(
    trials: Sequence[Trial], criterion: Criterion, cost: Cost = iterations
) -> dict[int, float]:
    """k_c(m) of one method, for each batch size that meets the criterion."""
    found = {m: fewest(group, criterion, cost) for m, group in by_batch(trials).items()}
    return {m: each.cost for m, each in found.items() if each is not None}


def speedups(costs: Mapping[int, float], base: int) -> dict[int, float]:
    """s_c(m; m0) for each m; empty when m0 itself does not meet the criterion.

    What is met before training has no speedup.
    """
    if base not in costs:
        return {}
    return {m: costs[base] / cost for m, cost in costs.items() if cost}


def ideal_speedup(batch: int, base: int) -> float:
    """The speedup if every example were worth as much in a larger batch: m / m0."""
    return batch / base


def ideal_costs(costs: Mapping[int, float], base: int) -> dict[int, float]:
    """Iterations if scaling were ideal from m0 on: k_c(m0) m0 / m."""
    if base not in costs:
        return {}
    return {m: costs[base] * base / m for m in costs}


def scales_until(
    found: Mapping[int, float],
    batches: Sequence[int],
    base: int,
    share: float = HALF,
) -> int:
    """The largest batch up to which every speedup has that share of the ideal.

    A batch size without a speedup (the target was missed) ends the climb. The base
    itself always scales.
    """
    last = base
    for batch in sorted(m for m in batches if m > base):
        if found.get(batch, 0.0) < share * ideal_speedup(batch, base):
            break
        last = batch
    return last


def score(curve: Curve, metric: Metric) -> float:
    """A curve's best value; the worst there is when it diverged or has no point."""
    values = [x for x in curve.values(metric) if math.isfinite(x)]
    if curve.diverged or not values:
        return failure(metric)
    return min(values) if metric == "loss" else max(values)


def final(curve: Curve, metric: Metric) -> float:
    """A curve's value at the end of training; a failure when it diverged."""
    values = curve.values(metric)
    if curve.diverged or not values or not math.isfinite(values[-1]):
        return failure(metric)
    return values[-1]


def failure(metric: Metric) -> float:
    """What a diverged trial counts as: an infinite loss, an accuracy of 0."""
    return math.inf if metric == "loss" else 0.0


def best_trial(trials: Sequence[Trial], metric: Metric) -> Trial:
    """The configuration with the best value; the first of equals."""
    sign = -1 if metric == "accuracy" else 1
    return min(trials, key=lambda trial: sign * score(trial.curve, metric))


def selected_run(trials: Sequence[Trial], metric: Metric) -> Trial:
    """The best run of the worst method and batch size, which sets the targets."""
    groups: dict[tuple[str, int], list[Trial]] = {}
    for trial in trials:
        groups.setdefault((trial.method, trial.batch), []).append(trial)
    tuned = [best_trial(group, metric) for group in groups.values()]
    sign = -1 if metric == "accuracy" else 1
    return max(tuned, key=lambda trial: sign * score(trial.curve, metric))


def stage_targets(
    curve: Curve, decays: Sequence[float], metric: Metric
) -> tuple[Criterion, ...]:
    """One target a stage of a run: 80 % of the way through what the stage gains.

    Stages end where the learning rate decays (``decays``, in epochs) and at the end.
    The value before the first stage is that of the initial weights, the curve's first
    point. A stage that holds no point, or gains nothing, has no target.
    """
    values = curve.values(metric)
    if not values:
        return ()
    ends = [_last_before(curve.epochs, epoch) for epoch in decays]
    ends = [each for each in ends if each is not None]
    found, before = [], 0
    for end in [*ends, len(values) - 1]:
        first, last = values[before], values[end]
        gain = first - last if metric == "loss" else last - first
        if end > before and gain > 0:
            target = first + STAGE_SHARE * (last - first)
            found.append(Criterion(metric=metric, value=target))
        before = max(before, end)
    return tuple(found)


def _last_before(epochs: Sequence[float], limit: float) -> int | None:
    """Index of the last point at or before an epoch (rounding aside)."""
    found = [i for i, epoch in enumerate(epochs) if epoch <= limit * (1 + 1e-9)]
    return found[-1] if found else None


def value_at(
    curve: Curve, metric: Metric, *, epoch: float | None = None, step: int | None = None
) -> float:
    """The value if training had been stopped at an epoch or a step.

    Between two points linearly; a failure before the first point (of a curve without
    one at update 0), or when the trial diverged before.
    """
    where = curve.epochs if epoch is not None else curve.steps
    limit = epoch if epoch is not None else step
    assert limit is not None
    index = _last_before(where, limit)
    short = curve.diverged and (not where or where[-1] < limit)
    if index is None or short:
        return failure(metric)
    first, *more = curve.values(metric)[index : index + 2]
    if not math.isfinite(first):
        return failure(metric)
    if not more or not math.isfinite(more[0]):
        return first
    share = max(0.0, (limit - where[index]) / (where[index + 1] - where[index]))
    return first + share * (more[0] - first)


def good_share(values: Sequence[float], criterion: Criterion) -> float:
    """Robustness: the share of configurations whose value meets a criterion."""
    return sum(map(criterion.met, values)) / len(values) if values else 0.0


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which that share lies, between two neighbours linearly."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    low, high = math.floor(position), math.ceil(position)
    if ordered[low] == ordered[high]:  # infinities have no value between them
        return ordered[low]
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Seconds an update as a function of its batch: ``fixed + example * m``."""

    fixed: float
    example: float

    def alone(self, batch: int) -> float:
        """Seconds an update when one worker takes the whole batch."""
        return self.fixed + self.example * batch

    def shared(self, base: int) -> float:
        """Seconds an update when workers take ``base`` examples each.

        The fixed part (the optimizer's update, K-FAC's inverses) is not shared, and
        communication costs nothing: what remains is the least a cluster can do.
        """
        return self.fixed + self.example * base


def step_cost(seconds: Mapping[int, float]) -> StepCost:
    """Least squares through measured seconds an update, by batch size.

    Neither part is negative: where the fit would be, the line is taken through zero or
    flat.
    """
    known = {m: s for m, s in seconds.items() if math.isfinite(s)}
    if not known:
        return StepCost(fixed=math.nan, example=math.nan)
    mean_m = sum(known) / len(known)
    mean_s = sum(known.values()) / len(known)
    spread = sum((m - mean_m) ** 2 for m in known)
    slope = mean_s / mean_m
    if spread:
        slope = sum((m - mean_m) * (s - mean_s) for m, s in known.items()) / spread
    if slope < 0:
        return StepCost(fixed=mean_s, example=0.0)
    fixed = mean_s - slope * mean_m
    if fixed < 0:
        slope = sum(m * s for m, s in known.items()) / sum(m * m for m in known)
        return StepCost(fixed=0.0, example=slope)
    return StepCost(fixed=fixed, example=slope)
