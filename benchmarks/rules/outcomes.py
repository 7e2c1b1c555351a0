"""What runs came to, one line each, in a file that is committed with the results.

A run's own folder stays on the machine that trained it. The lines are enough to write
the report and to go on with what is missing, from any clone.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from natgrad_lab.errors import UserError
from natgrad_lab.report.summary import summarise


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One evaluation: accuracy in %, training seconds of the processor so far."""

    step: int
    loss: float
    accuracy: float
    cpu_seconds: float


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A run that came to an end of any kind.

    ``settings`` are what was tuned of it, ``command`` is all that was asked for
    (empty in lines that are older than it).
    """

    name: str
    settings: Mapping[str, str]
    ending: str
    steps: int
    cpu_seconds: float
    tests: tuple[Evaluation, ...]
    command: str = ""

    @property
    def missed(self) -> bool:
        """It diverged, or ended with a loss that is no number."""
        whole = self.ending == "done" and bool(self.tests)
        return not whole or not math.isfinite(self.tests[-1].loss)

    @property
    def score(self) -> float:
        """Higher is better: accuracy, or for text the negative loss; a miss is -inf."""
        if self.missed:
            return -math.inf
        last = self.tests[-1]
        return -last.loss if self.name.startswith("text-") else last.accuracy


def read_run(
    folder: Path, settings: Mapping[str, str], command: str = ""
) -> Outcome | None:
    """The outcome of a run folder; None for one that was cut off."""
    try:
        one = summarise(folder)
    except UserError:
        return None
    if one.ending == "unfinished":
        return None
    names = [field.name for field in dataclasses.fields(Evaluation)]
    tests = [
        Evaluation(**{name: each[name] for name in names})
        for each in one.records
        if each["kind"] == "test"
    ]
    return Outcome(
        name=folder.name,
        settings=dict(settings),
        ending=one.ending,
        steps=one.steps,
        cpu_seconds=round(one.cpu_seconds, 3),
        tests=tuple(tests),
        command=command,
    )


def read_outcomes(path: Path) -> dict[str, Outcome]:
    """All lines of a file by name; none if there is no file."""
    if not path.is_file():
        return {}
    found: dict[str, Outcome] = {}
    for line in path.read_text().splitlines():
        fields = json.loads(line)
        fields["tests"] = tuple(Evaluation(**each) for each in fields["tests"])
        one = Outcome(**fields)
        found[one.name] = one
    return found


def append_outcome(path: Path, one: Outcome) -> None:
    """Add a line; a whole one or none, because it is written by one call."""
    with path.open("a") as file:
        file.write(json.dumps(dataclasses.asdict(one)) + "\n")
