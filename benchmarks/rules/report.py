"""Tables and the figure of `benchmarks.rules`, from the outcomes that there are."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.comparison import cpu_name
from benchmarks.figures import accuracy_figure
from benchmarks.rules.contenders import ABLATIONS, CONTENDERS, Contender
from benchmarks.rules.jobs import Setting, best_trial, settings_in, trials_of
from benchmarks.rules.outcomes import Outcome, read_outcomes

RESULTS = Path(__file__).parents[1] / "results"
LEDGER = RESULTS / "rules.jsonl"
DEFAULTS = "polar, only lr tuned"
POLARS = [name for name in CONTENDERS if name.startswith("polar")]
Known = Mapping[str, Outcome]
Curves = dict[str, tuple[list[float], list[float]]]


def tuning_table(
    known: Known, setting: Setting, contenders: Mapping[str, Contender], stage: str
) -> Iterator[str]:
    """The best trial of each, how many were misses, and all scores by rank."""
    rows: list[tuple[float, str]] = []
    for name in contenders:
        trials = trials_of(known, setting, stage, name)
        if not trials:
            continue
        missed = sum(x.missed for x in trials)
        count = f"{len(trials)}" + (f" ({missed} missed)" if missed else "")
        best = best_trial(known, setting, stage, name)
        if best is None:
            rows.append((-math.inf, f"| {name} | - | - | - | - | {count} | |\n"))
            continue
        test = best.tests[-1]
        middle = statistics.median_low(x.score for x in trials)
        median = said(setting, middle) if math.isfinite(middle) else "-"
        options = ", ".join(
            f"{k.rpartition('.')[2]} {v}" for k, v in best.settings.items()
        )
        row = f"| {name} | {test.accuracy:.1f} | {test.loss:.3f} | {median} "
        row += f"| {best.cpu_seconds:.0f} | {count} | {options} |\n"
        rows.append((best.score, row))
    if rows:
        what = "variant" if stage == "ablate" else "rule"
        yield f"\n| {what} | best % | its loss | median trial | CPU s | trials "
        yield "| settings |\n|---|---|---|---|---|---|---|\n"
        order = rows if stage == "ablate" else sorted(rows, key=lambda r: -r[0])
        yield from (row for _, row in order)


def overview_table(known: Known, settings: Sequence[Setting]) -> Iterator[str]:
    """The best trial of each rule by setting; the best of a setting is bold."""
    tuned = {
        setting: {
            name: best.score
            for name in CONTENDERS
            if (best := best_trial(known, setting, "tune", name)) is not None
        }
        for setting in settings
    }
    tuned = {setting: scores for setting, scores in tuned.items() if scores}
    yield "\n| rule |" + "".join(f" {s.title} |" for s in tuned) + "\n"
    yield "|---" * (len(tuned) + 1) + "|\n"
    for name in CONTENDERS:
        if any(name in scores for scores in tuned.values()):
            cells = [_cell(name, s, scores) for s, scores in tuned.items()]
            yield f"| {name} | " + " | ".join(cells) + " |\n"


def _cell(name: str, setting: Setting, scores: Mapping[str, float]) -> str:
    if name not in scores:
        return "-"
    text = said(setting, scores[name])
    return f"**{text}**" if scores[name] == max(scores.values()) else text


def said(setting: Setting, score: float) -> str:
    """A score as accuracy in %, or as the loss for text."""
    return f"{-score:.3f}" if setting.data == "text" else f"{score:.1f}"


def defaults_table(known: Known, settings: Sequence[Setting]) -> Iterator[str]:
    """How near Polar is to its tuned best when its learning rate alone is tuned."""
    yield "\n| setting | only lr tuned | its lr | best of all Polars | which | behind "
    yield "|\n|---|---|---|---|---|---|\n"
    for setting in settings:
        own = best_trial(known, setting, "tune", DEFAULTS)
        if own is None:
            continue
        others = {DEFAULTS: own}
        for stage, names in (("tune", POLARS), ("ablate", ABLATIONS)):
            for name in names:
                if (best := best_trial(known, setting, stage, name)) is not None:
                    others[name] = best
        name = max(others, key=lambda n: others[n].score)
        top = others[name].score
        behind = (top - own.score) / abs(top)
        lr = own.settings["optimizer.lr"]
        yield f"| {setting.title} | {said(setting, own.score)} | {lr} "
        yield f"| {said(setting, top)} | {name} | {behind:.1%} |\n"


def common_targets(finals: Mapping[str, Sequence[Outcome]]) -> list[float]:
    """The highest whole accuracies that all rules, and that half of them, reach.

    With every seed; one if they are the same.
    """
    least = [
        min(max((t.accuracy for t in x.tests), default=0.0) for x in runs)
        for runs in finals.values()
    ]
    return sorted(
        {float(math.floor(x)) for x in (min(least), statistics.median_high(least))}
    )


def finals_of(known: Known, setting: Setting) -> dict[str, list[Outcome]]:
    """The runs with fresh seeds, by rule."""
    finals = {name: trials_of(known, setting, "final", name) for name in CONTENDERS}
    return {name: runs for name, runs in finals.items() if runs}


def finals_table(known: Known, setting: Setting) -> Iterator[str]:
    """Means over seeds, their range, and steps and seconds to a common accuracy."""
    finals = finals_of(known, setting)
    if not finals:
        return
    targets = common_targets(finals)
    yield "\nThe best settings with fresh seeds. Steps and CPU seconds are those to an "
    yield "accuracy, as the mean of the seeds that reach it, and how many do:\n\n"
    yield "| rule | last %, mean (range) | loss "
    yield "".join(f"| steps to {x:g}% | CPU s to {x:g}% | seeds " for x in targets)
    yield "| CPU ms a step |\n" + "|---" * (4 + 3 * len(targets)) + "|\n"
    rows = [_final_row(name, runs, targets) for name, runs in finals.items()]
    yield from (row for _, row in sorted(rows, key=lambda r: -r[0]))


def _final_row(
    name: str, runs: Sequence[Outcome], targets: Sequence[float]
) -> tuple[float, str]:
    done = [x for x in runs if not x.missed]
    last = [x.tests[-1].accuracy for x in done] or [math.nan]
    loss = statistics.mean([x.tests[-1].loss for x in done] or [math.nan])
    missed = f", {len(runs) - len(done)} missed" if len(done) < len(runs) else ""
    each = statistics.mean(1000 * x.cpu_seconds / max(1, x.steps) for x in runs)
    text = f"| {name} | {statistics.mean(last):.1f} "
    text += f"({min(last):.1f} to {max(last):.1f}{missed}) | {loss:.3f} "
    text += "".join(f"| {_reached(runs, target)} " for target in targets)
    return statistics.mean(x.score for x in runs), f"{text}| {each:.0f} |\n"


def _reached(runs: Sequence[Outcome], target: float) -> str:
    found = [t for x in runs if not x.missed and (t := x.first_at(target)) is not None]
    count = f"{len(found)} of {len(runs)}"
    if not found:
        return f"- | - | {count}"
    seconds = statistics.mean(t.cpu_seconds for t in found)
    return f"{statistics.mean(t.step for t in found):.0f} | {seconds:.0f} | {count}"


def schedules_table(known: Known, settings: Sequence[Setting]) -> Iterator[str]:
    """Where whole schedules of several lengths end, and the shortest to a target.

    ``settings`` differ in steps alone. The target is the best that a rule that is not
    ours comes to with the longest.
    """
    ends = {s.steps: _mean_ends(finals_of(known, s)) for s in settings}
    ends = {steps: found for steps, found in ends.items() if found}
    longest = max(ends, default=0)
    rivals = [x for name, (x, _) in ends.get(longest, {}).items() if not _own(name)]
    if len(ends) < 2 or not rivals:
        return
    target = math.floor(10 * max(rivals)) / 10
    yield "| rule |" + "".join(f" {steps} steps |" for steps in ends)
    yield f" steps to {target:.1f}% | CPU s to it |\n" + "|---" * (len(ends) + 3)
    yield "|\n"
    for name in sorted(ends[longest], key=lambda n: -ends[longest][n][0]):
        row = {steps: found[name] for steps, found in ends.items() if name in found}
        cells = [f"{row[steps][0]:.1f}" if steps in row else "-" for steps in ends]
        first = next((n for n, (x, _) in row.items() if x >= target), None)
        cells += [f"{first}", f"{row[first][1]:.0f}"] if first else ["-", "-"]
        yield f"| {name} | " + " | ".join(cells) + " |\n"


def _own(name: str) -> bool:
    return name.startswith(("polar", "kfac", "spngd"))


def _mean_ends(
    finals: Mapping[str, Sequence[Outcome]],
) -> dict[str, tuple[float, float]]:
    """Mean last accuracy and processor seconds over seeds; not where one missed."""
    return {
        name: (
            statistics.mean(x.tests[-1].accuracy for x in runs),
            statistics.mean(x.cpu_seconds for x in runs),
        )
        for name, runs in finals.items()
        if not any(x.missed for x in runs)
    }


def curves(known: Known, setting: Setting) -> Curves:
    """Mean accuracy against steps of the finals that came to their end, by rule."""
    found: Curves = {}
    for name, runs in finals_of(known, setting).items():
        if done := [x for x in runs if not x.missed]:
            steps = [float(t.step) for t in done[0].tests]
            columns = zip(*(x.tests for x in done), strict=True)
            means = [statistics.mean(t.accuracy for t in c) for c in columns]
            found[name] = (steps, means)
    return found


def write(ledger: Path, results: Path) -> None:
    """Tabulate a file of outcomes into ``rules.md`` and ``rules.png``."""
    known = read_outcomes(ledger)
    text = ["# Update rules, tuned with equal budgets\n\n"]
    text += ["Made by `python -m benchmarks.rules`; its header says how.\n"]
    text += [f"torch {torch.__version__}, one thread a run, {os.cpu_count()} cores of "]
    text += [f"{cpu_name()}.\n"]
    settings = settings_in(known)
    text += ["\n## All settings\n\nThe best trial of each rule, accuracy in % ("]
    text += ["loss for text):\n", *overview_table(known, settings)]
    text += ["\nPolar's defaults against everything that was tried of it:\n"]
    text += defaults_table(known, settings)
    text += ["\nWhole schedules of several lengths, at the settings tuned for the "]
    text += ["longest: mean accuracy of the seeds at the end, and the shortest that "]
    text += ["reaches what the best of the others comes to in the longest:\n"]
    for place in dict.fromkeys(s.place for s in settings):
        found = [*schedules_table(known, [s for s in settings if s.place == place])]
        text += [f"\n{place}:\n\n", *found] if found else []
    panels: dict[str, Curves] = {}
    for setting in settings:
        text += [f"\n## {setting.title}\n", *finals_table(known, setting)]
        text += tuning_table(known, setting, CONTENDERS, "tune")
        ablations = [*tuning_table(known, setting, ABLATIONS, "ablate")]
        if ablations:
            text += ["\nPolar with one ingredient exchanged:\n", *ablations]
        if found := curves(known, setting):
            panels[setting.title] = found
    results.mkdir(exist_ok=True)
    (results / "rules.md").write_text("".join(text))
    if panels:
        accuracy_figure(panels, results / "rules.png")
    print("".join(text))
