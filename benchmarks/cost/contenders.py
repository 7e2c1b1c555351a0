"""Rules of natgrad and their public implementations, on the same matrices.

Hidden matrices and convolutions follow the rule, everything else AdamW, for all. Peers
see convolutions as matrices, as natgrad does, and iterate in float32 where they would
take bfloat16, which a CPU runs slowly.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import natgrad
from benchmarks.cases import Case
from benchmarks.common import (
    ALWAYS,
    BASELINE,
    FULL,
    PLAIN,
    STATISTICS,
    Contender,
    Policies,
)
from benchmarks.contenders import state_of, training_step
from natgrad_lab.train.flat import Flat
from natgrad_lab.train.parts import Parts

LR, INTERVAL = 1e-3, 10
MATRICES = ("hidden", "convolutions")
MUON = natgrad.Orthogonal(sides="none", iteration="muon")
TRUST = natgrad.LayerTrust(reference="now", memory=None)
AFTER = "after"
OURS, THEIRS = (FULL, AFTER, STATISTICS), (FULL, PLAIN)
"""Kinds of steps where something is refreshed every `INTERVAL` steps only.

``AFTER``: the first one with new bases, into which SOAP projects its momentum.
"""


@dataclass(frozen=True, kw_only=True)
class Made:
    """A contender, and the optimizer inside for counting its operations alone."""

    contender: Contender
    optimizer: Optimizer
    model: nn.Module
    case: Case


Make = Callable[[Case], Made]


def policies(kinds: tuple[str, ...]) -> Policies:
    """One full step in `INTERVAL`, most of the last kind; or one kind of step."""
    if len(kinds) == 1:
        return ALWAYS
    rest = INTERVAL + 1 - len(kinds)
    return {f"1/{INTERVAL}": dict.fromkeys(kinds, 1) | {kinds[-1]: rest}}


def made(
    name: str,
    case: Case,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    kinds: tuple[str, ...] = (PLAIN,),
    prepare: Callable[[str], None] = lambda kind: None,
    state: Callable[[], Any] | None = None,
    rounds: int = 1000,
) -> Made:
    """A contender of whole training steps."""
    contender = Contender(
        name=name,
        step=training_step(model, optimizer, case, "contiguous"),
        kinds=kinds,
        policies=policies(kinds),
        prepare=prepare,
        max_rounds=rounds,
        state=state or (lambda: state_of(optimizer)),
    )
    return Made(contender=contender, optimizer=optimizer, model=model, case=case)


# -- natgrad ---------------------------------------------------------------------------


def ours(name: str, refreshes: bool = False, **parts: Any) -> Make:
    """SPNGD with these parts on the matrices, AdamW's rule on the rest."""

    def make(case: Case) -> Made:
        model = case.model()
        refresh = natgrad.Every(1, len(OURS) if refreshes else 1)
        options = replace(
            natgrad.Muon.defaults, **{"lr": LR, "refresh": refresh, "loss": case.loss}
        )
        options = replace(options, **parts)
        groups = natgrad.groups(model, options.rule)
        optimizer = natgrad.SPNGD(model, groups, options=options)
        engine = optimizer.engine

        def state() -> list[Any]:
            kept = engine.statistics.states.values()
            factors = [[s.average, s.inverse, s.history] for s in kept]
            moments = [[m.square, m.mean] for m in engine.moments.states.values()]
            return [state_of(optimizer), factors, moments]

        def prepare(kind: str) -> None:
            due = OURS[engine.step % len(OURS)]
            if refreshes and due != kind:
                raise RuntimeError(f"{name} is about to make a {due}, not a {kind}")

        kinds = OURS if refreshes else (PLAIN,)
        return made(
            name, case, model, optimizer, kinds=kinds, prepare=prepare, state=state
        )

    return make


# -- others' ---------------------------------------------------------------------------


def split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The matrices that rules are for, and all else."""
    groups = natgrad.groups(model, MUON)
    found: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for group in groups:
        found[group["name"] in MATRICES] += [p for _, p in group["params"]]
    return found[True], found[False]


def beside_adamw(
    model: nn.Module, make: Callable[[list[nn.Parameter]], Any]
) -> tuple[Parts, Any]:
    """A peer on matrices, AdamW on the rest; and the peer itself."""
    matrices, rest = split(model)
    inside: list[Any] = []

    def kept(params: list[nn.Parameter]) -> Any:
        inside.append(make(params))
        return inside[0]

    flat = Flat(matrices, kept)
    adamw = torch.optim.AdamW(rest, lr=LR, weight_decay=0.0)
    return Parts([(flat, False), (adamw, False)]), inside[0]


def sgd(case: Case) -> Made:
    model = case.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    return made(BASELINE, case, model, optimizer)


class InFloat32(Parts):
    """Steps in which torch's Muon and Dion's do not round to bfloat16."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        wide = mock.patch.object(torch, "bfloat16", torch.float32)
        with wide, mock.patch.object(Tensor, "bfloat16", lambda x: x.clone()):
            return super().step(closure)


def torch_muon(case: Case) -> Made:
    model = case.model()
    optimizer, _ = beside_adamw(model, partial(torch.optim.Muon, lr=LR))
    optimizer.__class__ = InFloat32
    return made("Muon (torch, float32)", case, model, optimizer)


