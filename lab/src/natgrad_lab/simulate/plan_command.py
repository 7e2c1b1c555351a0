"""`natgrad plan`: bytes, traffic and seconds of a run, before it starts."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import tyro
from rich.table import Table

from natgrad import Options
from natgrad.diagnostics import group_rows
from natgrad.plan import (
    FLOAT_BYTES,
    Choice,
    CostModel,
    HardwareProfile,
    Plan,
    Strategy,
    choose_strategy,
    make_plan,
    size_text,
)
from natgrad_lab.console import show, width
from natgrad_lab.errors import UserError
from natgrad_lab.simulate.asked import (
    METHODS,
    Asked,
    inverse_of,
    options_asked,
    require_world,
    rules_asked,
    work_asked,
)
from natgrad_lab.simulate.memory import (
    exchange_bytes,
    keeps_of,
    memory_by_rank,
    parse_size,
    require_fit,
)
from natgrad_lab.simulate.profile import find_profile
from natgrad_lab.simulate.run import passes
from natgrad_lab.simulate.work import Work


@dataclass(frozen=True, kw_only=True)
class PlanCommand(Asked):
    """Show what a run costs on each rank: memory, traffic and modelled seconds."""

    method: Literal["kfac", "spngd", "polar", "muon", "soap", "shampoo"] = "kfac"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Whose options are the defaults: natgrad.KFAC, SPNGD, Polar, Muon, ..."""
    world: int = 8
    """Number of ranks."""
    strategy: str | None = None
    """spngd, layer_wise, factor_wise, hybrid(f), or auto: what the profile says."""
    memory: str | None = None
    """Fail if a rank needs more: 16G."""
    profile: str | None = None
    """abci, frontera, here, or a calibrated file; None: the library's constants."""
    rules: tuple[str, ...] = ()
    """Rules of groups: hidden=muon convolutions=soap embeddings=adam. Groups are those
    of natgrad.groups; one that is not named has the method's rule, or Adam's."""
    json: bool = False
    """Print the plan as JSON."""


def main(arguments: Sequence[str]) -> int:
    """Parse, plan, check memory, print."""
    asked = tyro.cli(PlanCommand, prog="natgrad plan", args=list(arguments))
    require_world(asked.world)
    options = options_asked(asked)
    work = work_asked(asked, options, rules_asked(asked, asked.rules))
    profile = find_profile(asked.profile) if asked.profile else None
    auto = asked.strategy == "auto"
    choice = _choose(asked, options, work, profile) if auto else None
    plan = plan_asked(asked, options, work, profile, choice)
    plan.check()
    keeps, sharded = keeps_of(options, work.ruled), asked.method != "kfac"
    cut = not (sharded and options.average.keeps_mass)
    rows = memory_by_rank(
        plan, work, asked.batch_per_rank, keeps=keeps, sharded=sharded, cut=cut
    )
    if asked.memory is not None:
        require_fit(rows, parse_size(asked.memory))
    if asked.json:
        print(json.dumps(plan.to_dict(keeps), indent=1))
        return 0
    if choice:
        print(choice.reasons, end="\n\n")
    print(described(asked, work))
    print(plan.describe(keeps))
    if work.ruled:
        show(groups_table(work, plan))
    show(memory_table(rows))
    show(traffic_table(plan, *options.refresh.mean_intervals()))
    print(textwrap.fill(left_out(work), width()))
    return 0


def described(asked: PlanCommand, work: Work) -> str:
    """What the plan is of."""
    return (
        f"{work.name}: {work.parameters:,} parameters, method {asked.method}, "
        f"{asked.batch_per_rank} examples per rank"
    )


def plan_asked(
    asked: PlanCommand,
    options: Options,
    work: Work,
    profile: HardwareProfile | None,
    choice: Choice | None,
) -> Plan:
    """The plan that a run of this method executes."""
    inverse = inverse_of(options)
    cost = CostModel(inverse=inverse)
    if profile is not None:
        cost = profile.cost(inverse, options.rule.name)
    plan = make_plan(
        work.specs,
        world=asked.world,
        strategy=choice.strategy if choice else _strategy(asked),
        placement=asked.placement,
        costs=cost,
        gradients=asked.gradients,
        inverse=inverse,
    )
    # The library's own placement does not look at the rule; its seconds depend on it.
    scales = {block.name: block.rule.name for _, block in work.ruled}
    cost = replace(cost, scale=options.rule.name, scales=scales)
    return replace(plan, cost=cost)


def _strategy(asked: PlanCommand) -> str | Strategy:
    return asked.strategy or METHODS[asked.method].strategy


def _choose(
    asked: PlanCommand, options: Options, work: Work, profile: HardwareProfile | None
) -> Choice:
    if profile is None:
        raise UserError("--strategy auto needs --profile: here, if it is calibrated.")
    statistics, inverses = options.refresh.mean_intervals()
    compute, estimate = passes(work, profile, asked.batch_per_rank)
    return choose_strategy(
        work.specs,
        asked.world,
        profile,
        statistics=statistics,
        inverses=inverses,
        inverse=inverse_of(options),
        scale=options.rule.name,
        gradients=asked.gradients,
        compute=compute,
        estimate=estimate,
        placement=asked.placement,
    )


def groups_table(work: Work, plan: Plan) -> Table:
    """Each group as an optimizer's report has it."""
    head, *rows = group_rows(work.ruled, plan, plan.cost, FLOAT_BYTES)
    table = Table(title="parameter groups")
    for name in head:
        table.add_column(name)
    for row in rows:
        table.add_row(*row)
    return table


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


def traffic_table(plan: Plan, statistics: float, inverses: float) -> Table:
    """Payload by exchange in each precision."""
    table = Table(
        title="payload of a step in which everything is due, and of a mean one "
        f"(statistics every {statistics:.3g} steps, inverses every {inverses:.3g})"
    )
    heads = ("packed", "packed, half", "whole", "whole, half", "mean", "mean, half")
    for title in ("exchange", "items", *heads):
        table.add_column(title, justify="left" if title == "exchange" else "right")
    for name, row in exchange_bytes(plan, statistics, inverses).items():
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
