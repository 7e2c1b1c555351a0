"""The rules that are compared, as rows: what happens to hidden matrices.

All else (embedding, head, biases) follows Adam, the same for every contender, so that a
difference is the rule's. ``lr`` is that of the hidden matrices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

import natgrad
from natgrad import AverageGradients, EigenAdam, Every, MuonLength, Orthogonal, Rule

OFTEN = Every(1, 5)


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A rule at Muon's length, with Nesterov momentum before it.

    Attributes:
        rule: of hidden matrices; None: Adam for them too.
        damping: relative to a factor's mean eigenvalue.
        refresh: of its factors.
        lrs: the learning rates that are tried, on a grid of factors of two.
    """

    rule: Rule | None
    lrs: tuple[float, ...]
    damping: float = 0.1
    momentum: float = 0.95
    refresh: natgrad.Refresh = OFTEN


RATES = (0.02, 0.04, 0.08)
CONTENDERS: dict[str, Contender] = {
    "adam": Contender(rule=None, lrs=(0.001, 0.002, 0.004)),
    "muon": Contender(rule=Orthogonal(sides="none"), lrs=RATES),
    "pmuon": Contender(rule=Orthogonal(source="gradients", power=0.25), lrs=RATES),
    "pmuon-inputs": Contender(
        rule=Orthogonal(source="gradients", power=0.25, sides="inputs"), lrs=RATES
    ),
    "soap": Contender(
        rule=EigenAdam(source="gradients", moments="keep"), lrs=RATES, damping=1e-8
    ),
    "soap-muon": Contender(
        rule=EigenAdam(source="gradients", moments="keep", orthogonal=True),
        lrs=RATES,
        damping=1e-8,
    ),
    "polar-activations": Contender(
        rule=Orthogonal(sides="inputs"), lrs=RATES, damping=1.0, refresh=Every(5, 5)
    ),
}


def make(
    contender: Contender,
    model: nn.Module,
    is_hidden: Callable[[str], bool],
    *,
    lr: float,
    rest_lr: float,
) -> natgrad.SPNGD:
    """One optimizer with two groups: hidden matrices at ``lr``, the rest by Adam."""
    named = list(model.named_parameters())
    matrices = [(n, p) for n, p in named if is_hidden(n) and p.dim() > 1]
    others = [(n, p) for n, p in named if not (is_hidden(n) and p.dim() > 1)]
    average = AverageGradients(nesterov=True)
    adam = {"rule": natgrad.Adam(beta2=0.95), "length": natgrad.Free()}
    hidden: dict[str, Any] = {"rule": contender.rule, "length": MuonLength()}
    groups: list[dict[str, Any]] = [
        {"params": matrices, "lr": lr, **(hidden if contender.rule else adam)},
        {"params": others, "lr": rest_lr, "momentum": 0.9, **adam},
    ]
    options = replace(natgrad.Polar.defaults, average=average, factor_decay=0.95)
    return natgrad.SPNGD(
        model,
        groups,
        lr=lr,
        momentum=contender.momentum,
        damping=contender.damping,
        refresh=contender.refresh,
        options=options,
    )
