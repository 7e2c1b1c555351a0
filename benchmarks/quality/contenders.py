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
    Decay,
    Decoupled,
    Every,
    FixedNorm,
    Free,
    Length,
    MuonLength,
    Options,
    Orthogonal,
    Rule,
)

OFTEN, MUON_LENGTH, DECOUPLED = Every(1, 5), MuonLength(), Decoupled()
ACTIVATIONS = Orthogonal(sides="inputs")


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
        decay: of hidden matrices' weights.
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
    decay: Decay = DECOUPLED
    whole: Options | None = None
    split: bool | Literal["tables", "embeddings", "fixed"] = False
    vocabulary: float | None = None


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
    hidden: dict[str, Any] = {
        "rule": contender.rule,
        "length": contender.length,
        "decay": contender.decay,
    }
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
