"""From a specification to trials: every point, its settings, and its key.

A trial's key is the hash of everything that can change its numbers. The same
configuration has the same key in every study, however the grid around it grows.
"""

import dataclasses
import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from natgrad_lab import data
from natgrad_lab.errors import UserError
from natgrad_lab.recipes import find
from natgrad_lab.schema import override
from natgrad_lab.study.spec import Method, StudySpec, second_of
from natgrad_lab.train.config import (
    CurvatureConfig,
    OptimizerConfig,
    OptimizerName,
    ScheduleConfig,
    TrainConfig,
)
from natgrad_lab.train.run import plain

UNHASHED = ("out", "targets", "tensorboard", "diagnostics", "checkpoint_every")
"""Settings of a run that no number of its curve depends on."""
STYLES: dict[str, Literal["eigen", "factored", "relative"]] = {
    "relative": "relative",
    "normal": "eigen",
    "approximated": "factored",
}
RECORDS = 4
"""Training records between two evaluations, at least."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One trial of a study: where it is in the grid, and its seed.

    ``other`` is the momentum of sgd, the damping of the others. ``style`` is the
    damping style, "" for sgd.
    """

    method: str
    batch: int
    lr: float
    other: float
    style: str = ""
    schedule: str = "scaled"
    seed: int = 0

    @property
    def label(self) -> str:
        """For messages: kfac m=512 lr=0.1 damping=0.01 seed=0."""
        second = second_of(self.method)
        parts = [self.method, f"m={self.batch}", f"lr={self.lr:g}"]
        parts += [f"{second}={self.other:g}", self.style, self.schedule]
        return " ".join([*filter(None, parts), f"seed={self.seed}"])


def points(spec: StudySpec) -> list[Point]:
    """All trials, in an order that gives a bit of everything early."""
    found = []
    seeds = range(spec.seed, spec.seed + spec.repeats)
    for seed, schedule in itertools.product(seeds, spec.schedule.kinds):
        cells = [
            [
                Point(**cell, batch=batch, schedule=schedule, seed=seed)
                for batch in sorted(spec.batches, reverse=True)
            ]
            for cell in _interleaved(spec)
        ]
        found += [point for row in cells for point in row]
    return found


def _interleaved(spec: StudySpec) -> Iterator[dict[str, Any]]:
    """Grid cells of all methods and styles, taking turns."""
    grids = [
        [
            {"method": name, "lr": lr, "other": other, "style": style}
            for lr, other in itertools.product(method.lr.expand(), method.others)
        ]
        for name, method in spec.methods.items()
        for style in method.styles(name)
    ]
    for row in itertools.zip_longest(*grids):
        yield from (cell for cell in row if cell is not None)


def budget_epochs(spec: StudySpec, batch: int, examples: int) -> float:
    """Epochs that a trial of that batch size trains."""
    budget = spec.budget
    if budget.kind == "adjusted":
        return (math.log2(batch / spec.base_batch) + 1) * budget.epochs
    if budget.kind == "iterations":
        assert budget.iterations is not None
        return budget.iterations * batch / examples
    return budget.epochs


def decay_epochs(
    spec: StudySpec, schedule: str, batch: int, examples: int
) -> tuple[float, ...]:
    """Epochs at which the learning rate decays, within the trial's budget."""
    last = budget_epochs(spec, batch, examples)
    whole = last
    if schedule == "fixed":
        whole = budget_epochs(spec, spec.base_batch, examples)
    return tuple(
        share * whole for share in spec.schedule.decays if share * whole < last
    )


def same_trial(spec: StudySpec, point: Point) -> tuple[Point, ...]:
    """All points of a study that are one trial with this one.

    Schedules differ only in their decays: at the base batch scaled and fixed are one.
    """
    decays = {
        kind: decay_epochs(spec, kind, point.batch, examples=1)
        for kind in (point.schedule, *spec.schedule.kinds)
    }
    own = decays[point.schedule]
    alike = [kind for kind in spec.schedule.kinds if decays[kind] == own]
    return tuple(replace(point, schedule=kind) for kind in alike)


