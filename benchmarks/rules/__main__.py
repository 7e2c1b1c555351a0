"""Tune update rules with equal budgets and compare the best of each.

    python -m benchmarks.rules tune   --batch 512 --steps 48 --trials 6
    python -m benchmarks.rules finals --batch 512 --steps 48 --seeds 3
    python -m benchmarks.rules ablate --batch 512 --steps 48 --trials 3
    python -m benchmarks.rules report

Each run is a ``natgrad train`` of its own, one thread, two at a time. What it came to
is appended to ``results/rules.jsonl``, and a run that is there is not repeated: the
script can be stopped at any moment and gone on with in any clone, and pieces (data,
batch, ``--contenders``) can be run in any order. ``report`` tabulates what there is.

- ``tune``: each contender gets the same points of a Sobol sequence (of its dimension),
  mapped to ranges of its own for the learning rate and, unless its name says
  otherwise, one other setting; whole schedules (cosine after a warmup of a twentieth),
  one seed. A run that diverges is a miss and counts as one.
- ``finals``: the best trial of each contender, by test accuracy, with fresh seeds;
  ``--tuned-model`` and ``--tuned-steps`` take the trials of
  another model or another number of steps. A schedule that is cut short is no whole
  one, so steps to a target are those of the shortest whole schedule that reaches it.
- ``ablate``: `natgrad.Polar` with one ingredient exchanged, the learning rate tuned
  again for each.

Seconds are the processor's: the machine may be shared.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

from benchmarks.common import KEEP_MEMORY
from benchmarks.rules.contenders import ABLATIONS, CONTENDERS, Contender
from benchmarks.rules.jobs import Job, Setting, final_jobs, tuning_jobs
from benchmarks.rules.outcomes import (
    Outcome,
    append_outcome,
    read_outcomes,
    read_run,
)
from benchmarks.rules.report import LEDGER, write

_appending = Lock()


def run(job: Job, runs: Path, ledger: Path) -> None:
    """Train and note the outcome; a folder that was cut off begins again."""
    out = runs / job.name
    if out.is_dir():
        shutil.rmtree(out)
    command = [sys.executable, "-m", "natgrad_lab", "train", *job.command]
    command += ["--threads", "1", "--out", str(out)]
    environment = {**os.environ, **KEEP_MEMORY, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    one = read_run(out, job.settings, shlex.join(job.command))
    # A run that diverged is a result: a miss.
    if done.returncode not in (0, 3) or one is None:
        print(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}", flush=True)
        return
    with _appending:
        append_outcome(ledger, one)
    print(f"{job.name}: {one.score:.3f}, {one.cpu_seconds:.0f} s", flush=True)


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
    contenders = chosen(
        options.contenders, ABLATIONS if options.what == "ablate" else CONTENDERS
    )
    if options.what == "finals":
        known = read_outcomes(options.ledger)
        return final_jobs(
            setting,
            contenders,
            known,
            options.seeds,
            options.evaluations,
            dataclasses.replace(
                setting,
                model=options.tuned_model or setting.model,
                steps=options.tuned_steps or setting.steps,
            ),
        )
    return tuning_jobs(setting, contenders, options.what, options.trials)


def to_do(jobs: Sequence[Job], known: Mapping[str, Outcome]) -> list[Job]:
    """The jobs that no outcome is known of."""
    for job in jobs:
        one = known.get(job.name)
        if one is None:
            continue
        for was, now in (
            (dict(one.settings), dict(job.settings)),
            (one.command, shlex.join(job.command)),
        ):
            if was and was != now:
                raise SystemExit(
                    f"{job.name} was run with {was}, and would be now with {now}: "
                    "take its line out of the ledger first."
                )
    return [job for job in jobs if job.name not in known]


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("tune", "finals", "ablate", "report"))
    parser.add_argument("--data", default="cifar10")
    parser.add_argument(
        "--model", default="", help="resnet8 (w8: of width 8), gpt for text"
    )
    parser.add_argument(
        "--tuned-model", default="", help="finals: the model that trials were run with"
    )
    parser.add_argument(
        "--tuned-steps", type=int, default=0, help="finals: the steps that trials had"
    )
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--contenders", nargs="*", default=[])
    parser.add_argument("--trials", type=int, default=6)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--evaluations", type=int, default=1)
    parser.add_argument("--runs", type=Path, default=Path("runs/rules"))
    parser.add_argument("--ledger", type=Path, default=LEDGER)
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
        jobs = to_do([*jobs_of(options, setting)], read_outcomes(options.ledger))
        print(f"{len(jobs)} runs to go.", flush=True)
        with ThreadPoolExecutor(options.parallel) as pool:
            list(pool.map(lambda job: run(job, options.runs, options.ledger), jobs))
    write(options.ledger, options.ledger.parent)


if __name__ == "__main__":
    main()
