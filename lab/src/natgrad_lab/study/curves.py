"""What a trial leaves behind: its curve, one point an evaluation."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from natgrad_lab.study.points import Point
from natgrad_lab.train.records import Record

Ended = Literal["done", "diverged"]
Metric = Literal["loss", "accuracy"]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A trial over time. Every tuple has one entry an evaluation.

    The first evaluation is before training, at update 0. ``losses`` are training
    losses, averaged since the evaluation before (the first: that of the first batch);
    ``accuracies`` are test accuracies in percent; ``seconds`` and ``cpu_seconds``
    count training only, not evaluations.
    """

    steps: tuple[int, ...] = ()
    epochs: tuple[float, ...] = ()
    losses: tuple[float, ...] = ()
    accuracies: tuple[float, ...] = ()
    seconds: tuple[float, ...] = ()
    cpu_seconds: tuple[float, ...] = ()
    ending: Ended = "done"

    def values(self, metric: Metric) -> tuple[float, ...]:
        """The losses or the accuracies."""
        return self.losses if metric == "loss" else self.accuracies

    @property
    def diverged(self) -> bool:
        """Whether it ended early because the loss was not finite."""
        return self.ending == "diverged"

    @property
    def step_seconds(self) -> float:
        """Processor seconds an update; not a number without a point after one."""
        updates = self.steps[-1] if self.steps else 0
        return self.cpu_seconds[-1] / updates if updates else math.nan


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A point of the study and its curve (with repeats: their mean)."""

    point: Point
    curve: Curve

    @property
    def batch(self) -> int:
        """Examples an update."""
        return self.point.batch

    @property
    def method(self) -> str:
        """sgd, kfac, spngd or polar."""
        return self.point.method


def from_records(records: Sequence[Record], ending: Ended) -> Curve:
    """The curve of a run's records (`read_metrics`)."""
    tests = [each for each in records if each["kind"] == "test"]
    trains = [each for each in records if each["kind"] == "train"]
    tests = [each for each in tests if math.isfinite(each["loss"])]
    start = next((x["loss"] for x in records if x["kind"] == "start"), math.nan)
    return Curve(
        steps=tuple(each["step"] for each in tests),
        epochs=tuple(each["epoch"] for each in tests),
        losses=tuple(_between(trains, [each["step"] for each in tests], start)),
        accuracies=tuple(each["accuracy"] for each in tests),
        seconds=tuple(each["seconds"] for each in tests),
        cpu_seconds=tuple(each["cpu_seconds"] for each in tests),
        ending=ending,
    )


def _between(
    trains: Sequence[Record], ends: Sequence[int], start: float
) -> list[float]:
    """Mean training loss an update in (the end before, the end]; ``start`` before."""
    losses: list[float] = []
    before, index = 0, 0
    for end in ends:
        total, count = 0.0, 0
        while index < len(trains) and trains[index]["step"] <= end:
            updates = trains[index]["step"] - before
            total += trains[index]["loss"] * updates
            count += updates
            before = trains[index]["step"]
            index += 1
        if count:
            losses.append(total / count)
        else:  # no record since the last evaluation: nothing newer is known
            losses.append(losses[-1] if losses else start)
    return losses


def to_plain(curve: Curve) -> dict[str, Any]:
    """A curve as JSON types; what is not finite becomes null."""
    return {
        name: [_finite(x) for x in value] if isinstance(value, tuple) else value
        for name, value in asdict(curve).items()
    }


def from_plain(value: dict[str, Any]) -> Curve:
    """Undo `to_plain`; null becomes not a number."""
    parts: dict[str, Any] = {
        name: tuple(math.nan if x is None else x for x in item)
        if isinstance(item, list)
        else item
        for name, item in value.items()
    }
    return Curve(**parts)


def thinned(curve: Curve, most: int) -> dict[int, float]:
    """Accuracies by step, at most so many, the last one among them."""
    every = max(1, -(-len(curve.steps) // most))
    pairs = list(zip(curve.steps, curve.accuracies, strict=True))
    return dict(pairs[::-1][::every][::-1])


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """Repeats of one configuration as one: means, point by point.

    One diverged repeat makes the configuration diverged; its points are those that all
    repeats have (an older natgrad recorded none at update 0).
    """
    if len(curves) == 1:
        return curves[0]
    common = set(curves[0].steps).intersection(*(curve.steps for curve in curves))
    ended = [curve.ending for curve in curves]

    def mean(name: str) -> tuple[float, ...]:
        rows = [_at(curve, name, common) for curve in curves]
        return tuple(sum(column) / len(rows) for column in zip(*rows, strict=True))

    return Curve(
        steps=tuple(sorted(common)),
        epochs=mean("epochs"),
        losses=mean("losses"),
        accuracies=mean("accuracies"),
        seconds=mean("seconds"),
        cpu_seconds=mean("cpu_seconds"),
        ending="diverged" if "diverged" in ended else "done",
    )


def _at(curve: Curve, name: str, steps: set[int]) -> list[float]:
    """One of a curve's tuples, at these steps only."""
    pairs = zip(curve.steps, getattr(curve, name), strict=True)
    return [value for step, value in pairs if step in steps]
