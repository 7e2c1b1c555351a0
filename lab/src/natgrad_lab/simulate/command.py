"""`natgrad simulate`: a step on any number of ranks, without having them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tyro
from rich.table import Table

from natgrad_lab.console import show
from natgrad_lab.errors import UserError
from natgrad_lab.simulate.asked import (
    Asked,
    inverse_of,
    options_asked,
    require_world,
    work_asked,
)
from natgrad_lab.simulate.figures import gantt, scaling_figure
from natgrad_lab.simulate.policy import Policy, every, reduced, replay
from natgrad_lab.simulate.profile import find_profile
from natgrad_lab.simulate.roles import Conditions
from natgrad_lab.simulate.run import PHASES, SGD, Method, Result, scaling


@dataclass(frozen=True, kw_only=True)
class SimulateCommand(Asked):
    """Simulate a training step: seconds by phase, a picture of it, scaling curves."""

    profile: str = "abci"
    """abci, frontera, here (calibrated), or a file that natgrad calibrate wrote."""
    world: tuple[int, ...] = (1, 4, 16, 64, 256, 1024)
    """Numbers of ranks."""
    strategies: tuple[str, ...] = ("sgd", "layer_wise", "factor_wise")
    """sgd, spngd, layer_wise, factor_wise, hybrid(f)."""
    reduction: float | None = None
    """Share of statistics refreshed a step, in place of the intervals (adaptive)."""
    replay: Path | None = None
    """A run whose recorded refreshes are replayed, in place of the intervals."""
    per_epoch: float | None = None
    """Inversions an epoch, in place of --inverses, and ten times as many estimates:
    the interval then follows the batch, as in Pauloski et al. 2020, Figure 7."""
    epochs: tuple[float, ...] = ()
    """Epochs to train, one a strategy or one for all: shows hours to train."""
    examples: int = 1_281_167
    """Examples in an epoch; ImageNet's."""
    half: tuple[str, ...] = ()
    """Exchanges in half precision, such as share_updates."""
    overlap: bool = True
    """Whether exchanges run under forward and backward."""
    packed: bool = True
    """Whether symmetric statistics go as triangles."""
    sampled: bool = False
    """Whether the Fisher is sampled, with a backward of its own."""
    stragglers: int = 0
    """So many ranks are slow."""
    slowness: float = 1.5
    """How many times slower they are."""
    jitter: float = 0.0
    """Relative standard deviation of ranks' compute seconds."""
    figures: Path | None = None
    """Folder for gantt.png and scaling.png."""
    json: bool = False
    """Print JSON instead of a table."""


def main(arguments: Sequence[str]) -> int:
    """Parse, simulate, print, draw."""
    asked = tyro.cli(SimulateCommand, prog="natgrad simulate", args=list(arguments))
    results = run(asked)
    hours = hours_of(asked)
    if asked.json:
        print(json.dumps({"results": [_row(r, hours) for r in results]}, indent=1))
    else:
        for table in result_tables(results, hours):
            show(table)
    if asked.figures is not None:
        shown = [r for r in results if r.strategy != "sgd"] or results
        title = f"{asked.model}, {shown[-1].strategy} on {shown[-1].world} ranks"
        paths = [
            gantt(shown[-1].longest, asked.figures / "gantt.png", title),
            scaling_figure(results, asked.figures / "scaling.png", hours=hours),
        ]
        if not asked.json:
            print("figures: " + ", ".join(map(str, paths)))
    return 0


def run(asked: SimulateCommand) -> list[Result]:
    """Simulate what was asked for."""
    if not asked.world:
        raise UserError("Invalid world=(). Must be one number or more.")
    require_world(*asked.world)
    work = work_asked(asked, options_asked(asked))
    profile, conditions = find_profile(asked.profile), conditions_of(asked)
    return [
        result
        for name in asked.strategies
        for world in asked.world
        for result in scaling(
            work, profile, [world], [method_of(asked, name, world)], conditions
        )
    ]


