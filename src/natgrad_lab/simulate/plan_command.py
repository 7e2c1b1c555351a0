"""`natgrad plan`: bytes, traffic and seconds of a run, before it starts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro
from rich.table import Table

from natgrad.plan import Choice, HardwareProfile, Plan, choose_strategy, make_plan
from natgrad.plan.describe import size_text
from natgrad.plan.split import loads_of, lower_bound, split_large
from natgrad_lab.errors import UserError
from natgrad_lab.report.table import show
from natgrad_lab.simulate.memory import (
    exchange_bytes,
    memory_by_rank,
    parse_size,
    require_fit,
)
from natgrad_lab.simulate.profile import find_profile
from natgrad_lab.simulate.work import Work, work_of

Norm = Literal["skip", "unit", "diag", "full"]


@dataclass(frozen=True, kw_only=True)
class PlanCommand:
    """Show what a run costs on each rank: memory, traffic and modelled seconds."""

    model: str = "resnet50"
    """A lab model."""
    import_: Annotated[str | None, tyro.conf.arg(name="import")] = None
    """package.module:function that returns a model, in place of --model."""
    input: tuple[int, ...] = ()
    """One example's shape; needed with --import."""
    world: int = 8
    """Number of ranks."""
    strategy: str = "factor_wise"
    """spngd, layer_wise, factor_wise, hybrid(f), or auto: what the profile says."""
    placement: str = "longest_first"
    """longest_first or round_robin."""
    norm: Norm = "unit"
    """Statistic of normalisation layers."""
    inverse: Literal["eigen", "factored"] = "eigen"
    """Eigendecomposition or Cholesky."""
    statistics: int = 10
    """Steps between estimates, for auto."""
    inverses: int = 100
    """Steps between inversions, for auto."""
    gradients: Literal["own", "ddp"] = "own"
    """Who averages gradients: the library, or DDP."""
    batch_per_rank: int = 32
    """Examples a rank, for activations."""
    memory: str | None = None
    """Fail if a rank needs more: 16G."""
    profile: str | None = None
    """abci, frontera, here, or a calibrated file; None: the library's constants."""
    split: bool = False
    """Also plan to divide factors larger than a fair share (planned, not executed)."""
    json: bool = False
    """Print the plan as JSON."""


def main(arguments: Sequence[str]) -> int:
    """Parse, plan, check memory, print."""
    asked = tyro.cli(PlanCommand, prog="natgrad plan", args=list(arguments))
    if asked.batch_per_rank < 1:
        raise UserError(f"Invalid batch_per_rank={asked.batch_per_rank}. Must be >= 1.")
    shape = tuple(asked.input) or None
    work = work_of(asked.import_ or asked.model, norm=asked.norm, shape=shape)
    profile = find_profile(asked.profile) if asked.profile else None
    choice = _choose(asked, work, profile) if asked.strategy == "auto" else None
    plan = make_plan(
        work.specs,
        world=asked.world,
        strategy=choice.strategy if choice else asked.strategy,
        placement=asked.placement,
        costs=profile.cost(asked.inverse) if profile else None,
        gradients=asked.gradients,
        inverse=asked.inverse,
    )
    plan.check()
    rows = memory_by_rank(plan, work, asked.batch_per_rank)
    if asked.memory is not None:
        require_fit(rows, parse_size(asked.memory))
    if asked.json:
        print(json.dumps(plan.to_dict(), indent=1))
        return 0
    if choice:
        print(choice.reasons, end="\n\n")
    print(plan.describe())
    show(memory_table(rows))
    show(traffic_table(plan))
    print(left_out(work))
    if asked.split:
        print(split_text(plan))
    return 0


def _choose(asked: PlanCommand, work: Work, profile: HardwareProfile | None) -> Choice:
    if profile is None:
        raise UserError("--strategy auto needs --profile: here, if it is calibrated.")
    if min(asked.statistics, asked.inverses) < 1:
        raise UserError("Invalid statistics or inverses. Must be >= 1.")
    return choose_strategy(
        work.specs,
        asked.world,
        profile,
        statistics=asked.statistics,
        inverses=max(asked.statistics, asked.inverses),
        inverse=asked.inverse,
        gradients=asked.gradients,
        placement=asked.placement,
    )


def memory_table(rows: Sequence[dict[str, int]]) -> Table:
    """The ranks that need least, most, and the mean."""
    table = Table(title="memory a rank (float32; activations are an estimate)")
    table.add_column("")
    for name in rows[0]:
        table.add_column(name, justify="right")
    order = sorted(range(len(rows)), key=lambda r: (rows[r]["total"], r))
    for title, rank in (("least", order[0]), ("most", order[-1])):
        cells = [size_text(value) for value in rows[rank].values()]
        table.add_row(f"{title}: rank {rank}", *cells)
    means = [sum(row[name] for row in rows) / len(rows) for name in rows[0]]
    table.add_row("mean", *map(size_text, means))
    return table


def traffic_table(plan: Plan) -> Table:
    """Payload by exchange in each precision."""
    table = Table(title="payload of a step in which everything is due")
    for title in (
        "exchange",
        "items",
        "packed",
        "packed, half",
        "whole",
        "whole, half",
    ):
        table.add_column(title, justify="left" if title == "exchange" else "right")
    for name, row in exchange_bytes(plan).items():
        sizes = [size_text(value) for key, value in row.items() if key != "items"]
        table.add_row(name, str(row["items"]), *sizes)
    return table


def left_out(work: Work) -> str:
    """A line on the parameters without statistics."""
    names = work.left_out
    count = sum(s.elements for s in work.specs if not s.statistics)
    if not names:
        return "no parameters are left out"
    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    return f"{len(names)} parameters without statistics ({count} elements): {shown}"


def split_text(plan: Plan) -> str:
    """The proposal for factors larger than a fair share, and what it would gain."""
    splits, loads = split_large(plan)
    before = max(loads_of(plan))
    rows = [
        f"slowest rank inverts for {before:.3g} s; no placement of whole factors is "
        f"under {lower_bound(plan):.3g} s; divided: {max(loads):.3g} s "
        "(planned, not executed)"
    ]
    for split in splits:
        rows.append(
            f"  {split.name}: {split.whole:.3g} s -> {split.seconds:.3g} s on "
            f"{len(split.ranks)} ranks, {size_text(8 * split.elements)} more moved"
        )
    return "\n".join(rows)
