"""What a run's records say in a few numbers."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from natgrad_lab.errors import UserError
from natgrad_lab.train import run as runs
from natgrad_lab.train.records import Record, read_metrics


@dataclass(frozen=True, kw_only=True)
class Reached:
    """When a target accuracy was first seen."""

    step: int
    seconds: float
    cpu_seconds: float


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One run in numbers. Accuracies are percentages, seconds count training only;
    ``cpu_seconds`` are the processor's, the ones to compare on a shared machine.
    """

    name: str
    folder: Path
    label: str
    data: str
    batch: int
    best: float | None
    last: float | None
    steps: int
    seconds: float
    cpu_seconds: float
    waiting: float
    reduction: float | None
    reached: dict[float, Reached | None]
    ending: str
    records: list[Record]

    @property
    def milliseconds(self) -> float:
        """Training milliseconds a step."""
        return 1000 * self.seconds / max(1, self.steps)


def summarise(folder: Path, targets: Sequence[float] = ()) -> Summary:
    """Read a run folder; its own targets are used unless others are given."""
    run = runs.load(folder)
    if not run.metrics.is_file():
        raise UserError(f"{folder} has no metrics.jsonl yet: nothing was trained.")
    records = read_metrics(run.metrics)
    tests = [each for each in records if each["kind"] == "test"]
    trains = [each for each in records if each["kind"] == "train"]
    ends = [each for each in records if each["kind"] == "end"]
    accuracies = [each["accuracy"] for each in tests]
    wanted = targets or run.config.targets
    return Summary(
        name=folder.name,
        folder=folder,
        label=run.config.optimizer.label,
        data=runs.data_note(run),
        batch=run.config.batch,
        best=max(accuracies, default=None),
        last=accuracies[-1] if accuracies else None,
        steps=max((each["step"] for each in records), default=0),
        seconds=max((each.get("seconds", 0.0) for each in records), default=0.0),
        cpu_seconds=max(
            (each.get("cpu_seconds", 0.0) for each in records), default=0.0
        ),
        waiting=waiting(trains),
        reduction=reduction(trains),
        reached={target: first_reached(tests, target) for target in wanted},
        ending=ends[-1]["reason"] if ends else "unfinished",
        records=records,
    )


def first_reached(tests: Sequence[Record], target: float) -> Reached | None:
    """The first evaluation at or above a target."""
    for each in tests:
        if each["accuracy"] >= target:
            return Reached(
                step=each["step"],
                seconds=each["seconds"],
                cpu_seconds=each.get("cpu_seconds", 0.0),
            )
    return None


def waiting(trains: Sequence[Record]) -> float:
    """Share of all training time spent waiting for the loader."""
    total = sum(sum(each["phases"].values()) for each in trains)
    data = sum(each["phases"].get("data", 0.0) for each in trains)
    return data / total if total else 0.0


def reduction(trains: Sequence[Record]) -> float | None:
    """Share of the statistics' bytes that was refreshed; None without statistics."""
    return trains[-1].get("reduction") if trains else None
