"""The rules that are compared, as rows: what happens to hidden matrices.

All else (embedding, head, biases) follows one rule that is the same for every contender
of a protocol, so that a difference is the rule's. ``lr`` is that of the hidden
matrices. Contenders whose name begins with "whole" are one `natgrad.Polar` for all
parameters, as a user writes it, with nothing told but the learning rate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn

import natgrad
from natgrad import (
    Adam,
    AverageGradients,
    EigenAdam,
    Every,
    FixedNorm,
    Free,
    Kronecker,
    LayerTrust,
    Length,
    MuonLength,
    Options,
    Orthogonal,
    Paced,
    Plain,
    Rule,
)
from natgrad.math.polar import quintics

OFTEN = Every(1, 5)
MUON_LENGTH = MuonLength()


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A rule at Muon's length, with Nesterov momentum before it.

    Attributes:
        rule: of hidden matrices; None: Adam for them too.
        length: of their update. The rate of a free one is that of a mean loss.
        damping: relative to a factor's mean eigenvalue.
        refresh: of its factors.
        lrs: the learning rates that are tried, on a grid of factors of two.
        momentum: None: the protocol's.
        whole: the options of a `natgrad.Polar` for all parameters, instead of a split.
        split: the groups of that `Polar`: those of `natgrad.groups` (True), one for
            embeddings, which keep the factors of activations, and one for all else
            ("tables"), one for embeddings by the fallback ("embeddings"), one for
            hidden matrices, whose norms are fixed ("fixed"), or one in all.
        vocabulary: no groups are given to `Polar`, and Adam's rate for a vocabulary is
            this part of the learning rate.
    """

    rule: Rule | None
    lrs: tuple[float, ...]
    length: Length = MUON_LENGTH
    damping: float = 0.1
    refresh: natgrad.Refresh = OFTEN
    momentum: float | None = None
    whole: Options | None = None
    split: bool | Literal["tables", "embeddings", "fixed"] = False
    vocabulary: float | None = None


