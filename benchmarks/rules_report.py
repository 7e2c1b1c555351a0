"""Tables and the figure of `benchmarks.rules`, from the runs that there are."""

from __future__ import annotations

import math
import os
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.comparison import cpu_name
from benchmarks.figures import accuracy_figure
from benchmarks.rules import (
    ABLATIONS,
    CONTENDERS,
    Contender,
    Setting,
    best_trial,
    score,
    settings_of,
    trials_of,
)
from natgrad_lab.report.summary import Summary

RESULTS = Path(__file__).parent / "results"
NAMES = re.compile(r"(\w+)-(\w+)-b(\d+)-s(\d+)-(tune|final|ablate)-")


def settings_in(folder: Path) -> list[Setting]:
    """Everything that runs of a folder compete on, in order of size."""
    found = {m.groups()[:4] for p in folder.iterdir() if (m := NAMES.match(p.name))}
    settings = [
        Setting(data=data, model=model, batch=int(batch), steps=int(steps))
        for data, model, batch, steps in found
    ]
    return sorted(settings, key=lambda s: (s.data, s.model, s.batch, s.steps))


def last_test(one: Summary) -> dict[str, Any]:
    """The record of the last evaluation."""
    return [r for r in one.records if r["kind"] == "test"][-1]


def tuning_table(
    folder: Path, setting: Setting, contenders: Mapping[str, Contender], stage: str
) -> Iterator[str]:
    """The best trial of each, and how many were misses."""
    rows: list[tuple[float, str]] = []
    for name, contender in contenders.items():
        trials = trials_of(folder, setting, stage, name)
        if not trials:
            continue
        missed = sum(score(x) == -math.inf for x in trials)
        count = f"{len(trials)}" + (f" ({missed} missed)" if missed else "")
        best = best_trial(folder, setting, stage, name)
        if best is None:
            rows.append((-math.inf, f"| {name} | - | - | - | {count} | |\n"))
            continue
        test, given = last_test(best), settings_of(best, contender)
        said = ", ".join(f"{k.rpartition('.')[2]} {v}" for k, v in given.items())
        row = f"| {name} | {test['accuracy']:.1f} | {test['loss']:.3f} "
        row += f"| {best.cpu_seconds:.0f} | {count} | {said} |\n"
        rows.append((score(best), row))
    if rows:
        what = "variant" if stage == "ablate" else "rule"
        yield f"\n| {what} | best % | its loss | CPU s | trials | settings |\n"
        yield "|---|---|---|---|---|---|\n"
        order = rows if stage == "ablate" else sorted(rows, key=lambda r: -r[0])
        yield from (row for _, row in order)


def common_target(finals: Mapping[str, Sequence[Summary]]) -> float:
    """The highest whole accuracy that half of the rules reach with every seed."""
    least = [min(x.best or 0.0 for x in runs) for runs in finals.values()]
    return float(math.floor(statistics.median_high(least)))


def finals_table(folder: Path, setting: Setting) -> Iterator[str]:
    """Means over seeds, their range, and steps and seconds to a common accuracy."""
    finals = {name: trials_of(folder, setting, "final", name) for name in CONTENDERS}
    finals = {name: runs for name, runs in finals.items() if runs}
    if not finals:
        return
    target = common_target(finals)
    yield "\nThe best settings with fresh seeds. Steps and CPU seconds are those to "
    yield f"{target:g}%, as the mean of the seeds that reach it:\n\n"
    yield "| rule | last %, mean (range) | loss | steps | CPU s | seeds that reach it "
    yield "| CPU ms a step |\n|---|---|---|---|---|---|---|\n"
    rows = [(_final_row(name, runs, target)) for name, runs in finals.items()]
    yield from (row for _, row in sorted(rows, key=lambda r: -r[0]))


def _final_row(name: str, runs: Sequence[Summary], target: float) -> tuple[float, str]:
    done = [x for x in runs if score(x) > -math.inf]
    reached = [r for x in done if (r := _first(x, target)) is not None]
    mean = (
        {k: statistics.mean(r[k] for r in reached) for k in ("step", "cpu_seconds")}
        if reached
        else {}
    )
    steps = f"{mean['step']:.0f} | {mean['cpu_seconds']:.0f}" if mean else "- | -"
    last = [last_test(x)["accuracy"] for x in done] or [0.0]
    loss = statistics.mean([last_test(x)["loss"] for x in done] or [math.nan])
    each = statistics.mean(1000 * x.cpu_seconds / max(1, x.steps) for x in runs)
    text = (
        f"| {name} | {statistics.mean(last):.1f} ({min(last):.1f} to {max(last):.1f}) "
    )
    text += f"| {loss:.3f} | {steps} | {len(reached)} of {len(runs)} | {each:.0f} |\n"
    order = -loss if "text-" in runs[0].name[:5] else statistics.mean(last)
    return order, text


def _first(one: Summary, target: float) -> dict[str, Any] | None:
    tests = (r for r in one.records if r["kind"] == "test")
    return next((r for r in tests if r["accuracy"] >= target), None)


def curves(
    folder: Path, setting: Setting
) -> dict[str, tuple[list[float], list[float]]]:
    """Mean accuracy against steps of the finals, by rule."""
    found: dict[str, tuple[list[float], list[float]]] = {}
    for name in CONTENDERS:
        runs = trials_of(folder, setting, "final", name)
        tests = [[r for r in x.records if r["kind"] == "test"] for x in runs]
        if tests and len({len(t) for t in tests}) == 1:
            steps = [float(r["step"]) for r in tests[0]]
            columns = zip(*tests, strict=True)
            means = [statistics.mean(r["accuracy"] for r in c) for c in columns]
            found[name] = (steps, means)
    return found


def write(folder: Path, results: Path = RESULTS) -> None:
    """Tabulate a folder of runs into ``rules.md`` and ``rules.png``."""
    text = ["# Update rules, tuned with equal budgets\n\n"]
    text += ["Made by `python -m benchmarks.rules`; its header says how.\n"]
    text += [f"torch {torch.__version__}, one thread a run, {os.cpu_count()} cores of "]
    text += [f"{cpu_name()}.\n"]
    panels: dict[str, Any] = {}
    for setting in settings_in(folder):
        title = f"{setting.data}, {setting.model}, batch {setting.batch:,}, "
        title += f"{setting.steps} steps"
        text += [f"\n## {title}\n", *finals_table(folder, setting)]
        text += tuning_table(folder, setting, CONTENDERS, "tune")
        ablations = [*tuning_table(folder, setting, ABLATIONS, "ablate")]
        text += (
            ["\nPolar with one ingredient exchanged:\n", *ablations]
            if ablations
            else []
        )
        if found := curves(folder, setting):
            panels[title] = found
    results.mkdir(exist_ok=True)
    (results / "rules.md").write_text("".join(text))
    if panels:
        accuracy_figure(panels, results / "rules.png")
    print("".join(text))
