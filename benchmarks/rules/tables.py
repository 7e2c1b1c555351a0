"""Tables of what runs came to, as Markdown."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence

from benchmarks.rules.contenders import ABLATIONS, CONTENDERS, Contender
from benchmarks.rules.jobs import Setting, best_trial, trials_of
from benchmarks.rules.outcomes import Outcome

ONLY_LR = ", only lr tuned"
DEFAULTS = f"polar{ONLY_LR}"
POLARS = [name for name in CONTENDERS if name.startswith("polar")]
Known = Mapping[str, Outcome]


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
        if len(others) == 1:
            continue
        name = max(others, key=lambda n: others[n].score)
        top = others[name].score
        behind = (top - own.score) / abs(top)
        lr = own.settings["optimizer.lr"]
        yield f"| {setting.title} | {said(setting, own.score)} | {lr} "
        yield f"| {said(setting, top)} | {name} | {behind:.1%} |\n"


def finals_of(known: Known, setting: Setting) -> dict[str, list[Outcome]]:
    """The runs with fresh seeds, by rule."""
    finals = {name: trials_of(known, setting, "final", name) for name in CONTENDERS}
    return {name: runs for name, runs in finals.items() if runs}


def finals_table(known: Known, setting: Setting) -> Iterator[str]:
    """Means over seeds, their range, and what a run and a step cost."""
    finals = finals_of(known, setting)
    if not finals:
        return
    yield "\nThe best settings with fresh seeds:\n\n"
    yield "| rule | last %, mean (range) | loss | seeds | CPU s | CPU ms a step |\n"
    yield "|---|---|---|---|---|---|\n"
    rows = [_final_row(name, runs) for name, runs in finals.items()]
    yield from (row for _, row in sorted(rows, key=lambda r: -r[0]))


def _final_row(name: str, runs: Sequence[Outcome]) -> tuple[float, str]:
    done = [x for x in runs if not x.missed]
    last = [x.tests[-1].accuracy for x in done] or [math.nan]
    loss = statistics.mean([x.tests[-1].loss for x in done] or [math.nan])
    missed = f", {len(runs) - len(done)} missed" if len(done) < len(runs) else ""
    seconds = statistics.mean(x.cpu_seconds for x in runs)
    each = statistics.mean(1000 * x.cpu_seconds / max(1, x.steps) for x in runs)
    text = f"| {name} | {statistics.mean(last):.1f} "
    text += f"({min(last):.1f} to {max(last):.1f}{missed}) | {loss:.3f} "
    text += f"| {len(runs)} | {seconds:.0f} | {each:.0f} |\n"
    return statistics.mean(x.score for x in runs), text


def schedules_table(known: Known, settings: Sequence[Setting]) -> Iterator[str]:
    """Where whole schedules of several lengths end, and the shortest to a target.

    ``settings`` differ in steps alone. The target is the best that a rule that is not
    ours comes to with the longest. Runs with other options than those, which were
    tuned for the longest, do not count.
    """
    finals = {s.steps: finals_of(known, s) for s in settings}
    finals = {steps: finals[steps] for steps in sorted(finals) if finals[steps]}
    longest = max(finals, default=0)
    names = [*finals.get(longest, ())]
    ends = {
        steps: _mean_ends(_as_tuned(found, finals[longest]))
        for steps, found in finals.items()
    }
    best = {name: ends[longest][name][0] for name in names if name in ends[longest]}
    rivals = [x for name, x in best.items() if not _own(name)]
    if len(ends) < 2 or not rivals:
        return
    target = math.floor(10 * max(rivals)) / 10
    yield "| rule |" + "".join(f" {steps} steps |" for steps in ends)
    yield f" steps to {target:.1f}% | CPU s to it |\n" + "|---" * (len(ends) + 3)
    yield "|\n"
    for name in sorted(names, key=lambda n: -best.get(n, -math.inf)):
        row = {steps: found[name] for steps, found in ends.items() if name in found}
        cells = [f"{row[steps][0]:.1f}" if steps in row else "-" for steps in ends]
        first = next((n for n, (x, _) in row.items() if x >= target), None)
        cells += [f"{first}", f"{row[first][1]:.0f}"] if first else ["-", "-"]
        yield f"| {name} | " + " | ".join(cells) + " |\n"


def _as_tuned(
    finals: Mapping[str, Sequence[Outcome]], tuned: Mapping[str, Sequence[Outcome]]
) -> dict[str, Sequence[Outcome]]:
    """The rules whose runs all have the options that they have among ``tuned``."""
    return {
        name: runs
        for name, runs in finals.items()
        if name in tuned and all(x.settings == tuned[name][0].settings for x in runs)
    }


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
