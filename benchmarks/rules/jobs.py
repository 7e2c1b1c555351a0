"""The runs: what they compete on, and the command of each."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.rules.contenders import Contender
from benchmarks.rules.outcomes import Outcome
from natgrad_lab.data import load

OPTIONAL = ("optimizer.nesterov",)
"""Which may be None too, so that the command line wants a word."""
NAMES = re.compile(r"(\w+)-(\w+)-b(\d+)-s(\d+)-(tune|final|ablate)-(.+)-[tr]\d+")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What contenders compete on."""

    data: str
    model: str
    batch: int
    steps: int

    @property
    def name(self) -> str:
        """Begins the names of its runs."""
        return f"{self.data}-{self.model}-b{self.batch}-s{self.steps}"

    @property
    def title(self) -> str:
        """For people."""
        return f"{self.place}, {self.steps} steps"

    @property
    def place(self) -> str:
        """All but the steps, for people."""
        name, width = self.network
        model = f"{name} of width {width}" if width else name
        return f"{self.data}, {model}, batch {self.batch:,}"

    @property
    def network(self) -> tuple[str, str]:
        """The model's name, and its width where the name ends with one: resnet8w8."""
        found = re.fullmatch(r"(.+?)(?:w(\d+))?", self.model)
        assert found is not None
        return found[1], found[2] or ""

    @property
    def data_name(self) -> str:
        """As the loaders call it."""
        return "fashion_mnist" if self.data == "fashion" else self.data

    def command(self, method: str, seed: int, evaluations: int) -> list[str]:
        """What all runs have in common."""
        epochs = self.steps * self.batch / training_examples(self.data_name)
        name, width = self.network
        options = {
            "steps": self.steps,
            "batch": self.batch,
            "micro-batch": min(self.batch, 64 if self.data == "text" else 512),
            "seed": seed,
            "evaluate-every": epochs / evaluations,
            "checkpoint-every": 0,
            "model.name": name,
            **({"model.width": width} if width else {}),
            "schedule.warmup-epochs": epochs / 20,
        }
        recipe = f"{self.data}-{method}-{256 if self.data == 'text' else 2048}"
        if self.data == "digits":
            recipe = f"digits-{method}"
        return [recipe, *flags(options)]


@functools.cache
def training_examples(data: str) -> int:
    """How many there are."""
    return len(load(data).train)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run, what was tuned of it, and its command."""

    name: str
    settings: Mapping[str, str]
    command: list[str]


def flags(options: Mapping[str, Any]) -> list[str]:
    """Options as the command line has them."""
    found: list[str] = []
    for name, value in options.items():
        group, _, last = name.rpartition(".")
        if value in ("True", "False") and name not in OPTIONAL:
            last = last if value == "True" else f"no-{last}"
            found.append(f"--{group}.{last}")
        else:
            found += [f"--{name}", *str(value).split()]
    return found


def points(dims: int, trials: int) -> list[list[float]]:
    """The first points of a Sobol sequence, without the origin."""
    engine = torch.quasirandom.SobolEngine(dims, scramble=True, seed=1)
    return engine.draw(trials, dtype=torch.float64).tolist()


def slug(name: str) -> str:
    """A name as part of a folder's."""
    return "".join(c if c.isalnum() or c in "+." else "_" for c in name)


def tuning_jobs(
    setting: Setting, contenders: Mapping[str, Contender], stage: str, trials: int
) -> Iterator[Job]:
    """Every trial of every contender, trial by trial, so that a stop is fair."""
    for trial in range(trials):
        for name, contender in contenders.items():
            point = points(len(contender.tuned), trials)[trial]
            tuned = {k: f"{v:.4g}" for k, v in contender.settings(point).items()}
            command = setting.command(contender.method, 0, 1)
            yield Job(
                name=f"{setting.name}-{stage}-{slug(name)}-t{trial}",
                settings=tuned,
                command=[*command, *flags(contender.fixed), *flags(tuned)],
            )


def final_jobs(
    setting: Setting,
    contenders: Mapping[str, Contender],
    known: Mapping[str, Outcome],
    seeds: int,
    evaluations: int,
    tuned: Setting | None = None,
) -> Iterator[Job]:
    """The best trial of each contender with seeds that it was not chosen by.

    ``tuned`` is what the trials were of, where it is not the setting itself.
    """
    tuned = tuned or setting
    for seed in range(1, seeds + 1):
        for name, contender in contenders.items():
            best = best_trial(known, tuned, "tune", name)
            if best is None:
                print(f"{name}: nothing tuned for {tuned.name}, left out")
                continue
            command = setting.command(contender.method, seed, evaluations)
            yield Job(
                name=f"{setting.name}-final-{slug(name)}-r{seed}",
                settings=best.settings,
                command=[*command, *flags(contender.fixed), *flags(best.settings)],
            )


def settings_in(known: Mapping[str, Outcome]) -> list[Setting]:
    """Everything that outcomes compete on, in order of size."""
    found = {m.groups()[:4] for name in known if (m := NAMES.fullmatch(name))}
    settings = [
        Setting(data=data, model=model, batch=int(batch), steps=int(steps))
        for data, model, batch, steps in found
    ]
    return sorted(settings, key=lambda s: (s.data, s.model, s.batch, s.steps))


def trials_of(
    known: Mapping[str, Outcome], setting: Setting, stage: str, name: str
) -> list[Outcome]:
    """All outcomes of a contender at a stage, in order."""
    wanted = f"{setting.name}-{stage}-{slug(name)}"
    return [known[n] for n in sorted(known) if n.rpartition("-")[0] == wanted]


def best_trial(
    known: Mapping[str, Outcome], setting: Setting, stage: str, name: str
) -> Outcome | None:
    """None if no trial came to its end."""
    trials = [x for x in trials_of(known, setting, stage, name) if not x.missed]
    return max(trials, key=lambda x: x.score, default=None)