def make_config(spec: StudySpec, point: Point, examples: int) -> TrainConfig:
    """Every setting of one trial, on a training set of ``examples``."""
    method = spec.methods[point.method]
    base = base_config(spec, point.method, method)
    epochs = budget_epochs(spec, point.batch, examples)
    every = spec.evaluate_every
    if spec.evaluations is not None:
        every = epochs / spec.evaluations
    between = every * examples / point.batch
    return replace(
        base,
        epochs=epochs,
        steps=spec.budget.iterations,
        batch=point.batch,
        micro_batch=min(spec.micro_batch or point.batch, point.batch),
        seed=point.seed,
        evaluate_every=every,
        checkpoint_every=epochs / spec.checkpoints,
        log_every=max(1, int(between / RECORDS)),
        threads=spec.threads,
        tensorboard=False,
        out=None,
        optimizer=_optimizer(base.optimizer, point),
        curvature=_curvature(base.curvature, point),
        schedule=ScheduleConfig(
            kind="steps",
            decay_epochs=decay_epochs(spec, point.schedule, point.batch, examples),
            decay_factor=spec.schedule.factor,
            warmup_epochs=spec.schedule.warmup_epochs,
        ),
    )


def base_config(spec: StudySpec, name: str, method: Method) -> TrainConfig:
    """A method's settings before the grid: its recipe, overridden twice."""
    config = find(method.recipe or spec.recipe).config
    config = override(config, spec.settings, "settings")
    return override(config, method.settings, f"methods.{name}.settings")


def _optimizer(base: OptimizerConfig, point: Point) -> OptimizerConfig:
    name: OptimizerName = "sgd"
    if point.method in ("spngd", "polar"):
        name = point.method
    momentum = point.other if point.method == "sgd" else base.momentum
    return replace(
        base, name=name, kfac=point.method == "kfac", lr=point.lr, momentum=momentum
    )


def _curvature(base: CurvatureConfig, point: Point) -> CurvatureConfig:
    if point.method == "sgd":
        return CurvatureConfig()  # unused: it must not make two keys of one trial
    return replace(
        base,
        damping=point.other,
        damping_start=None,
        damping_warmup=0,
        damping_decay_epochs=(),
        style=STYLES[point.style],
    )


def make_key(config: TrainConfig) -> str:
    """The hash of a trial's configuration, 16 hexadecimal digits."""
    settings = plain(config)
    for name in UNHASHED:
        del settings[name]
    del settings["data"]["root"]
    text = json.dumps(settings, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A point with its settings and key, and what the data here really are."""

    key: str
    point: Point
    config: TrainConfig
    data: str


def make_plan(spec: StudySpec) -> dict[str, Planned]:
    """Every trial by key, in order. Loads the data to know how many examples."""
    method = next(iter(spec.methods))
    config = base_config(spec, method, spec.methods[method])
    dataset = load_data(config)
    examples = len(dataset.train)
    plan: dict[str, Planned] = {}
    for point in points(spec):
        if point.batch > examples:
            name = config.data.name
            raise UserError(
                f"Invalid batches: {point.batch}. Must be <= the {examples:,} training "
                f"examples of {name}."
            )
        made = make_config(spec, point, examples)
        made.accumulation(1)
        key = make_key(made)
        planned = Planned(key=key, point=point, config=made, data=dataset.note)
        plan.setdefault(key, planned)
    return plan


def load_data(config: TrainConfig) -> data.Dataset:
    """The data of a study; what is missing is named as a study's file names it."""
    asked = config.data
    try:
        return data.load(asked.name, asked.root, **asked.options)
    except data.DataError as error:
        here = r"`settings.data.\1` in the study's file"
        raise data.DataError(re.sub(r"--data\.(\w+)", here, str(error))) from error


def spec_to_plain(spec: StudySpec) -> dict[str, Any]:
    """A specification as JSON types, to keep in the storage and to show.

    The storage's own address is left out: it may have a password in it.
    """
    return json.loads(json.dumps(dataclasses.asdict(replace(spec, storage=None))))
