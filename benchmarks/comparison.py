"""Train the methods of the comparison and the papers' ablations, and tabulate them.

    python -m benchmarks.comparison methods  --runs runs/comparison
    python -m benchmarks.comparison papers   --runs runs/comparison
    python -m benchmarks.comparison schemes  --runs runs/comparison
    python -m benchmarks.comparison claims   --runs runs/comparison
    python -m benchmarks.comparison grid     --runs runs/comparison
    python -m benchmarks.comparison cifar    --runs runs/comparison
    python -m benchmarks.comparison details  --runs runs/comparison

Each run is a ``natgrad train`` of its own, one thread, two at a time. A run that is
done is not trained again and one that was interrupted is resumed, so the script can be
stopped at any moment. Tables go to ``benchmarks/results``, with the command of each row
below them.

- ``methods``: Fashion-MNIST and CIFAR-10 with a ResNet-8 at batches 128 and 2,048,
  every method with the settings of its recipe, which nobody has tuned.
- ``papers``: on digits, three seeds: empirical against sampled Fisher, unit against
  full against diagonal BN, stale against fresh statistics (Osawa et al. 2020), inverse
  against eigendecomposition at three batch sizes (Pauloski et al. 2020, Table I), and
  sub-sampled statistics.
- ``schemes``: parts of Osawa et al.'s training scheme on digits, three seeds: the two
  readings of running mixup, and the damping of batch norm (rho).
- ``claims``: the papers' claims about whole trainings (`benchmarks.claims`), on digits,
  three seeds; ``grid``: two forms of damping on a grid of settings, one seed;
  ``cifar``: some of the claims on CIFAR-10, one seed, and two rows with three;
  ``details``: what approximations of the Fisher cost and lose, and the initial weights
  of batch norm, on digits, three seeds.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch

from benchmarks.claims import CIFAR, CIFAR_SEEDS, CLAIMS, DETAILS, GRID
from benchmarks.common import KEEP_MEMORY
from natgrad_lab.data import load
from natgrad_lab.errors import UserError
from natgrad_lab.report.summary import Summary, summarise

RESULTS = Path(__file__).parent / "results"
METHODS = ("sgd", "adamw", "muon", "soap", "shampoo", "kfac", "spngd")
# by data set and batch size: epochs, evaluations, common accuracy in %
SCHEDULES = {
    ("cifar10", 128): (1.0, 4, 45.0),
    ("cifar10", 2048): (1.0, 4, 30.0),
    ("fashion", 128): (0.5, 4, 80.0),
    ("fashion", 2048): (1.0, 4, 70.0),
}
SEEDS = (0, 1, 2)
ENVIRONMENT = {**KEEP_MEMORY, "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run: its group in the tables, its row there, and its command."""

    group: str
    row: str
    name: str
    command: tuple[str, ...]

    @property
    def words(self) -> tuple[str, ...]:
        """What follows ``natgrad train`` when it is trained from the start."""
        return (*self.command, "--threads", "1")


def method_jobs() -> Iterator[Job]:
    """Every method on both data sets at both batch sizes."""
    for (data, batch), (epochs, evaluations, target) in SCHEDULES.items():
        for method in METHODS:
            name = f"{data}-{method}-{batch}"
            yield Job(
                group=f"{data}, batch {batch}, {epochs:g} epochs",
                row=method,
                name=name,
                command=(
                    name,
                    *("--epochs", str(epochs)),
                    *("--evaluate-every", str(epochs / evaluations)),
                    *("--targets", str(target)),
                ),
            )


PAPERS: dict[str, dict[str, tuple[str, ...]]] = {
    "SP-NGD on digits: Fisher": {
        "empirical": ("digits-spngd",),
        "sampled": ("digits-spngd", "--curvature.fisher", "sampled"),
    },
    "SP-NGD on digits: batch norm": {
        "unit": ("digits-spngd", "--curvature.norm", "unit"),
        "full": ("digits-spngd", "--curvature.norm", "full"),
        "diag": ("digits-spngd", "--curvature.norm", "diag"),
        "skip": ("digits-spngd", "--curvature.norm", "skip"),
    },
    "SP-NGD on digits: staleness": {
        "fresh": ("digits-spngd", "--refresh.kind", "every"),
        "stale, tolerance 0.1": ("digits-spngd", "--refresh.kind", "adaptive"),
        "stale, tolerance 0.5": (
            *("digits-spngd", "--refresh.kind", "adaptive"),
            *("--refresh.tolerance", "0.5"),
        ),
    },
    "SP-NGD on digits: examples used for statistics": {
        "all": ("digits-spngd", "--refresh.kind", "every"),
        **{
            f"every {k}th": (
                *("digits-spngd", "--refresh.kind", "every"),
                *("--curvature.subsample", str(k)),
            )
            for k in (4, 8)
        },
    },
    **{
        f"K-FAC on digits, batch {batch}": {
            "SGD": ("digits-sgd", "--batch", str(batch)),
            "K-FAC, inverse": (
                *("digits-kfac", "--batch", str(batch)),
                *("--curvature.style", "factored"),
            ),
            "K-FAC, eigendecomposition": (
                *("digits-kfac", "--batch", str(batch)),
                *("--curvature.style", "eigen"),
            ),
        }
        for batch in (128, 256, 512)
    },
}


