"""Plain-text tables of what is registered and what was refreshed."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from torch import nn

from natgrad.diagnostics.groups import blocks_by_group, group_rows
from natgrad.layers import Block
from natgrad.plan.describe import aligned, size_text
from natgrad.plan.pace import described, rates, refresh_seconds
from natgrad.rules.fallbacks import Adam
from natgrad.rules.rule import Rule

if TYPE_CHECKING:
    from natgrad.factors.statistics import Statistics

HEADER = ("parameter", "block", "statistics", "bytes", "note")
UNSEEN = "used without statistics: its layer was not called in a forward and backward"
LEGEND = (
    "By parameter group: flops of the rule in every step, expected seconds to invert\n"
    "all factors once, bytes sent in a step that refreshes everything."
)

Group = Mapping[str, Any]


def registration_table(
    model: nn.Module, statistics: "Statistics", groups: Sequence[Group]
) -> str:
    """Every parameter: its block kind, factor sizes and bytes, or why it has none.

    And every parameter group: rule, matrices, factors, owners and cost.

    It tells of the model as it is now: of layers that were added, replaced, frozen or
    never called as layers since.
    """
    block_of = {id(p): b for b in statistics.block.values() for p in b.parameters}
    named = list(model.named_parameters())
    rows = [_row(statistics, name, p, block_of.get(id(p))) for name, p in named]
    summary = _summary(statistics, named)
    by_group = _groups(statistics, groups)
    return "\n".join([_table([HEADER, *rows]), *summary, "", by_group])


def _groups(statistics: "Statistics", groups: Sequence[Group]) -> str:
    """Of each parameter group: matrices, rule, factors, owners and cost."""
    blocks = blocks_by_group(statistics.block.values(), groups)
    itemsize = statistics.like.element_size()
    rows = group_rows(blocks, statistics.plan, statistics.cost, itemsize)
    return f"{LEGEND}\n{_table(rows)}"


def _summary(
    statistics: "Statistics", named: list[tuple[str, nn.Parameter]]
) -> list[str]:
    """How many parameters are preconditioned, and what becomes of the others."""
    here = {id(p) for _, p in named if p.requires_grad}
    blocks = statistics.block.values()
    current = [b for b in blocks if any(id(p) in here for p in b.parameters)]
    works = [b for b in current if b.kind is not None and not _is_unseen(statistics, b)]
    rest = [b for b in current if b.kind is None and not b.is_foreign]
    total = sum(p.numel() for _, p in named if p.requires_grad)
    frozen = sum(p.numel() for _, p in named) - total
    covered = _elements(works, here)
    packed = sum(s.spec.packed for s in statistics.states.values())
    kept = size_text(packed * statistics.like.element_size())
    lines = [
        f"{len(works)} blocks, {covered:,} of {total:,} trained parameters "
        f"({covered / max(1, total):.0%}) preconditioned, {kept} of statistics."
    ]
    for rule in dict.fromkeys(b.rule for b in rest):
        count = _elements([b for b in rest if b.rule == rule], here)
        lines.append(f"{count:,} parameters without a block {_fallback(rule)}.")
    if frozen:
        lines.append(f"{frozen:,} parameters are frozen.")
    gone = [b.name for b in blocks if b.kind is not None and b not in current]
    if gone:
        lines.append(f"Frozen since, or not in the model any more: {', '.join(gone)}.")
    if packed:
        lines.append(_expected(statistics))
    account = statistics.account
    return lines if account is None else [*lines, account.summary()["says"]]


def _fallback(rule: Rule) -> str:
    """What becomes of parameters without a block."""
    if isinstance(rule, Adam):
        return f"follow Adam's rule, at {rule.rate:g} of the learning rate"
    return "keep their plain gradient"


def _is_unseen(statistics: "Statistics", block: Block) -> bool:
    """Whether steps have gone by, but none that estimated the block's statistics."""
    states = [statistics.states[s.name] for s in block.spec.statistics]
    return bool(states and statistics.step) and not any(
        s.timing.refreshed for s in states
    )


def _elements(blocks: list[Block], among: set[int]) -> int:
    return sum(p.numel() for b in blocks for p in b.parameters if id(p) in among)


def _expected(statistics: "Statistics") -> str:
    """What a refresh of everything will take, and what takes longest of it."""
    plan = statistics.plan
    seconds = refresh_seconds(plan.statistics, plan.owners, statistics.cost)
    slowest = max(plan.statistics, key=statistics.cost.invert)
    return (
        f"Inverting all statistics once is expected to take {seconds:.2g} s, "
        f"{statistics.cost.invert(slowest):.2g} s of it for {slowest.name} "
        f"(built-in rates {rates(statistics.like.device)})."
    )


def refresh_summary(statistics: "Statistics") -> dict[str, Any]:
    """Counts by statistic, the share of bytes refreshed, and what a budget says."""
    account, states = statistics.account, statistics.states.values()
    done = sum(s.spec.packed * s.timing.refreshed for s in states)
    every = sum(s.spec.packed * (s.timing.refreshed + s.timing.skipped) for s in states)
    return {
        "statistics": {
            s.spec.name: {
                "refreshed": s.timing.refreshed,
                "skipped": s.timing.skipped,
                "inverted": s.timing.inverted,
                "interval": s.timing.interval,
            }
            for s in states
        },
        "reduction_rate": done / every if every else 0.0,
        **({} if account is None else {"budget": account.summary()}),
        "last": asdict(statistics.last),
    }


def _row(
    statistics: "Statistics", name: str, p: nn.Parameter, block: Block | None
) -> tuple[str, ...]:
    if not p.requires_grad:
        return name, "-", "", "", "frozen"
    if block is None:
        return name, "-", "", "", "added or unfrozen since: make the optimizer after it"
    if block.kind is None:
        return name, "-", "", "", block.reason
    specs = block.spec.statistics
    sizes = ", ".join(f"{s.kind} {described(s)}" for s in specs)
    size = sum(s.packed for s in specs) * statistics.like.element_size()
    cut = [f"{s.kind} kept as {s.parts} diagonal blocks" for s in specs if s.parts > 1]
    known = UNSEEN if _is_unseen(statistics, block) else block.note
    note = "; ".join(x for x in (_many(block), *cut, known) if x)
    first = p is block.parameters[0]
    return name, block.kind.name, sizes, size_text(size) if first else "", note


def _many(block: Block) -> str:
    """How many matrices a block is, if it is not one."""
    shared = [f", one {s.kind}" for s in block.spec.statistics if s.shared]
    many = block.is_factored and block.spec.stack > 1
    return f"{block.spec.stack} matrices{''.join(shared)}" if many else ""


def _table(rows: list[tuple[str, ...]]) -> str:
    head, *lines = aligned(rows)
    return "\n".join([head, "-" * len(head), *lines])
