"""`natgrad simulate`: a step on any number of ranks, without having them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.table import Table

from natgrad_lab.errors import UserError
from natgrad_lab.report.table import show
from natgrad_lab.simulate.figures import gantt, scaling_figure
from natgrad_lab.simulate.policy import Policy, every, reduced, replay
from natgrad_lab.simulate.profile import find_profile
from natgrad_lab.simulate.roles import Conditions
from natgrad_lab.simulate.run import SGD, Method, Result, scaling
from natgrad_lab.simulate.work import work_of


@dataclass(frozen=True, kw_only=True)
class SimulateCommand:
    """Simulate a training step: seconds by phase, a picture of it, scaling curves."""

    model: str = "resnet50"
    """A lab model."""
    import_: Annotated[str | None, tyro.conf.arg(name="import")] = None
    """package.module:function that returns a model, in place of --model."""
    input: tuple[int, ...] = ()
    """One example's shape; needed with --import."""
    profile: str = "abci"
    """abci, frontera, or a file that natgrad calibrate wrote."""
    world: tuple[int, ...] = (1, 4, 16, 64, 256, 1024)
    """Numbers of ranks."""
    strategies: tuple[str, ...] = ("sgd", "layer_wise", "factor_wise")
    """sgd, spngd, layer_wise, factor_wise, hybrid(f)."""
    placement: str = "longest_first"
    """longest_first or round_robin."""
    norm: Literal["skip", "unit", "diag", "full"] = "unit"
    """Statistic of normalisation layers."""
    inverse: Literal["eigen", "factored"] = "eigen"
    """Eigendecomposition or Cholesky."""
    gradients: Literal["own", "ddp"] = "own"
    """Who averages gradients: the library, or DDP."""
    statistics: int = 10
    """Steps between estimates."""
    inverses: int = 100
    """Steps between inversions."""
    reduction: float | None = None
    """Share of statistics refreshed a step, in place of the intervals (adaptive)."""
    replay: Path | None = None
    """A run whose recorded refreshes are replayed, in place of the intervals."""
    batch_per_rank: int = 32
    """Examples a rank."""
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
    split: bool = False
    """Divide factors larger than a fair share (planned, not executed)."""
    figures: Path | None = None
    """Folder for gantt.png and scaling.png."""
    json: bool = False
    """Print JSON instead of a table."""


def main(arguments: Sequence[str]) -> int:
    """Parse, simulate, print, draw."""
    asked = tyro.cli(SimulateCommand, prog="natgrad simulate", args=list(arguments))
    results = run(asked)
    if asked.json:
        print(json.dumps({"results": [r.to_dict() for r in results]}, indent=1))
    else:
        show(result_table(results))
    if asked.figures is not None:
        shown = [r for r in results if r.strategy != "sgd"] or results
        title = f"{asked.model}, {shown[-1].strategy} on {shown[-1].world} ranks"
        paths = [
            gantt(shown[-1].longest, asked.figures / "gantt.png", title),
            scaling_figure(results, asked.figures / "scaling.png"),
        ]
        if not asked.json:
            print("figures: " + ", ".join(map(str, paths)))
    return 0


def run(asked: SimulateCommand) -> list[Result]:
    """Simulate what was asked for."""
    if not asked.world or min(asked.world) < 1:
        raise UserError(f"Invalid world={asked.world}. Must be numbers >= 1.")
    shape = tuple(asked.input) or None
    work = work_of(asked.import_ or asked.model, norm=asked.norm, shape=shape)
    profile = find_profile(asked.profile)
    return scaling(work, profile, asked.world, methods_of(asked), conditions_of(asked))


def methods_of(asked: SimulateCommand) -> list[Method]:
    """A method a strategy."""
    method = Method(
        placement=asked.placement,
        inverse=asked.inverse,
        gradients=asked.gradients,
        policy=policy_of(asked),
        split=asked.split,
    )
    return [
        SGD if name == "sgd" else replace(method, strategy=name)
        for name in asked.strategies
    ]


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


def policy_of(asked: SimulateCommand) -> Policy:
    """The refresh policy: recorded, adaptive with a given rate, or by intervals."""
    if asked.replay is not None:
        return replay(asked.replay)
    if asked.reduction is not None:
        return reduced(asked.reduction)
    return every(asked.statistics, asked.inverses)


def result_table(results: Sequence[Result]) -> Table:
    """A row a strategy and world, with the phases of the critical chain."""
    phases = list(dict.fromkeys(p for r in results for p in r.phases))
    table = Table(title="milliseconds a step, by phase of the critical chain")
    for title in ("strategy", "ranks", "step", "of SGD", *phases):
        table.add_column(title, justify="left" if title == "strategy" else "right")
    sgd = {r.world: r.seconds for r in results if r.strategy == "sgd"}
    for each in results:
        over = f"{each.seconds / sgd[each.world]:.2f}" if each.world in sgd else ""
        cells = [f"{1e3 * each.phases.get(p, 0.0):.2f}" for p in phases]
        step = f"{1e3 * each.seconds:.1f}"
        table.add_row(each.strategy, str(each.world), step, over, *cells)
    return table
