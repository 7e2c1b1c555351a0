"""Tune update rules with equal budgets and compare the best of each.

    python -m benchmarks.rules tune   --batch 512 --steps 48 --trials 6
    python -m benchmarks.rules finals --batch 512 --steps 48 --seeds 3
    python -m benchmarks.rules ablate --batch 512 --steps 48 --trials 3
    python -m benchmarks.rules report

Each run is a ``natgrad train`` of its own, one thread, two at a time. A run that is
done is not repeated, so the script can be stopped at any moment, and pieces (data,
batch, ``--contenders``) can be run in any order: ``report`` tabulates what there is.

- ``tune``: each contender gets the same points of a Sobol sequence, mapped to ranges of
  its own for the learning rate and one other setting; whole schedules (cosine after a
  warmup of a twentieth), one seed. A run that diverges is a miss and counts as one.
- ``finals``: the best trial of each contender with fresh seeds, evaluated on the way.
- ``ablate``: `natgrad.Polar` with one ingredient exchanged, the learning rate tuned
  anew for each.

Seconds are the processor's: the machine may be shared.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import KEEP_MEMORY
from natgrad_lab.data import load
from natgrad_lab.errors import UserError
from natgrad_lab.report.summary import Summary, summarise

Range = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A method of the recipes, what is fixed of it, and what is tuned.

    ``tuned`` maps options to ranges, searched by their logarithm; an option that begins
    with ``1-`` is searched by the logarithm of what is missing to 1.
    """

    method: str
    tuned: Mapping[str, Range]
    fixed: Mapping[str, str] = field(default_factory=lambda: {})

    def settings(self, point: Sequence[float]) -> dict[str, float]:
        """The options at a point of the unit cube."""
        found: dict[str, float] = {}
        for (name, (low, high)), u in zip(self.tuned.items(), point, strict=False):
            value = math.exp(math.log(low) + u * (math.log(high) - math.log(low)))
            missing = name.startswith("1-")
            found[name.removeprefix("1-")] = 1 - value if missing else value
        return found


LR, DAMPING = "optimizer.lr", "curvature.damping"
MOMENTUM: dict[str, Range] = {"1-optimizer.momentum": (0.02, 0.2)}
TRUSTED: dict[str, Range] = {LR: (0.02, 0.4)}

CONTENDERS: dict[str, Contender] = {
    "sgd": Contender(method="sgd", tuned={LR: (0.05, 3.0), **MOMENTUM}),
    "lars": Contender(method="lars", tuned={**TRUSTED, **MOMENTUM}),
    "adamw": Contender(method="adamw", tuned={LR: (1e-3, 6e-2), **MOMENTUM}),
    "muon": Contender(
        method="muon", tuned={LR: (0.01, 0.5), "optimizer.rest-lr": (0.02, 1.0)}
    ),
    "muon+trust": Contender(method="muon_trust", tuned={**TRUSTED, **MOMENTUM}),
    "soap": Contender(method="soap", tuned={LR: (2e-3, 6e-2), **MOMENTUM}),
    "soap+trust": Contender(method="soap_trust", tuned={**TRUSTED, **MOMENTUM}),
    "shampoo": Contender(method="shampoo", tuned={LR: (0.05, 3.0), **MOMENTUM}),
    "kfac": Contender(method="kfac", tuned={LR: (0.05, 3.0), DAMPING: (1e-3, 1.0)}),
    "spngd": Contender(method="spngd", tuned={LR: (0.01, 0.5), DAMPING: (1e-3, 1.0)}),
    "polar": Contender(method="polar", tuned={**TRUSTED, DAMPING: (0.1, 10.0)}),
}

