"""The report by parameter group: rule, matrices, factors, owners and cost."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from natgrad.layers import Block
from natgrad.plan import Plan
from natgrad.plan.cost import CostModel, inverse_shapes
from natgrad.plan.describe import size_text
from natgrad.plan.spec import BlockSpec, StatisticSpec
from natgrad.rules.rule import Matrices, Rule

HEADER = (
    *("group", "rule", "blocks", "matrices", "factors", "owners", "workers"),
    *("flops a step", "s to invert", "bytes sent"),
)
Labelled = tuple[str, Block]
"""A block with the name, or number, of its parameter group."""


def blocks_by_group(
    blocks: Iterable[Block], groups: Sequence[Mapping[str, Any]]
) -> list[Labelled]:
    """Our blocks, each with the group of its first parameter, in order of groups."""
    number = {id(p): i for i, group in enumerate(groups) for p in group["params"]}
    names = [str(group.get("name", i)) for i, group in enumerate(groups)] or ["0"]
    ours = [(number.get(id(b.parameters[0]), 0), b) for b in blocks if not b.is_foreign]
    return [(names[i], b) for i, b in sorted(ours, key=lambda pair: pair[0])]


def group_rows(
    blocks: Iterable[Labelled], plan: Plan, cost: CostModel, itemsize: int
) -> list[tuple[str, ...]]:
    """A row for each group, and each rule in it; the first one is `HEADER`.

    Flops are the products of the rule in every step, on each worker; seconds those that
    the cost model gives for inverting or decomposing all factors once; bytes what is
    sent in a step in which everything is due.
    """
    found: dict[tuple[str, Rule], list[Block]] = {}
    for label, block in blocks:
        found.setdefault((label, block.rule), []).append(block)
    rows = [
        (label, short(rule), str(len(its)), _matrices(its), *_cost(its, plan, cost))
        for (label, rule), its in found.items()
    ]
    moved = [size_text(itemsize * _moved(its, plan)) for its in found.values()]
    return [HEADER, *((*row, x) for row, x in zip(rows, moved, strict=True))]


def short(rule: Rule) -> str:
    """A rule's name with the options that are not its class's defaults."""
    given = [
        f"{f.name}={getattr(rule, f.name)!r}"
        for f in fields(rule)  # pyright: ignore[reportArgumentType]
        if getattr(rule, f.name) != f.default
    ]
    return f"{rule.name}({', '.join(given)})" if given else rule.name


def _matrices(blocks: Sequence[Block]) -> str:
    """How many matrices the blocks of layers have: one each, or a stack of them."""
    count = sum(b.spec.stack for b in blocks if b.kind is not None)
    return str(count) if count else "-"


def _cost(blocks: Sequence[Block], plan: Plan, cost: CostModel) -> tuple[str, ...]:
    """Factors, owners, workers, flops and seconds."""
    specs = [s for b in blocks for s in b.spec.statistics]
    kinds = ", ".join(dict.fromkeys(s.kind for s in specs)) or "-"
    owners = sorted({plan.owners[s.name] for s in specs})
    workers = sorted({rank for b in blocks for rank in plan.workers[b.name]})
    counted = [flops_of(b.rule, b.spec) for b in blocks]
    flops = "?" if None in counted else f"{sum(x or 0 for x in counted):.3g}"
    seconds = f"{sum(map(cost.invert, specs)):.2g}" if specs else "-"
    return kinds, _ranks(owners), _ranks(workers), flops, seconds


def _ranks(ranks: Sequence[int]) -> str:
    """``0-3, 5``, or a dash for none."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], rank]
        else:
            runs.append([rank])
    return ", ".join("-".join(map(str, run)) for run in runs) or "-"


def _moved(blocks: Sequence[Block], plan: Plan) -> int:
    """Elements that enter the links if everything of the blocks is due."""
    names = [b.name for b in blocks]
    names += [s.name for b in blocks for s in b.spec.statistics]
    return sum(sum(x.volumes(names)[0]) for x in plan.exchanges.values())


def flops_of(rule: Rule, spec: BlockSpec) -> int | None:
    """Flops of the products that a rule does to a block's direction in a plain step.

    Counted by running the rule on tensors without data. None for a rule that cannot.
    """
    sides = tuple(_without_name(s) for s in spec.statistics if s.side != "both")
    return _flops(rule, (spec.stack, spec.rows, spec.cols), sides)


def _without_name(s: StatisticSpec) -> tuple[str, bool, tuple[tuple[int, ...], ...]]:
    return s.side, s.is_factor, tuple(inverse_shapes(s, bool(s.eigen)))


@lru_cache(maxsize=1024)
def _flops(
    rule: Rule,
    shape: tuple[int, int, int],
    sides: tuple[tuple[str, bool, tuple[tuple[int, ...], ...]], ...],
) -> int | None:
    # Not with the library: few ask for this, and all would wait for it.
    from torch.utils.flop_counter import FlopCounterMode

    def empty(*size: int) -> Tensor:
        return torch.empty(size, device="meta")

    prepared = {side: tuple(empty(*x) for x in shapes) for side, _, shapes in sides}
    v = empty(*shape)
    seen = Matrices(
        direction=v,
        gradient=empty(*shape) if rule.adapts else v,
        count=1,
        right=prepared.get("right"),
        left=prepared.get("left"),
        known=True,
        damping=1.0,
        curvature=empty(shape[0], shape[1] * shape[2]) if rule.corrects else None,
        moment=lambda x, _: x,
        average=lambda image, _: image,
    )
    try:
        with FlopCounterMode(display=False) as counter:
            rule.apply(seen)
    except (RuntimeError, NotImplementedError):
        return None
    return counter.get_total_flops()
