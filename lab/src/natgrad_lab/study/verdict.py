"""A study's answer in plain words, from its tables alone."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from natgrad_lab.study.curves import Metric
from natgrad_lab.study.draw import NAMES
from natgrad_lab.study.reading import (
    Criterion,
    costs_to,
    ideal_speedup,
    scales_until,
    speedups,
)
from natgrad_lab.study.results import METRICS, Results
from natgrad_lab.study.tables import (
    best_table,
    cost_table,
    good_criterion,
    robustness_table,
)


def verdict(results: Results) -> list[str]:
    """Sentences: what each method reaches and in how many iterations, how it scales,
    how wide its good region is, what it costs.

    What is reached comes first: a speedup is relative to the method itself, and one
    that is good at the smallest batch has less to gain.
    """
    said = [_scope(results), *_best(results), *_comparison(results)]
    for metric in METRICS:
        said += _scaling(results, metric)
    said += _robustness(results)
    said += _cost(results)
    return said


def _scope(results: Results) -> str:
    spec, done = results.spec, len(results.single)
    rest = f", {results.unfinished} not finished yet" if results.unfinished else ""
    diverged = sum(each.curve.diverged for each in results.single)
    sizes = ", ".join(f"{m:,}" for m in results.batches)
    what = f"{done} trials of {spec.recipe} on {results.data}"
    return (
        f"{what} have ended{rest}; {diverged} of them diverged and count as failures. "
        f"Batch sizes: {sizes}. Speedups are in iterations, against the same method at "
        f"batch {results.base:,}."
    )


def _scaling(results: Results, metric: Metric) -> list[str]:
    """Where each method stops scaling towards the last target of a metric."""
    targets = results.targets(metric)
    if not targets:
        return [f"No target {metric} follows from these curves."]
    return [_scales(results, method, targets[-1]) for method in results.methods]


def _scales(results: Results, method: str, target: Criterion) -> str:
    name, base = NAMES[method], results.base
    found = speedups(costs_to(results.of(method), target), base)
    if not found:
        return f"{name} does not reach {target.label} at batch {base:,}: no speedup."
    last = scales_until(found, results.batches, base)
    following = [m for m in results.batches if m > last]
    if not following:
        return (
            f"{name}, to {target.label}: has at least half of the ideal speedup up to "
            f"the largest batch, {last:,} ({_gain(found, last, base)})."
        )
    start = f"{name}, to {target.label}: stops scaling after batch {last:,}"
    if last > base:
        start += f" ({_gain(found, last, base)})"
    missed = following[0]
    if missed not in found:
        return f"{start}; at {missed:,} it does not reach the target."
    return f"{start}; at {missed:,} it gains {_gain(found, missed, base)}."


def _gain(found: dict[int, float], batch: int, base: int) -> str:
    return f"{found[batch]:.2g}x of an ideal {ideal_speedup(batch, base):.3g}x"


def _comparison(results: Results) -> list[str]:
    """Each method against SGD: who needs fewer iterations, and who scales better.

    The second is Ma et al.'s first question.
    """
    if "sgd" not in results.methods:
        return []
    targets = [target for metric in METRICS for target in results.targets(metric)]
    costs = {
        method: [costs_to(results.of(method), target) for target in targets]
        for method in results.methods
    }
    return [
        _against_sgd(NAMES[method], costs[method], costs["sgd"], results.base)
        for method in results.methods
        if method != "sgd"
    ]


Costs = Sequence[Mapping[int, float]]


def _against_sgd(name: str, mine: Costs, sgd: Costs, base: int) -> str:
    """``mine`` and ``sgd`` have iterations by batch, for each target."""
    pairs = list(zip(mine, sgd, strict=True))
    fewer = [
        ours.get(batch, math.inf) < theirs.get(batch, math.inf)
        for ours, theirs in pairs
        for batch in ours.keys() | theirs.keys()
        if ours.get(batch) != theirs.get(batch)
    ]
    if not fewer:
        return f"{name} and SGD cannot be compared: neither reaches a target."
    larger: list[bool] = []
    for ours, theirs in pairs:
        gained, rival = speedups(ours, base), speedups(theirs, base)
        common = (gained.keys() & rival.keys()) - {base}
        larger += [gained[m] > rival[m] for m in common if gained[m] != rival[m]]
    return (
        f"{name} needs fewer iterations than SGD in {sum(fewer)} of {len(fewer)} "
        f"comparisons (a target at a batch size). {_who_scales(larger, base)}"
    )


def _who_scales(larger: Sequence[bool], base: int) -> str:
    wins, total = sum(larger), len(larger)
    if not total:
        return "No target has speedups of both."
    how = "about as SGD does"  # less than two thirds either way is no difference
    if 3 * wins >= 2 * total:
        how = "better than SGD"
    elif 3 * wins <= total:
        how = "no better than SGD"
    return (
        f"Relative to itself at batch {base:,} it scales {how}: its speedup is the "
        f"larger one in {wins} of {total}."
    )


def _robustness(results: Results) -> list[str]:
    criterion = good_criterion(results)
    if criterion is None:
        return []
    rows = robustness_table(results)
    said = [
        f"A configuration is good when it reaches a test accuracy of "
        f"{criterion.value:.2f} %."
    ]
    for method in results.methods:
        own = [row for row in rows if row["method"] == method]
        said.append(
            f"{NAMES[method]}'s good region: {_shares(own, 'good_at_end')} of its grid "
            f"at the end of training; {_shares(own, 'good_in_epochs')} when stopped "
            f"after {own[0]['epochs']:.3g} epochs; "
            f"{_shares(own, 'good_in_iterations')} when stopped after "
            f"{own[0]['iterations']} iterations."
        )
    return said


def _shares(rows: Sequence[dict[str, Any]], name: str) -> str:
    return ", ".join(f"{100 * row[name]:.0f} % at {row['batch']:,}" for row in rows)


def _cost(results: Results) -> list[str]:
    said = []
    for method in results.methods:
        rows = [row for row in cost_table(results) if row["method"] == method]
        rows = [row for row in rows if row["over_sgd"] is not None]
        if method == "sgd" or not rows:
            continue
        parts = [f"{row['over_sgd']:.1f}x at {row['batch']:,}" for row in rows]
        said.append(
            f"An update of {NAMES[method]} took {', '.join(parts)} the processor time "
            "of SGD's on this machine (iterations do not show it, figure 11 does)."
        )
    return said


def _best(results: Results) -> list[str]:
    """Best accuracies: of all methods at the largest batch, then of each at all."""
    rows = [row for row in best_table(results) if row["by"] == "accuracy"]
    largest = max(results.batches)
    there = [row for row in rows if row["batch"] == largest]
    there.sort(key=lambda row: row["accuracy"], reverse=True)
    order = [f"{NAMES[row['method']]} {row['accuracy']:.2f} %" for row in there]
    said = [
        f"Best test accuracy at the largest batch, {largest:,}: {', '.join(order)}."
    ]
    for method in results.methods:
        own = [row for row in rows if row["method"] == method]
        parts = [f"{row['accuracy']:.2f} % at {row['batch']:,}" for row in own]
        said.append(f"{NAMES[method]}'s best test accuracy: {', '.join(parts)}.")
    return said
