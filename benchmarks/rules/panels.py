"""What the figures of `benchmarks.rules` show."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import TypeVar

from benchmarks.figures import Line
from benchmarks.rules.contenders import CONTENDERS
from benchmarks.rules.jobs import Setting, trials_of
from benchmarks.rules.tables import DEFAULTS, ONLY_LR, Known, finals_of


def panel(known: Known, setting: Setting) -> tuple[str, dict[str, list[float]]] | None:
    """What the figure shows of the finals: where each seed that did not miss ended.

    Best first; None if there are none, or only those of one rule.
    """
    finals = finals_of(known, setting).items()
    scores = {n: [x.score for x in runs if not x.missed] for n, runs in finals}
    order = sorted(
        (n for n in scores if scores[n]), key=lambda n: -statistics.mean(scores[n])
    )
    if len(order) < 2:
        return None
    label, sign = _axis(setting)
    return label, {
        name.replace(ONLY_LR, " (lr)"): [sign * x for x in scores[name]]
        for name in order
    }


def rates(known: Known, setting: Setting) -> tuple[str, dict[str, Line]] | None:
    """What the other figure shows: trials of rules that only had their rate tuned.

    By rate, without misses; rules with fewer than three are left out. None if there
    are none, or only those of one rule.
    """
    label, sign = _axis(setting)
    found: dict[str, Line] = {}
    for name in [DEFAULTS, *(n for n in CONTENDERS if n.endswith(ONLY_LR))]:
        trials = trials_of(known, setting, "tune", name)
        pairs = sorted(
            (float(x.settings["optimizer.lr"]), sign * x.score)
            for x in trials
            if not x.missed
        )
        if len(pairs) > 2:
            found[name.removesuffix(ONLY_LR)] = (
                [p[0] for p in pairs],
                [p[1] for p in pairs],
            )
    others = [name for name in found if not name.startswith("polar")]
    return (label, found) if others and len(found) > 1 else None


def _axis(setting: Setting) -> tuple[str, int]:
    """What an axis of scores shows, and the sign to show them with."""
    return ("test loss", -1) if setting.data == "text" else ("accuracy, %", 1)


Panel = TypeVar("Panel")


def panels_of(
    known: Known,
    settings: Sequence[Setting],
    make: Callable[[Known, Setting], Panel | None],
) -> dict[str, Panel]:
    """A figure's panels, by title."""
    found = {f"{s.place},\n{s.steps} steps": make(known, s) for s in settings}
    return {title: each for title, each in found.items() if each is not None}