def borrowed(name: str, title: str, **settings: Any) -> Make:
    """A Muon of pytorch_optimizer, in float32."""

    def make(case: Case) -> Made:
        import pytorch_optimizer
        from pytorch_optimizer.optimizer.muon import base, normuon
        from pytorch_optimizer.optimizer.utils import matrix

        wide = partial(matrix.zero_power_via_newton_schulz_5, dtype=torch.float32)
        for module in (base, normuon):
            if hasattr(module, "zero_power_via_newton_schulz_5"):
                module.zero_power_via_newton_schulz_5 = wide  # type: ignore[attr-defined]
        kind = getattr(pytorch_optimizer, name)

        def group(params: list[nn.Parameter]) -> Any:
            return kind([{"params": params, "use_muon": True}], lr=LR, **settings)

        model = case.model()
        optimizer, _ = beside_adamw(model, group)
        return made(title, case, model, optimizer)

    return make


def refreshing(name: str, frequency: Callable[[Any, int], None]) -> Make:
    """SOAP or Shampoo of pytorch_optimizer."""

    def make(case: Case) -> Made:
        import pytorch_optimizer

        kind = getattr(pytorch_optimizer, name)
        model = case.model()
        optimizer, peer = beside_adamw(model, partial(kind, lr=LR))
        return made(
            f"{name} (pytorch_optimizer)",
            case,
            model,
            optimizer,
            kinds=THEIRS,
            prepare=lambda kind: frequency(peer, 1 if kind == FULL else 10**9),
        )

    return make


def soap_frequency(peer: Any, every: int) -> None:
    for state in peer.state.values():
        state["precondition_frequency"] = every
    for group in peer.param_groups:
        group["precondition_frequency"] = every


def shampoo_frequency(peer: Any, every: int) -> None:
    peer.preconditioning_compute_steps = every


def simple(name: str, **settings: Any) -> Make:
    """LARS or LAMB of pytorch_optimizer."""

    def make(case: Case) -> Made:
        import pytorch_optimizer

        model = case.model()
        kind = partial(getattr(pytorch_optimizer, name), lr=LR, **settings)
        optimizer, _ = beside_adamw(model, kind)
        return made(f"{name} (pytorch_optimizer)", case, model, optimizer)

    return make


def as_written(function: Any = None, **_: Any) -> Any:
    """What `torch.compile` is called for, without it; also as a decorator."""
    return function or (lambda decorated: decorated)


def dion(name: str, folder: str | None) -> Make:
    """Muon or NorMuon of microsoft/dion, from a checkout, iterating in float32.

    Without ``torch.compile``, which nobody else here has either.
    """

    def make(case: Case) -> Made:
        if folder is None:
            raise ImportError("--dion FOLDER, a checkout of microsoft/dion, is missing")
        if folder not in sys.path:
            sys.path.insert(0, str(Path(folder)))
        with mock.patch.object(torch, "compile", as_written):
            import dion  # pyright: ignore[reportMissingImports]

        model, kind = case.model(), getattr(dion, name)
        # five iterations with the coefficients that it has for them
        peer = partial(kind, lr=LR, nesterov=True, use_polar_express=False)
        optimizer, _ = beside_adamw(model, peer)
        optimizer.__class__ = InFloat32
        return made(f"{name} (Dion, float32)", case, model, optimizer)

    return make


def makers(checkout: str | None) -> list[Make]:
    """Everyone, the baseline first, each rule followed by its public forms."""
    soap = natgrad.SOAP.defaults
    gradients = {"damping": 1e-6, "factor_decay": 0.95}
    free = {"length": natgrad.Free(), "average": natgrad.AverageGradients()}
    pmuon = replace(MUON, sides="both", source="gradients", whitening="full", power=0.3)
    return [
        sgd,
        ours("natgrad Muon"),
        torch_muon,
        borrowed("Muon", "Muon (pytorch_optimizer, float32)"),
        dion("Muon", checkout),
        ours("natgrad NorMuon", rule=replace(MUON, beta2=0.95)),
        borrowed("NorMuon", "NorMuon (pytorch_optimizer, float32)"),
        dion("NorMuon", checkout),
        ours(
            "natgrad MuonH",
            length=natgrad.LayerTrust(memory=None),
            decay=natgrad.FixedNorm(),
        ),
        ours(
            "natgrad Newton-Muon",
            refreshes=True,
            rule=replace(MUON, sides="inputs", whitening="full"),
            damping=0.2,
            factor_decay=0.95,
        ),
        ours("natgrad PMuon", refreshes=True, rule=pmuon, **gradients),
        ours("natgrad SOAP", refreshes=True, rule=soap.rule, **gradients, **free),
        refreshing("SOAP", soap_frequency),
        ours(
            "natgrad SOAP-Muon",
            refreshes=True,
            rule=replace(soap.rule, orthogonal=True),  # type: ignore[type-var]
            **gradients,
        ),
        ours(
            "natgrad Shampoo",
            refreshes=True,
            rule=natgrad.Shampoo.defaults.rule,
            damping=1e-6,
            factor_decay=1.0,
        ),
        refreshing("Shampoo", shampoo_frequency),
        ours(
            "natgrad LARS",
            rule=natgrad.Plain(),
            length=TRUST,
            average=natgrad.AverageUpdates(),
        ),
        simple("LARS", momentum=0.9),
        ours(
            "natgrad LAMB",
            rule=natgrad.Adam(),
            length=TRUST,
            average=natgrad.AverageGradients(),
        ),
        simple("Lamb"),
    ]