ERASED = ("digits-spngd", "--epochs", "24", "--data.erasing", "0.5")
MIXED = (*ERASED, "--data.mixup", "0.4")
SCHEMES: dict[str, dict[str, tuple[str, ...]]] = {
    "SP-NGD on digits, 24 epochs, erasing: running mixup": {
        "none": ERASED,
        "one lambda a step": (*MIXED, "--data.mixup-kind", "step"),
        "one lambda an image": (*MIXED, "--data.mixup-kind", "image"),
    },
    "SP-NGD on digits, 24 epochs, erasing, mixup by image: damping of batch norm": {
        "rho 1": (*MIXED, "--data.mixup-kind", "image"),
        "rho 16": (
            *(*MIXED, "--data.mixup-kind", "image"),
            *("--curvature.norm-damping-ratio", "16"),
        ),
    },
}


def scheme_jobs() -> Iterator[Job]:
    """Every part of a scheme with every seed."""
    return paper_jobs(SCHEMES)


def paper_jobs(
    groups: dict[str, dict[str, tuple[str, ...]]] = PAPERS,
    seeds: tuple[int, ...] = SEEDS,
) -> Iterator[Job]:
    """Every ablation with every seed."""
    for group, rows in groups.items():
        for row, command in rows.items():
            for seed in seeds:
                slug = "-".join(command).replace("--", "").replace(".", "-")
                yield Job(
                    group=group,
                    row=row,
                    name=f"{slug}-seed{seed}",
                    command=(*command, "--seed", str(seed)),
                )


JOBS = {
    "methods": method_jobs,
    "papers": paper_jobs,
    "schemes": scheme_jobs,
    "claims": lambda: paper_jobs(CLAIMS),
    "details": lambda: paper_jobs(DETAILS),
    "grid": lambda: paper_jobs(GRID, SEEDS[:1]),
    "cifar": lambda: chain(
        paper_jobs(CIFAR, SEEDS[:1]), paper_jobs(CIFAR_SEEDS, SEEDS)
    ),
}


def run(job: Job, folder: Path) -> None:
    """Train, resume, or leave alone what is done."""
    out = folder / job.name
    if (ending := _ending(out)) in ("done", "diverged"):
        return
    if ending is None and out.is_dir():
        shutil.rmtree(out)  # cut off before it had anything to go on from
    resume = ("--resume", str(out))
    fresh = (*job.words, "--out", str(out))
    command = [sys.executable, "-m", "natgrad_lab", "train"]
    command += resume if out.is_dir() else fresh
    environment = {**os.environ, **ENVIRONMENT}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    # A run that diverged or broke down is a result; the others go on.
    if done.returncode not in (0, 3):
        print(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}", flush=True)
    print(f"{job.name}: {summarise(out).best} %", flush=True)


def _ending(out: Path) -> str | None:
    """How a run ended; None if it has no record."""
    try:
        return summarise(out).ending
    except UserError:
        return None


def method_table(jobs: Sequence[Job], folder: Path) -> Iterator[str]:
    """Steps and seconds to a common accuracy, and the last accuracy, by group."""
    for group in dict.fromkeys(job.group for job in jobs):
        mine = [job for job in jobs if job.group == group]
        found = {job.row: summarise(folder / job.name) for job in mine}
        target = next(iter(next(iter(found.values())).reached))
        yield f"\n### {group}\n\n| method | steps to {target:g}% "
        yield f"| CPU s to {target:g}% "
        yield "| best % | last % | steps | CPU ms a step | refreshed | waiting |\n"
        yield "|---|---|---|---|---|---|---|---|---|\n"
        for row, one in found.items():
            accuracies = f"{_number(one.best, 1)} | {_number(one.last, 1)}"
            yield f"| {row} | {_reached(one)} | {accuracies} | {one.steps} "
            share = "" if one.reduction is None else f"{100 * one.reduction:.0f}%"
            ending = "" if one.ending == "done" else f" ({one.ending})"
            yield f"| {_cpu_milliseconds(one):.0f} | {share} "
            yield f"| {100 * one.waiting:.1f}%{ending} |\n"
        yield from commands(mine)