RATES = (0.02, 0.04, 0.08)
PMUON = Orthogonal(source="gradients", power=0.25)
SOAP = EigenAdam(source="gradients", late=True, basis="tracked", moments="keep")
# With bases by eigendecomposition, which do not stay near the last ones
EXACT = EigenAdam(source="gradients", moments="keep")
ACTIVATIONS = Orthogonal(sides="inputs")
# Polar of version 0.1, and the same with the factors of gradients
WHOLE = replace(
    natgrad.Polar.defaults,
    rule=ACTIVATIONS,
    damping=1.0,
    refresh=Paced(Every(5, 5)),
    factor_decay=0.8,
    fallback=Adam(rate=0.2, beta2=0.999),
    momentum=0.8,
    weight_decay=0.01,
)
GRADIENTS = replace(
    WHOLE, rule=PMUON, damping=0.1, refresh=Every(1, 5), factor_decay=0.95
)
CONTENDERS: dict[str, Contender] = {
    # natgrad.Polar(model, lr), as it is
    "polar": Contender(
        rule=ACTIVATIONS,
        lrs=RATES,
        whole=natgrad.Polar.defaults,
        vocabulary=natgrad.Polar.vocabulary.rate,
    ),
    # the same with 12 quintics, which leave singular values of six decades within 1e-6
    "polar-exact": Contender(
        rule=ACTIVATIONS,
        lrs=RATES,
        whole=replace(
            natgrad.Polar.defaults,
            rule=replace(ACTIVATIONS, iteration=quintics(1e-6, 12)),
        ),
        vocabulary=natgrad.Polar.vocabulary.rate,
    ),
    **{
        f"polar-vocabulary-{rate:g}": Contender(
            rule=ACTIVATIONS, lrs=RATES, whole=WHOLE, vocabulary=rate
        )
        for rate in (0.05, 0.1, 0.2)
    },
    "polar-nor": Contender(
        rule=ACTIVATIONS,
        lrs=RATES,
        whole=replace(WHOLE, rule=replace(ACTIVATIONS, beta2=0.95)),
        vocabulary=0.1,
    ),
    "polar-fixed": Contender(
        rule=ACTIVATIONS,
        lrs=RATES,
        whole=replace(WHOLE, decay=FixedNorm()),
        vocabulary=0.1,
    ),
    # of hidden matrices alone
    "polar-fixed-hidden": Contender(
        rule=ACTIVATIONS, lrs=RATES, whole=WHOLE, split="fixed"
    ),
    "polar-0.9": Contender(
        rule=ACTIVATIONS,
        lrs=RATES,
        whole=replace(WHOLE, momentum=0.9),
        vocabulary=0.05,
    ),
    "polar-soap-muon": Contender(
        rule=SOAP,
        lrs=RATES,
        whole=replace(GRADIENTS, rule=replace(SOAP, orthogonal=True), damping=1e-8),
        vocabulary=0.05,
    ),
    "polar-gradients": Contender(
        rule=PMUON, lrs=RATES, whole=GRADIENTS, vocabulary=0.05
    ),
    # SGD, LARS and K-FAC for hidden matrices
    "sgd": Contender(rule=Plain(), lrs=(5, 10, 20), length=Free(), momentum=0.85),
    "lars": Contender(rule=Plain(), lrs=RATES, length=LayerTrust()),
    "kfac": Contender(rule=Kronecker(), lrs=RATES, damping=0.03, refresh=Every(5, 5)),
    "adam": Contender(rule=None, lrs=(0.001, 0.002, 0.004)),
    "muon": Contender(rule=Orthogonal(sides="none"), lrs=RATES),
    "pmuon": Contender(rule=PMUON, lrs=RATES),
    # with the momentum of Polar
    "muon-0.8": Contender(rule=Orthogonal(sides="none"), lrs=RATES, momentum=0.8),
    "pmuon-0.8": Contender(rule=PMUON, lrs=RATES, momentum=0.8),
    "soap-muon-0.8": Contender(
        rule=replace(SOAP, orthogonal=True), lrs=RATES, damping=1e-8, momentum=0.8
    ),
    "polar-activations-0.8": Contender(
        rule=ACTIVATIONS, lrs=RATES, damping=1.0, refresh=Every(5, 5), momentum=0.8
    ),
    "pmuon-inputs": Contender(rule=replace(PMUON, sides="inputs"), lrs=RATES),
    # one side, by a Cholesky root: as cheap as today's Polar
    "root-inputs": Contender(rule=replace(PMUON, sides="inputs", power=0.5), lrs=RATES),
    "soap": Contender(rule=SOAP, lrs=RATES, damping=1e-8),
    "soap-muon": Contender(
        rule=replace(SOAP, orthogonal=True), lrs=RATES, damping=1e-8
    ),
    "soap-exact": Contender(rule=EXACT, lrs=RATES, damping=1e-8),
    "soap-muon-exact": Contender(
        rule=replace(EXACT, orthogonal=True), lrs=RATES, damping=1e-8
    ),
    "polar-activations": Contender(
        rule=ACTIVATIONS, lrs=RATES, damping=1.0, refresh=Every(5, 5)
    ),
    "whole-activations": Contender(rule=ACTIVATIONS, lrs=RATES, whole=WHOLE),
    "whole-gradients": Contender(rule=PMUON, lrs=RATES, whole=GRADIENTS),
    "whole-gradients-split": Contender(
        rule=PMUON, lrs=RATES, whole=GRADIENTS, split=True
    ),
    "whole-gradients-tables": Contender(
        rule=PMUON, lrs=RATES, whole=GRADIENTS, split="tables"
    ),
    "whole-gradients-tables-slow": Contender(
        rule=PMUON,
        lrs=RATES,
        whole=replace(GRADIENTS, momentum=0.95),
        split="tables",
    ),
    "whole-root-tables": Contender(
        rule=PMUON,
        lrs=RATES,
        whole=replace(GRADIENTS, rule=replace(PMUON, sides="inputs", power=0.5)),
        split="tables",
    ),
    # Polar by groups: PMuon for hidden matrices, Adam at a part of the rate else
    **{
        f"whole-split-{rate:g}": Contender(
            rule=PMUON,
            lrs=RATES,
            whole=replace(GRADIENTS, fallback=Adam(rate=rate)),
            split=True,
        )
        for rate in (0.02, 0.05, 0.1)
    },
    "whole-nor": Contender(
        rule=PMUON,
        lrs=RATES,
        whole=replace(GRADIENTS, rule=replace(PMUON, beta2=0.95)),
    ),
    "whole-nor-split-0.05": Contender(
        rule=PMUON,
        lrs=RATES,
        whole=replace(
            GRADIENTS, rule=replace(PMUON, beta2=0.95), fallback=Adam(rate=0.05)
        ),
        split=True,
    ),
    "pmuon-nor-0.8": Contender(
        rule=replace(PMUON, beta2=0.95), lrs=RATES, momentum=0.8
    ),
    "whole-soap-muon": Contender(
        rule=SOAP,
        lrs=RATES,
        whole=replace(GRADIENTS, rule=replace(SOAP, orthogonal=True), damping=1e-8),
    ),
    "whole-soap-muon-split-0.05": Contender(
        rule=SOAP,
        lrs=RATES,
        whole=replace(
            GRADIENTS,
            rule=replace(SOAP, orthogonal=True),
            damping=1e-8,
            fallback=Adam(rate=0.05),
        ),
        split=True,
    ),
    "whole-activations-nor": Contender(
        rule=ACTIVATIONS,
        lrs=RATES,
        whole=replace(WHOLE, rule=replace(ACTIVATIONS, beta2=0.95)),
    ),
    "whole-activations-both": Contender(
        rule=ACTIVATIONS, lrs=RATES, whole=replace(WHOLE, rule=Orthogonal())
    ),
    "whole-eigen-inputs": Contender(
        rule=ACTIVATIONS,
        lrs=RATES,
        whole=replace(
            WHOLE,
            rule=EigenAdam(sides="inputs", orthogonal=True),
            damping=1e-8,
        ),
    ),
    "whole-eigen-both": Contender(
        rule=ACTIVATIONS,
        lrs=RATES,
        whole=replace(WHOLE, rule=EigenAdam(orthogonal=True), damping=1e-8),
    ),
    "whole-activations-split-0.05": Contender(
        rule=ACTIVATIONS,
        lrs=RATES,
        whole=replace(WHOLE, fallback=Adam(rate=0.05)),
        split=True,
    ),
    "whole-activations-embeddings": Contender(
        rule=ACTIVATIONS,
        lrs=RATES,
        whole=replace(WHOLE, fallback=Adam(rate=0.05)),
        split="embeddings",
    ),
    "whole-eigen-inputs-embeddings": Contender(
        rule=ACTIVATIONS,
        lrs=RATES,
        whole=replace(
            WHOLE,
            rule=EigenAdam(sides="inputs", orthogonal=True),
            damping=1e-8,
            fallback=Adam(rate=0.05),
        ),
        split="embeddings",
    ),
    "whole-activations-split": Contender(
        rule=ACTIVATIONS, lrs=RATES, whole=WHOLE, split=True
    ),
}