def method_of(asked: SimulateCommand, strategy: str, world: int) -> Method:
    """What is simulated on so many ranks."""
    if strategy == "sgd":
        return replace(SGD, gradients=asked.gradients)
    options = options_asked(asked)
    return Method(
        strategy=strategy,
        placement=asked.placement,
        inverse=inverse_of(options),
        scale=options.rule.name,
        subsample=options.subsample,
        gradients=asked.gradients,
        policy=policy_of(asked, world),
    )


def hours_of(asked: SimulateCommand) -> dict[str, float]:
    """Hours to train for each second a step, on one rank, by strategy."""
    names, epochs = asked.strategies, asked.epochs
    if len(epochs) not in (0, 1, len(names)):
        raise UserError(
            f"Invalid epochs={epochs}. Must be one number, or one for each of {names}."
        )
    if epochs and (min(epochs) <= 0 or asked.examples < 1):
        raise UserError("Invalid epochs or examples. Must be > 0.")
    each = epochs * len(names) if len(epochs) == 1 else epochs
    steps = asked.examples / asked.batch_per_rank
    return {name: e * steps / 3600 for name, e in zip(names, each, strict=False)}


def _row(result: Result, hours: Mapping[str, float]) -> dict[str, Any]:
    row = result.to_dict()
    if result.strategy in hours:
        row["hours"] = hours[result.strategy] * result.seconds / result.world
    return row


def conditions_of(asked: SimulateCommand) -> Conditions:
    """The circumstances of the step."""
    return Conditions(
        batch=asked.batch_per_rank,
        half=asked.half,
        overlap=asked.overlap,
        packed=asked.packed,
        sampled=asked.sampled,
        stragglers=asked.stragglers,
        slowness=asked.slowness,
        jitter=asked.jitter,
    )


def policy_of(asked: SimulateCommand, world: int) -> Policy:
    """The refresh policy: recorded, adaptive with a given rate, or by intervals.

    Adaptive without a rate refreshes a tenth of the statistics in each step.
    """
    if asked.replay is not None:
        return replay(asked.replay)
    if asked.reduction is not None:
        return reduced(asked.reduction)
    if asked.per_epoch is not None:
        if asked.per_epoch <= 0:
            raise UserError(f"Invalid per_epoch={asked.per_epoch}. Must be > 0.")
        steps = asked.examples / (asked.batch_per_rank * world)
        interval = max(1, round(steps / asked.per_epoch))
        return every(max(1, round(interval / 10)), interval)
    refresh = options_asked(asked).refresh
    statistics, inverses = (round(x) for x in refresh.mean_intervals())
    adaptive = refresh.tolerance is not None
    return reduced(1 / statistics) if adaptive else every(statistics, inverses)


def result_tables(
    results: Sequence[Result], hours: Mapping[str, float] | None = None
) -> list[Table]:
    """For each strategy a row a world, with the phases of the critical chain."""
    sgd = {r.world: r.seconds for r in results if r.strategy == "sgd"}
    names = dict.fromkeys(r.strategy for r in results)
    found = {name: [r for r in results if r.strategy == name] for name in names}
    return [_table(name, rows, sgd, hours or {}) for name, rows in found.items()]


def _table(
    strategy: str,
    results: Sequence[Result],
    sgd: Mapping[int, float],
    hours: Mapping[str, float],
) -> Table:
    phases = [p for p in PHASES if any(r.phases.get(p) for r in results)]
    spent = ("hours",) if strategy in hours else ()
    table = Table(title=f"{strategy}: ms a step, by phase of the critical chain")
    for title in ("ranks", "step", "of SGD", *spent, *phases):
        table.add_column(title, justify="right")
    for each in results:
        over = f"{each.seconds / sgd[each.world]:.2f}" if each.world in sgd else ""
        cells = [f"{1e3 * each.phases.get(p, 0.0):.2f}" for p in phases]
        if spent:
            cells.insert(0, f"{_row(each, hours)['hours']:.2f}")
        table.add_row(str(each.world), f"{1e3 * each.seconds:.1f}", over, *cells)
    return table
