"""Made-up specifications and curves whose answers are known."""

from collections.abc import Sequence
from typing import Any

from natgrad_lab.study.curves import Curve, Trial
from natgrad_lab.study.points import Point
from natgrad_lab.study.spec import Budget, Grid, Method, Schedule, StudySpec

WIDTH = {"model": {"width": 4}}


def one(*values: float) -> Grid:
    return Grid(values=values)


def tiny(**changes: Any) -> StudySpec:
    """Six trials on digits, about a second each; two of them diverge."""
    settings: dict[str, Any] = {
        "name": "tiny",
        "recipe": "digits-sgd",
        "batches": (64, 256),
        "checkpoints": 5,
        "settings": WIDTH,
        "budget": Budget(kind="epochs", epochs=2.0),
        "methods": {
            "sgd": Method(lr=one(0.1, 1e20), momentum=one(0.9)),
            "kfac": Method(lr=one(0.1), damping=one(0.1), recipe="digits-kfac"),
        },
    }
    return StudySpec(**(settings | changes))


def curve(
    losses: Sequence[float],
    *,
    accuracies: Sequence[float] | None = None,
    steps: int = 10,
    seconds: float = 1.0,
    ending: Any = "done",
    first: int = 1,
) -> Curve:
    """A point an epoch, ``steps`` updates and ``seconds`` apart."""
    count = range(first, len(losses) + first)
    found = accuracies or [100 - 10 * each for each in losses]
    return Curve(
        steps=tuple(steps * i for i in count),
        epochs=tuple(float(i) for i in count),
        losses=tuple(losses),
        accuracies=tuple(found),
        seconds=tuple(2 * seconds * i for i in count),
        cpu_seconds=tuple(seconds * i for i in count),
        ending=ending,
    )


def started(losses: Sequence[float], **more: Any) -> Curve:
    """The same from update 0 on."""
    return curve(losses, first=0, **more)


def trial(method: str, batch: int, lr: float, made: Curve, **more: Any) -> Trial:
    style = "" if method == "sgd" else "normal"
    settings: dict[str, Any] = {"other": 0.9, "style": style, **more}
    return Trial(point=Point(method=method, batch=batch, lr=lr, **settings), curve=made)


def falling(rate: float, points: int = 10) -> list[float]:
    """A loss that halves every 1 / rate points, from 4."""
    return [4 * 0.5 ** (rate * i) for i in range(points)]


def made_spec(**changes: Any) -> StudySpec:
    settings: dict[str, Any] = {
        "name": "made",
        "batches": (64, 256, 1024),
        "budget": Budget(kind="epochs", epochs=10.0),
        "schedule": Schedule(kinds=("scaled", "fixed")),
        "methods": {
            "sgd": Method(lr=one(0.1, 1.0), momentum=one(0.5, 0.9)),
            "kfac": Method(
                lr=one(0.1, 1.0),
                damping=one(0.5, 0.9),
                damping_styles=("normal", "approximated"),
            ),
        },
    }
    return StudySpec(**(settings | changes))