def tables(model: nn.Module) -> list[dict[str, Any]]:
    """Embeddings by the factors of activations, all else by the optimizer's rule."""
    inside = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    own = {id(p) for m in inside for p in m.parameters()}
    named = list(model.named_parameters())
    groups: list[dict[str, Any]] = [
        {"params": [(n, p) for n, p in named if id(p) not in own]}
    ]
    if own:
        parts = {"rule": ACTIVATIONS, "damping": 1.0, "refresh": Every(5, 5)}
        groups.append({"params": [(n, p) for n, p in named if id(p) in own], **parts})
    return groups


def embeddings(model: nn.Module, rule: Rule) -> list[dict[str, Any]]:
    """Embeddings by Adam's rule, all else by the optimizer's."""
    kept = natgrad.groups(model, rest=rule)
    tables = [g for g in kept if g["name"] == "embeddings"]
    own = {id(p) for g in tables for _, p in g["params"]}
    named = [(n, p) for n, p in model.named_parameters() if id(p) not in own]
    return [{"params": named}, *tables]


def make(
    contender: Contender,
    model: nn.Module,
    is_hidden: Callable[[str], bool],
    *,
    lr: float,
    momentum: float,
    rest_lr: float | None,
) -> natgrad.SPNGD:
    """Hidden matrices at ``lr``, the rest by Adam at ``rest_lr``, or left alone."""
    if contender.whole is not None:
        options = contender.whole
        split: list[dict[str, Any]] | None = None
        if contender.vocabulary is not None:
            rule = Adam(rate=contender.vocabulary)
            kind = type("Polar", (natgrad.Polar,), {"vocabulary": rule})
            return kind(model, lr=lr, options=options)
        if contender.split == "tables":
            split = tables(model)
        elif contender.split == "embeddings":
            split = embeddings(model, options.fallback)
        elif contender.split == "fixed":
            every = list(model.named_parameters())
            inside = [(n, p) for n, p in every if is_hidden(n) and p.dim() > 1]
            rest = [(n, p) for n, p in every if not (is_hidden(n) and p.dim() > 1)]
            split = [{"params": inside, "decay": FixedNorm()}, {"params": rest}]
        elif contender.split:
            split = natgrad.groups(model, options.rule, rest=options.fallback)
        else:
            split = [{"params": list(model.named_parameters())}]
        return natgrad.Polar(model, split, lr=lr, options=options)
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    matrices = [(n, p) for n, p in named if is_hidden(n) and p.dim() > 1]
    others = [(n, p) for n, p in named if not (is_hidden(n) and p.dim() > 1)]
    average = AverageGradients(nesterov=True)
    adam = {"rule": Adam(beta2=0.95), "length": Free()}
    hidden: dict[str, Any] = {"rule": contender.rule, "length": contender.length}
    groups: list[dict[str, Any]] = [
        {"params": matrices, "lr": lr, **(hidden if contender.rule else adam)},
    ]
    if rest_lr is not None:
        groups.append({"params": others, "lr": rest_lr, "momentum": 0.9, **adam})
    options = replace(natgrad.Polar.defaults, average=average, factor_decay=0.95)
    return natgrad.SPNGD(
        model,
        groups,
        lr=lr,
        momentum=contender.momentum or momentum,
        weight_decay=0.01,
        damping=contender.damping,
        refresh=contender.refresh,
        options=options,
    )