def paper_table(jobs: Sequence[Job], folder: Path) -> Iterator[str]:
    """Means over seeds, with the range of the accuracies."""
    for group in dict.fromkeys(job.group for job in jobs):
        first = next(job for job in jobs if job.group == group)
        target = next(iter(summarise(folder / first.name).reached))
        yield f"\n### {group}\n\n| | best %, mean (least to most) | last %, the same "
        yield f"| steps to {target:g}% | CPU ms a step | refreshed |\n"
        yield "|---|---|---|---|---|---|\n"
        for row in dict.fromkeys(job.row for job in jobs if job.group == group):
            mine = [j for j in jobs if (j.group, j.row) == (group, row)]
            runs = [summarise(folder / job.name) for job in mine]
            best = [one.best or 0.0 for one in runs]
            last = [one.last or 0.0 for one in runs]
            steps = [r.step for one in runs for r in one.reached.values() if r]
            missed = len(runs) - len(steps)
            took = f"{statistics.mean(steps):.0f}" if steps else "-"
            took += f" ({missed} missed)" if missed else ""
            shares = [one.reduction for one in runs if one.reduction is not None]
            share = f"{100 * statistics.mean(shares):.0f}%" if shares else ""
            mean = statistics.mean(_cpu_milliseconds(one) for one in runs)
            yield f"| {row} | {_spread(best)} | {_spread(last)} | {took} "
            yield f"| {mean:.0f} | {share} |\n"
        yield from commands([job for job in jobs if job.group == group])


def commands(jobs: Sequence[Job]) -> Iterator[str]:
    """A command for each row of one table; with several seeds, the first one's."""
    yield "\n```console\n"
    for row in dict.fromkeys(job.row for job in jobs):
        first, *others = [job for job in jobs if job.row == row]
        seeds = ", ".join(job.command[-1] for job in others)
        note = f"  # and --seed {seeds}" if others else ""
        yield f"{shlex.join(['natgrad', 'train', *first.words])}{note}\n"
    yield "```\n"


def _spread(values: Sequence[float]) -> str:
    mean = f"{statistics.mean(values):.2f}"
    return f"{mean} ({min(values):.2f} to {max(values):.2f})" if values[1:] else mean


def _reached(one: Summary) -> str:
    reached = next(iter(one.reached.values()))
    return f"{reached.step} | {reached.cpu_seconds:.0f}" if reached else "- | -"


def _cpu_milliseconds(one: Summary) -> float:
    return 1000 * one.cpu_seconds / max(1, one.steps)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def heading(what: str, notes: Sequence[str]) -> str:
    """What was run, and on what."""
    lines = [f"# benchmarks.comparison {what}", "", *notes]
    lines += [f"torch {torch.__version__}, {os.cpu_count()} cores of {cpu_name()}.", ""]
    return "\n".join(lines)


def cpu_name() -> str:
    """The processor, as the system calls it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    return names[0] if names else platform.processor()


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=tuple(JOBS))
    parser.add_argument("--runs", type=Path, default=Path("runs/comparison"))
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument(
        "--table", action="store_true", help="of the runs that are done: train nothing"
    )
    chosen = parser.parse_args()
    chosen.runs.mkdir(parents=True, exist_ok=True)
    methods = chosen.what == "methods"
    jobs = planned = [*JOBS[chosen.what]()]
    if chosen.table:
        ends = ("done", "diverged")
        jobs = [job for job in planned if _ending(chosen.runs / job.name) in ends]
    else:
        with ThreadPoolExecutor(chosen.parallel) as pool:
            list(pool.map(lambda job: run(job, chosen.runs), jobs))
    notes = [
        "One thread a run; seconds are the processor's and of training only;",
        "`waiting` is the share of the time that a step waits for the loader.",
        f"Environment: {' '.join(f'{k}={v}' for k, v in ENVIRONMENT.items())}",
    ]
    if len(jobs) < len(planned):
        done, of = (len({job.name for job in some}) for some in (jobs, planned))
        notes.append(f"{done} of {of} runs, of which some are in several tables.")
    if methods:
        notes.append("One seed, the recipes' settings, which nobody has tuned.")
    else:
        seeds = sorted({int(job.command[-1]) for job in jobs})
        notes.append(f"Seeds: {', '.join(map(str, seeds))}.")
    if methods or chosen.what == "cifar":
        notes.append(str(load("cifar10").note))
    table = method_table if methods else paper_table
    text = heading(chosen.what, notes) + "".join(table(jobs, chosen.runs))
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"comparison_{chosen.what}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