# Polar, spelled out as the options of SPNGD, and what each variant changes of it.
POLAR: dict[str, str] = {
    "optimizer.name": "spngd",
    "optimizer.average": "gradient",
    "optimizer.nesterov": "True",
    "curvature.statistics": "inputs",
    "curvature.scale": "orthogonal",
    "curvature.trust": "layer",
    "curvature.rest": "adaptive",
    "curvature.norm": "skip",
    "curvature.damping-style": "relative",
}
VARIANTS: dict[str, tuple[dict[str, str], Range]] = {
    "as it is": ({}, (0.05, 0.4)),
    "statistics: both": ({"curvature.statistics": "both"}, (0.05, 0.4)),
    "statistics: outputs": ({"curvature.statistics": "outputs"}, (0.05, 0.4)),
    "statistics: none (damping 1e6)": ({DAMPING: "1e6"}, (0.05, 0.4)),
    "scale: orthogonal, whitening full": ({"curvature.whitening": "full"}, (0.05, 0.4)),
    "scale: kronecker": ({"curvature.scale": "kronecker"}, (0.05, 0.4)),
    "scale: kronecker, statistics: both": (
        {"curvature.scale": "kronecker", "curvature.statistics": "both"},
        (0.05, 0.4),
    ),
    "scale: adaptive, statistics: both": (
        {
            "curvature.scale": "adaptive",
            "curvature.statistics": "both",
            DAMPING: "1e-3",
        },
        (0.05, 0.4),
    ),
    "scale: adaptive, statistics: both, basis: tracked": (
        {
            "curvature.scale": "adaptive",
            "curvature.statistics": "both",
            "curvature.basis": "tracked",
            DAMPING: "1e-3",
        },
        (0.05, 0.4),
    ),
    "scale: corrected, statistics: both": (
        {"curvature.scale": "corrected", "curvature.statistics": "both"},
        (0.05, 0.4),
    ),
    "trust: none": ({"curvature.trust": "none"}, (0.01, 1.0)),
    "momentum of the update": ({"optimizer.average": "update"}, (0.0025, 0.02)),
    "momentum 0.9": ({"optimizer.momentum": "0.9"}, (0.05, 0.4)),
    "no Nesterov": ({"optimizer.nesterov": "False"}, (0.05, 0.4)),
    "statistics every step": (
        {"refresh.statistics": "1", "refresh.inverses": "1"},
        (0.05, 0.4),
    ),
    "statistics every 20 steps": (
        {"refresh.statistics": "20", "refresh.inverses": "20"},
        (0.05, 0.4),
    ),
    "statistics of every 4th example": ({"curvature.subsample": "4"}, (0.05, 0.4)),
    "damping 0.1": ({DAMPING: "0.1"}, (0.05, 0.4)),
    "damping 10": ({DAMPING: "10"}, (0.05, 0.4)),
    "norms: plain gradient": ({"curvature.rest": "plain"}, (0.05, 0.4)),
    "norms: unit Fisher": ({"curvature.norm": "unit"}, (0.05, 0.4)),
}
ABLATIONS: dict[str, Contender] = {
    name: Contender(method="polar", tuned={LR: lrs}, fixed={**POLAR, **change})
    for name, (change, lrs) in VARIANTS.items()
}


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

    def command(self, method: str, seed: int, evaluations: int) -> list[str]:
        """What all runs have in common."""
        epochs = self.steps * self.batch / len(load(self.data_name).train)
        options = {
            "steps": self.steps,
            "batch": self.batch,
            "micro-batch": min(self.batch, 64 if self.data == "text" else 512),
            "seed": seed,
            "evaluate-every": epochs / evaluations,
            "checkpoint-every": 0,
            "model.name": self.model,
            "schedule.warmup-epochs": epochs / 20,
        }
        recipe = f"{self.data}-{method}-{256 if self.data == 'text' else 2048}"
        if self.data == "digits":
            recipe = f"digits-{method}"
        return [recipe, *flags(options)]

    @property
    def data_name(self) -> str:
        """As the loaders call it."""
        return "fashion_mnist" if self.data == "fashion" else self.data


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run and its command."""

    name: str
    command: list[str]


def flags(options: Mapping[str, Any]) -> list[str]:
    """Options as the command line has them."""
    found: list[str] = []
    for name, value in options.items():
        group, _, last = name.rpartition(".")
        if value in ("True", "False"):
            last = last if value == "True" else f"no-{last}"
            found.append(f"--{group}.{last}")
        else:
            found += [f"--{name}", str(value)]
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
                name=f"{setting.name}-{stage}-{slug(name)}-t{trial}of{trials}",
                command=[*command, *flags(contender.fixed), *flags(tuned)],
            )


def final_jobs(
    setting: Setting,
    contenders: Mapping[str, Contender],
    folder: Path,
    seeds: int,
    evaluations: int,
) -> Iterator[Job]:
    """The best trial of each contender with seeds that it was not chosen by."""
    for seed in range(1, seeds + 1):
        for name, contender in contenders.items():
            best = best_trial(folder, setting, "tune", name)
            if best is None:
                print(f"{name}: nothing tuned for {setting.name}, left out")
                continue
            command = setting.command(contender.method, seed, evaluations)
            yield Job(
                name=f"{setting.name}-final-{slug(name)}-r{seed}",
                command=[
                    *(*command, *flags(contender.fixed)),
                    *flags(settings_of(best, contender)),
                ],
            )


def settings_of(one: Summary, contender: Contender) -> dict[str, str]:
    """What a trial was given, from its place in the sequence."""
    trial, trials = map(int, one.name.rpartition("-t")[2].split("of"))
    point = points(len(contender.tuned), trials)[trial]
    return {k: f"{v:.4g}" for k, v in contender.settings(point).items()}


def trials_of(folder: Path, setting: Setting, stage: str, name: str) -> list[Summary]:
    """All finished runs of a contender."""
    found = folder.glob(f"{setting.name}-{stage}-{slug(name)}-[tr]*")
    return [one for one in map(finished, sorted(found)) if one is not None]


def finished(folder: Path) -> Summary | None:
    """A run that came to an end of any kind; None for one that was cut off."""
    try:
        one = summarise(folder)
    except UserError:
        return None
    return None if one.ending == "unfinished" else one


def score(one: Summary) -> float:
    """Higher is better: accuracy, or for text the negative loss; a miss is -inf."""
    tests = [r for r in one.records if r["kind"] == "test"]
    if one.ending != "done" or not tests or not math.isfinite(tests[-1]["loss"]):
        return -math.inf
    return -tests[-1]["loss"] if "text-" in one.name[:5] else tests[-1]["accuracy"]


def best_trial(folder: Path, setting: Setting, stage: str, name: str) -> Summary | None:
    """None if no trial came to its end."""
    trials = [
        x for x in trials_of(folder, setting, stage, name) if score(x) > -math.inf
    ]
    return max(trials, key=score, default=None)


def run(job: Job, folder: Path) -> None:
    """Train, unless that is done; one that was cut off begins anew."""
    out = folder / job.name
    if out.is_dir():
        if finished(out) is not None:
            return
        shutil.rmtree(out)
    command = [sys.executable, "-m", "natgrad_lab", "train", *job.command]
    command += ["--threads", "1", "--out", str(out)]
    environment = {**os.environ, **KEEP_MEMORY, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    # A run that diverged is a result: a miss.
    if done.returncode not in (0, 3):
        print(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}", flush=True)
        return
    one = finished(out)
    print(f"{job.name}: {one and round(score(one), 3)}", flush=True)


def chosen(
    names: Sequence[str], known: Mapping[str, Contender]
) -> dict[str, Contender]:
    """The named ones; all if none is named."""
    unknown = set(names) - set(known)
    if unknown:
        raise SystemExit(
            f"Invalid contenders {sorted(unknown)}. Must be in {[*known]}."
        )
    return {name: known[name] for name in names or known}


def jobs_of(options: argparse.Namespace, setting: Setting) -> Iterator[Job]:
    """What a command asks for."""
    known = ABLATIONS if options.what == "ablate" else CONTENDERS
    contenders = chosen(options.contenders, known)
    if options.what == "finals":
        yield from final_jobs(
            setting, contenders, options.runs, options.seeds, options.evaluations
        )
    else:
        stage = {"tune": "tune", "ablate": "ablate"}[options.what]
        yield from tuning_jobs(setting, contenders, stage, options.trials)


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("tune", "finals", "ablate", "report"))
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--model", default="", help="resnet8, or gpt for text")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--contenders", nargs="*", default=[])
    parser.add_argument("--trials", type=int, default=6)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--evaluations", type=int, default=8)
    parser.add_argument("--runs", type=Path, default=Path("runs/rules"))
    parser.add_argument("--parallel", type=int, default=2)
    return parser.parse_args()


def main() -> None:
    """See the module."""
    options = parsed()
    if options.what != "report":
        setting = Setting(
            data=options.data,
            model=options.model or ("gpt" if options.data == "text" else "resnet8"),
            batch=options.batch,
            steps=options.steps,
        )
        options.runs.mkdir(parents=True, exist_ok=True)
        jobs = list(jobs_of(options, setting))
        with ThreadPoolExecutor(options.parallel) as pool:
            list(pool.map(lambda job: run(job, options.runs), jobs))
    from benchmarks.rules_report import write

    write(options.runs)


if __name__ == "__main__":
    main()
