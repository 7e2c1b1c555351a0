"""The part of a report that is by parameter group, and what it counts."""

from typing import Any

import pytest
import torch
from torch import nn

import natgrad
from natgrad import EKFAC, Adam, EigenAdam, Kronecker, Orthogonal, Plain
from natgrad.diagnostics.groups import (
    HEADER,
    blocks_by_group,
    flops_of,
    group_rows,
    short,
)
from natgrad.plan import make_plan


class Net(nn.Module):
    """A linear layer, a stack of three matrices, a convolution and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(5, 4)
        self.experts = nn.Parameter(torch.randn(3, 4, 6))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(6, 2)


def rows_of(report: str) -> list[dict[str, str]]:
    """By column, cut where the header's words begin."""
    lines = report.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("group "))
    begin = [lines[start].index(name) for name in HEADER]
    cells = [
        [line[a:b].strip() for a, b in zip(begin, [*begin[1:], None], strict=True)]
        for line in lines[start + 2 :]
    ]
    return [dict(zip(HEADER, row, strict=True)) for row in cells]


def muon(m: int, n: int) -> int:
    """Of five quintics: a Gram matrix, its square and the product with that."""
    k, n = sorted((m, n))
    return 5 * (4 * k * k * n + 2 * k**3)


def test_a_report_has_a_row_for_each_group_and_rule() -> None:
    model = Net()
    groups = natgrad.groups(model, Orthogonal(sides="none", iteration="muon"))
    with natgrad.Muon(model, groups) as optimizer:
        hidden, head, rest = rows_of(optimizer.report())
        assert str(optimizer) == optimizer.report()
    assert hidden == {
        "group": "hidden",
        "rule": "orthogonal(sides='none', iteration='muon')",
        "blocks": "2",
        "matrices": "4",
        "factors": "-",
        "owners": "-",
        "workers": "0",
        "flops a step": f"{muon(4, 5) + 3 * muon(4, 6):.3g}",
        "s to invert": "-",
        "bytes sent": "0 B",
    }
    assert (head["group"], rest["group"]) == ("head", "rest")
    assert head["rule"] == rest["rule"] == "adam"
    assert (head["matrices"], head["flops a step"]) == ("-", "0")


def test_of_kfac_each_rule_of_a_host_group_has_a_row() -> None:
    model = Net()
    host = torch.optim.SGD(model.parameters(), lr=0.1)
    rules = [("head", EKFAC()), ("hidden", Kronecker())]
    with natgrad.KFAC(model, host, rule=rules, length=natgrad.Free()) as kfac:
        rows = rows_of(kfac.report())
    assert [row["group"] for row in rows] == ["0"] * len(rows)
    found = {row["rule"]: row for row in rows}
    # into the eigenbases and out again, of (4, 6) with the bias
    assert found["kronecker"]["flops a step"] == str(4 * 4 * 6 * (4 + 6))
    assert found["kronecker"]["factors"] == "A, G"
    assert found["ekfac"]["factors"] == "A, G, S"
    assert float(found["ekfac"]["s to invert"]) > 0


def test_ranks_and_bytes_are_the_plans() -> None:
    model = nn.Sequential(nn.Linear(5, 4, bias=False), nn.Linear(4, 4, bias=False))
    rule = Kronecker(source="gradients", power=0.25, style="whole")
    with natgrad.SPNGD(model, lr=0.1, rule=rule) as optimizer:
        engine = optimizer.engine
        blocks = blocks_by_group(engine.blocks, optimizer.param_groups)
        plan = make_plan([b.spec for b in engine.blocks], world=4, strategy="spngd")
        _, row = group_rows(blocks, plan, engine.statistics.cost, 4)
    found = dict(zip(HEADER, row, strict=True))
    assert found["factors"] == "R, L"
    assert found["owners"] == found["workers"] == "0-1"
    # every rank but the worker sends its gradient, the worker sends the weights
    assert found["bytes sent"] == f"{4 * (20 + 16) * (3 + 1)} B"


@pytest.mark.parametrize(
    ("rule", "flops"),
    [
        (Plain(), 0),
        (Adam(), 0),
        (Kronecker(style="factored"), 2 * 4 * 6 * (4 + 6)),
        (Kronecker(style="factored", sides="inputs"), 2 * 4 * 6 * 6),
        # the gradient into the bases, where its average is, and out again
        (EigenAdam(), 2 * 2 * 4 * 6 * (4 + 6)),
        # without factors the bias is no column
        (Orthogonal(sides="none", iteration="muon"), muon(4, 5)),
    ],
)
def test_flops_are_those_of_the_products(rule: Any, flops: int) -> None:
    with natgrad.SPNGD(nn.Linear(5, 4), lr=0.1, rule=rule) as optimizer:
        (block, *_) = optimizer.engine.blocks
        assert flops_of(block.rule, block.spec) == flops


def test_a_rule_that_needs_values_is_not_counted() -> None:
    class Asks(Plain):
        def apply(self, x: Any) -> Any:
            return x.direction if x.direction.sum() > 0 else -x.direction

    with natgrad.SPNGD(nn.Linear(5, 4), lr=0.1) as optimizer:
        assert flops_of(Asks(), optimizer.engine.blocks[0].spec) is None


def test_a_rule_is_shown_with_what_is_not_usual() -> None:
    assert short(Kronecker()) == "kronecker"
    assert short(EKFAC(style="relative")) == "ekfac(style='relative')"
