"""The report of `benchmarks.rules`, from the outcomes that there are."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from benchmarks.comparison import cpu_name
from benchmarks.figures import ranges_figure, rates_figure
from benchmarks.rules.contenders import ABLATIONS, CONTENDERS
from benchmarks.rules.jobs import Setting, settings_in
from benchmarks.rules.outcomes import read_outcomes
from benchmarks.rules.panels import panel, panels_of, rates
from benchmarks.rules.tables import (
    Known,
    defaults_table,
    finals_table,
    overview_table,
    schedules_table,
    tuning_table,
)

RESULTS = Path(__file__).parents[1] / "results"
LEDGER = RESULTS / "rules.jsonl"


def summary(known: Known, settings: Sequence[Setting]) -> Iterator[str]:
    """What all settings say together."""
    yield "\nThe best trial of each rule, accuracy in % (loss for text):\n"
    yield from overview_table(known, settings)
    yield "\nPolar's defaults against everything that was tried of it:\n"
    yield from defaults_table(known, settings)
    tables = {
        place: [*schedules_table(known, [s for s in settings if s.place == place])]
        for place in dict.fromkeys(s.place for s in settings)
    }
    if any(tables.values()):
        yield "\nWhole schedules of several lengths, at the options tuned for the "
        yield "longest: mean accuracy of the seeds at the end (- where one missed), "
        yield "and the shortest that reaches what the best of the others comes to in "
        yield "the longest:\n"
    for place, table in tables.items():
        yield from [f"\n{place}:\n\n", *table] if table else []


def details(known: Known, setting: Setting) -> Iterator[str]:
    """Finals, trials and ablations of a setting."""
    yield f"\n## {setting.title}\n"
    yield from finals_table(known, setting)
    yield from tuning_table(known, setting, CONTENDERS, "tune")
    ablations = [*tuning_table(known, setting, ABLATIONS, "ablate")]
    if ablations:
        yield from ("\nPolar with one ingredient exchanged:\n", *ablations)


def write(ledger: Path, results: Path) -> None:
    """Tabulate a file of outcomes into ``rules.md``, with its figures beside it."""
    known = read_outcomes(ledger)
    settings = settings_in(known)
    text = ["# Update rules, tuned with equal budgets\n\n"]
    text += ["Made by `python -m benchmarks.rules`; its header says how.\n"]
    text += [f"torch {torch.__version__}, one thread a run, {os.cpu_count()} cores of "]
    text += [f"{cpu_name()}.\n\n## All settings\n"]
    results.mkdir(exist_ok=True)
    if ends := panels_of(known, settings, panel):
        ranges_figure(ends, results / "rules.png")
        text += ["\n![Mean and range of the seeds that settings were not chosen by]"]
        text += ["(rules.png)\n\n(lr): only the learning rate was tuned.\n"]
    if lines := panels_of(known, settings, rates):
        rates_figure(lines, results / "rules_rates.png")
        text += ["\n![One trial at each learning rate, momentum 0.8 unless named]"]
        text += ["(rules_rates.png)\n"]
    text += summary(known, settings)
    for setting in settings:
        text += details(known, setting)
    (results / "rules.md").write_text("".join(text))
    print("".join(text))
