"""A study's finished trials, read from its storage and grouped for reading."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from natgrad_lab.errors import UserError
from natgrad_lab.study.curves import Metric, Trial, from_plain, mean_curve
from natgrad_lab.study.ledger import Ledger
from natgrad_lab.study.points import Point, decay_epochs, same_trial
from natgrad_lab.study.reading import (
    Criterion,
    StepCost,
    by_batch,
    quantile,
    selected_run,
    stage_targets,
    step_cost,
)
from natgrad_lab.study.spec import StudySpec

METRICS: tuple[Metric, ...] = ("loss", "accuracy")


@dataclass(frozen=True, kw_only=True)
class Results:
    """Finished trials of a study; with repeats, one mean trial a configuration.

    ``keys``, ``attempts`` and ``notes`` (what the data really were) go with ``single``,
    the trials before averaging.
    """

    spec: StudySpec
    trials: tuple[Trial, ...]
    single: tuple[Trial, ...] = ()
    keys: tuple[str, ...] = ()
    attempts: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    unfinished: int = 0

    @property
    def methods(self) -> list[str]:
        """Methods that have a finished trial, in the specification's order."""
        found = {trial.method for trial in self.trials}
        return [name for name in self.spec.methods if name in found]

    @property
    def data(self) -> str:
        """What the data really were: CIFAR-10 (JPEG)."""
        return ", ".join(sorted({*self.notes} - {""})) or "data that were not noted"

    @property
    def batches(self) -> list[int]:
        """Batch sizes that have a finished trial, least first."""
        return sorted({trial.batch for trial in self.trials})

    @property
    def base(self) -> int:
        """m0: the batch that speedups refer to."""
        wanted = self.spec.base_batch
        return wanted if wanted in self.batches else self.batches[0]

    @property
    def schedule(self) -> str:
        """The schedule of the main figures: scaled where there is one."""
        kinds = self.spec.schedule.kinds
        return "scaled" if "scaled" in kinds else kinds[0]

    def style(self, method: str) -> str:
        """The damping style of the main figures: normal where there is one."""
        styles = self.spec.methods[method].styles(method)
        return "normal" if "normal" in styles else styles[0]

    def of(
        self,
        method: str,
        batch: int | None = None,
        *,
        schedule: str | None = None,
        style: str | None = None,
    ) -> list[Trial]:
        """Trials of a method; of the main schedule and style unless told."""
        want_schedule = self.schedule if schedule is None else schedule
        want_style = self.style(method) if style is None else style
        return [
            each
            for each in self.trials
            if each.method == method
            and batch in (None, each.batch)
            and each.point.schedule == want_schedule
            and each.point.style == want_style
        ]

    def main(self) -> list[Trial]:
        """Trials of all methods with the main schedule and styles."""
        return [each for name in self.methods for each in self.of(name)]

    def decays(self, trial: Trial) -> tuple[float, ...]:
        """Epochs at which a trial's learning rate decayed."""
        curve, point = trial.curve, trial.point
        examples = 1
        if any(curve.steps):
            examples = round(curve.steps[-1] * point.batch / curve.epochs[-1])
        return decay_epochs(self.spec, point.schedule, point.batch, examples)

    def targets(self, metric: Metric) -> tuple[Criterion, ...]:
        """One target a stage, from the worst method and batch (Ma et al., IV.C)."""
        worst = selected_run(self.main(), metric)
        return stage_targets(worst.curve, self.decays(worst), metric)

    def common_epochs(self) -> float:
        """The epochs that every batch size was given."""
        return min(self._last(m, "epochs") for m in self.batches)

    def common_steps(self) -> int:
        """The updates that every batch size was given."""
        return int(min(self._last(m, "steps") for m in self.batches))

    def step_seconds(self, method: str) -> dict[int, float]:
        """Median processor seconds an update, by batch size."""
        found = {}
        for m, group in by_batch(self.of(method)).items():
            known = [x.curve.step_seconds for x in group if any(x.curve.steps)]
            if known:
                found[m] = quantile(known, 0.5)
        return found

    def step_cost(self, method: str) -> StepCost:
        """Seconds an update as fixed part and part an example."""
        return step_cost(self.step_seconds(method))

    def _last(self, batch: int, name: str) -> float:
        curves = [each.curve for each in self.main() if each.batch == batch]
        return max((getattr(curve, name)[-1:] or (0,))[0] for curve in curves)


def read_results(ledger: Ledger) -> Results:
    """Everything that has ended so far."""
    spec = ledger.spec()
    rows = ledger.planned_trials()
    ended = [each for each in rows if each.state.is_finished()]
    if not any(each.values for each in ended):
        raise UserError(
            f"No trial of study {ledger.name} has trained to its end yet: there is "
            "nothing to report."
        )
    single = tuple(
        Trial(
            point=Point(**each.user_attrs["point"]),
            curve=from_plain(each.user_attrs["curve"]),
        )
        for each in ended
    )
    return Results(
        spec=spec,
        trials=average(at_every_point(spec, single)),
        single=single,
        keys=tuple(each.user_attrs["key"] for each in ended),
        attempts=tuple(each.user_attrs.get("attempts", 1) for each in ended),
        notes=tuple(each.user_attrs.get("data", "") for each in ended),
        unfinished=len(rows) - len(ended),
    )


def at_every_point(spec: StudySpec, trials: Sequence[Trial]) -> list[Trial]:
    """Trials at each point of the study that they are the trial of."""
    return [
        replace(each, point=point)
        for each in trials
        for point in same_trial(spec, each.point)
    ]


def average(trials: Sequence[Trial]) -> tuple[Trial, ...]:
    """One trial a configuration: its repeats' mean."""
    groups: dict[Point, list[Trial]] = {}
    for each in trials:
        groups.setdefault(replace(each.point, seed=0), []).append(each)
    return tuple(
        Trial(point=group[0].point, curve=mean_curve([each.curve for each in group]))
        for group in groups.values()
    )
