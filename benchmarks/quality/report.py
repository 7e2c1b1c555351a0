"""The records as tables and a figure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from benchmarks.common import markdown_table

Record = dict[str, Any]
Setting = tuple[str, int, int]
TUNED_WITH = 1
"""The seed that chooses rates; all others are finals."""
DRAWN = 6
"""Contenders in a panel of the figure, the best first."""
TITLES = {
    "airbench": "P1, airbench at a quarter of its width: test accuracy, %",
    "language": "P2, byte transformer: held-out loss, nats a byte",
    "resnet": "P3, ResNet-8 of width 8 on CIFAR-10: test accuracy, %",
    "autoencoder": "P4, deep autoencoder on digits: held-out loss",
    "vit": "P5, small vision transformer on CIFAR-10: test accuracy, %",
}
UNITS = {"language": "sequences of 128"}
ERRORS = ("airbench", "resnet", "vit")
"""Protocols whose value is an error in percent, shown as accuracy."""
TEXT = """# Whole trainings

From `python -m benchmarks.quality report`, which reads `quality.jsonl`;
`benchmarks/quality/PROTOCOL.md` says what is trained, how rates were chosen, and what
was cut. *Tuned* is the best of the rates that were tried, with the seed that chose it;
*finals* are other seeds at that rate: mean, range and number. A difference between two
single seeds is not a result. *Steps* is where the tuned run's own curve, looked at
about twelve times, first reaches the tuned end of the best contender that is not ours.
CPU seconds are of a busy machine. `polar` is `natgrad.Polar(model, lr)`, as it is, for
all parameters; `whole-...` has one group for them, `polar-...` another rule.
"""
SAME = {
    ("airbench", "polar-fixed-hidden"): "polar-half",
    ("language", "polar-vocabulary-0.1"): "polar-half",
    **{(p, "polar-full-nor"): "polar" for p in ("language", "autoencoder", "vit")},
}
"""Runs that decided on the defaults of `Polar`, before and now: they do the same."""
BY_BATCH = "airbench"
TARGETS = (78.0, 80.0, 82.0)
"""Accuracies, in percent, of which the steps by batch are told."""


def is_ours(name: str) -> bool:
    """Whether a contender is a `Polar`."""
    return name.startswith(("polar", "whole"))


def by_setting(records: Iterable[Record]) -> dict[Setting, dict[str, list[Record]]]:
    """Records of each contender, of each protocol, number of steps and batch."""
    found: dict[Setting, dict[str, list[Record]]] = {}
    for r in records:
        setting = (r["protocol"], r["steps"], r["batch"])
        own: str = r["contender"]
        name = SAME.get((r["protocol"], own), own)
        runs = found.setdefault(setting, {}).setdefault(name, [])
        runs.append({**r, "contender": name})
    return dict(sorted(found.items()))


def tuned(runs: Sequence[Record]) -> Record:
    """The best run of the seed that chooses rates."""
    return min((r for r in runs if r["seed"] == TUNED_WITH), key=lambda r: r["value"])


def finals(runs: Sequence[Record]) -> list[float]:
    """Ends of other seeds at the rate that was chosen."""
    lr = tuned(runs)["lr"]
    return [r["value"] for r in runs if r["lr"] == lr and r["seed"] != TUNED_WITH]


def reached(run: Record, value: float) -> int | None:
    """The first step at which a run was looked at and was as good."""
    return next((step for step, v, _ in run["curve"] if v <= value), None)


def shown(protocol: str, value: float) -> str:
    return f"{100 - value:.1f}" if protocol in ERRORS else f"{value:.3f}"


def chosen(contenders: dict[str, list[Record]]) -> dict[str, list[Record]]:
    """Contenders that have a run of the seed that chooses rates."""
    return {
        name: runs
        for name, runs in contenders.items()
        if any(r["seed"] == TUNED_WITH for r in runs)
    }


def _row(protocol: str, name: str, runs: Sequence[Record], goal: float) -> list[str]:
    best, others = tuned(runs), finals(runs)
    tried = sorted({r["lr"] for r in runs if r["seed"] == TUNED_WITH})
    ends = "-"
    if others:
        low, high = sorted((shown(protocol, min(others)), shown(protocol, max(others))))
        ends = f"{shown(protocol, statistics.mean(others))} ({low} to {high}), n = "
        ends += str(len(others))
    step = reached(best, goal)
    return [
        name,
        shown(protocol, best["value"]),
        f"{best['lr']:g} of " + ", ".join(f"{lr:g}" for lr in tried),
        ends,
        "-" if step is None else str(step),
        f"{best['cpu_seconds']:.0f}",
    ]


def section(setting: Setting, contenders: dict[str, list[Record]]) -> str:
    """The table of one protocol at one length and batch."""
    protocol, steps, batch = setting
    known = chosen(contenders)
    ends = {name: tuned(runs)["value"] for name, runs in known.items()}
    goal = min((v for n, v in ends.items() if not is_ours(n)), default=0.0)
    heads = ("contender", "tuned", "learning rate", "finals", "steps", "CPU s")
    order = sorted(known, key=ends.__getitem__)
    rows = [_row(protocol, name, known[name], goal) for name in order]
    unit = UNITS.get(protocol, "images")
    title = f"## {TITLES[protocol]}; {steps} steps of {batch:,} {unit}"
    return f"{title}\n\n{markdown_table(heads, rows)}\n"


def figure(settings: dict[Setting, dict[str, list[Record]]], path: Path) -> None:
    """The tuned runs of the best contenders over their steps."""
    fig, axes = plt.subplots(
        1, len(settings), figsize=(4.5 * len(settings), 3.8), squeeze=False
    )
    for axis, (setting, contenders) in zip(axes[0], settings.items(), strict=True):
        protocol, _, batch = setting
        known = chosen(contenders)
        ends = {name: tuned(runs)["value"] for name, runs in known.items()}
        for name in sorted(ends, key=ends.__getitem__)[:DRAWN]:
            curve = tuned(known[name])["curve"]
            sign = (lambda v: 100 - v) if protocol in ERRORS else (lambda v: v)
            axis.plot(
                [c[0] for c in curve],
                [sign(c[1]) for c in curve],
                label=name,
                linestyle="-" if is_ours(name) else "--",
            )
        if protocol not in ERRORS:
            least = min(ends.values())
            axis.set_ylim(0.95 * least, 2.2 * least)
        axis.set_title(f"{protocol}, batch {batch:,}")
        axis.set_xlabel("steps")
        axis.legend(fontsize=7)
    fig.tight_layout()
    fig.savefig(path, dpi=110)
    plt.close(fig)


def by_batch(settings: dict[Setting, dict[str, list[Record]]]) -> dict[str, Any]:
    """Tuned runs of the speedrun by contender and batch, of those with several."""
    found: dict[str, dict[int, Record]] = {}
    for (protocol, _, batch), contenders in settings.items():
        if protocol == BY_BATCH:
            for name, runs in chosen(contenders).items():
                found.setdefault(name, {})[batch] = tuned(runs)
    return {n: dict(sorted(runs.items())) for n, runs in found.items() if len(runs) > 1}


def batch_section(found: dict[str, dict[int, Record]]) -> str:
    """Accuracy at the end, and steps to common accuracies, by batch."""
    batches = sorted({batch for runs in found.values() for batch in runs})
    heads = ("contender", "", *(f"batch {batch:,}" for batch in batches))
    rows: list[list[str]] = []
    for name, runs in found.items():
        ends = {b: f"{100 - r['value']:.1f} in {r['steps']}" for b, r in runs.items()}
        rows.append([name, "%, in steps", *(ends.get(b, "-") for b in batches)])
        for target in TARGETS:
            steps = {b: reached(r, 100 - target) for b, r in runs.items()}
            cells = [str(steps.get(b) or "-") for b in batches]
            rows.append(["", f"steps to {target:g}%", *cells])
    title = "## P1 by batch: epochs 8, 10 and 12 at batches 2,000, 5,000 and 10,000"
    return f"{title}\n\n{markdown_table(heads, rows)}\n"


def batch_figure(found: dict[str, dict[int, Record]], path: Path) -> None:
    """What `batch_section` says, over the batch."""
    fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6))
    for name, runs in found.items():
        style = "o-" if is_ours(name) else "s--"
        left.plot(list(runs), [100 - r["value"] for r in runs.values()], style)
        steps = {b: reached(r, 100 - TARGETS[0]) for b, r in runs.items()}
        known = {b: step for b, step in steps.items() if step}
        right.plot(list(known), list(known.values()), style, label=name)
    left.set_ylabel("test accuracy at the end, %")
    right.set_ylabel(f"steps to {TARGETS[0]:g}%")
    right.set_yscale("log")
    for axis in (left, right):
        axis.set_xscale("log")
        axis.set_xlabel("batch")
    right.legend()
    fig.tight_layout()
    fig.savefig(path, dpi=110)
    plt.close(fig)
