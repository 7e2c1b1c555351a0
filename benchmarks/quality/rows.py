"""The contenders, by the names that the ledger has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import natgrad
from benchmarks.quality.contenders import ACTIVATIONS, Contender
from natgrad import (
    Adam,
    EigenAdam,
    Every,
    FixedNorm,
    Free,
    KLClip,
    Kronecker,
    LayerTrust,
    Options,
    Orthogonal,
    Paced,
    Plain,
)
from natgrad.math.polar import quintics

RATES = (0.02, 0.04, 0.08)
PMUON = Orthogonal(source="gradients", power=0.25)
SOAP = EigenAdam(source="gradients", late=True, basis="tracked", moments="keep")
# With bases by eigendecomposition, which do not stay near the last ones
EXACT = EigenAdam(source="gradients", moments="keep")
# Polar's default before, half-whitened, and the same with the factors of gradients
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
FULL = Orthogonal(sides="inputs", whitening="full")
NOR = replace(ACTIVATIONS, beta2=0.95)
EIGEN_INPUTS = EigenAdam(sides="inputs", orthogonal=True)


def own(base: Options, *, split: Any = False, vocabulary: Any = None, **changes: Any):
    """One `natgrad.Polar` for all parameters, with options changed."""
    options = replace(base, **changes)
    return Contender(
        rule=options.rule,
        lrs=RATES,
        whole=options,
        split=split,
        vocabulary=vocabulary,
    )


PUBLISHED = {
    "normuon": Contender(rule=Orthogonal(sides="none", beta2=0.95), lrs=RATES),
    "muonh": Contender(
        rule=Orthogonal(sides="none"),
        lrs=RATES,
        length=LayerTrust(memory=None),
        decay=FixedNorm(),
    ),
    "newton-muon": Contender(
        rule=Orthogonal(sides="inputs", whitening="full"),
        lrs=RATES,
        damping=0.2,
        refresh=Every(5, 5),
    ),
    "shampoo": Contender(
        rule=Kronecker(source="gradients", power=0.25, style="whole"),
        lrs=RATES,
        damping=1e-6,
    ),
    "kfac-clip": Contender(
        rule=Kronecker(style="eigen"),
        lrs=RATES,
        length=KLClip(kappa=1e-3),
        damping=0.003,
        refresh=Every(5, 5),
    ),
}
SOAP_MUON = replace(GRADIENTS, rule=replace(SOAP, orthogonal=True), damping=1e-8)
SOAP_MUON_INPUTS = replace(SOAP, orthogonal=True, sides="inputs")
# 12 quintics leave singular values of six decades within 1e-6
NEARLY_EXACT = replace(FULL, beta2=0.95, iteration=quintics(1e-6, 12))
SLOW = Adam(rate=0.05)
CONTENDERS: dict[str, Contender] = {
    # natgrad.Polar(model, lr), as it is
    "polar": own(natgrad.Polar.defaults, vocabulary=natgrad.Polar.vocabulary.rate),
    "polar-exact": own(
        natgrad.Polar.defaults,
        rule=NEARLY_EXACT,
        vocabulary=natgrad.Polar.vocabulary.rate,
    ),
    **{
        f"polar-vocabulary-{rate:g}": own(WHOLE, vocabulary=rate)
        for rate in (0.05, 0.1, 0.2)
    },
    # its default before: half-whitened, no even rows
    "polar-half": own(WHOLE, vocabulary=0.1),
    "polar-nor": own(WHOLE, rule=NOR, vocabulary=0.1),
    "polar-fixed": own(WHOLE, decay=FixedNorm(), vocabulary=0.1),
    # of hidden matrices alone
    "polar-fixed-hidden": own(WHOLE, split="fixed"),
    "polar-0.9": own(WHOLE, momentum=0.9, vocabulary=0.05),
    "polar-soap-muon": own(SOAP_MUON, vocabulary=0.05),
    # what may close the gap of Polar on a language model at small batch
    "polar-nor-0.05": own(WHOLE, rule=NOR, vocabulary=0.05),
    "polar-both-0.05": own(WHOLE, rule=Orthogonal(), vocabulary=0.05),
    "polar-soap-muon-inputs": own(SOAP_MUON, rule=SOAP_MUON_INPUTS, vocabulary=0.05),
    "polar-eigen-inputs": own(WHOLE, rule=EIGEN_INPUTS, damping=1e-8, vocabulary=0.05),
    # whitened in full, as Newton-Muon
    "polar-full": own(WHOLE, rule=FULL, damping=0.2, vocabulary=0.1),
    "polar-full-nor": own(
        WHOLE, rule=replace(FULL, beta2=0.95), damping=0.2, vocabulary=0.1
    ),
    "polar-gradients": own(GRADIENTS, vocabulary=0.05),
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
    "pmuon-nor-0.8": Contender(
        rule=replace(PMUON, beta2=0.95), lrs=RATES, momentum=0.8
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
    # published rules that had no row before: at the protocol's momentum, and Polar's
    **{
        name + suffix: replace(row, momentum=momentum)
        for suffix, momentum in (("", None), ("-0.8", 0.8))
        for name, row in PUBLISHED.items()
    },
    # one group for everything, or those of `natgrad.groups`
    "whole-activations": own(WHOLE),
    "whole-activations-nor": own(WHOLE, rule=NOR),
    "whole-activations-both": own(WHOLE, rule=Orthogonal()),
    "whole-activations-split": own(WHOLE, split=True),
    "whole-activations-split-0.05": own(WHOLE, fallback=SLOW, split=True),
    "whole-activations-embeddings": own(WHOLE, fallback=SLOW, split="embeddings"),
    "whole-eigen-inputs": own(WHOLE, rule=EIGEN_INPUTS, damping=1e-8),
    "whole-eigen-inputs-embeddings": own(
        WHOLE,
        rule=EIGEN_INPUTS,
        damping=1e-8,
        fallback=SLOW,
        split="embeddings",
    ),
    "whole-eigen-both": own(WHOLE, rule=EigenAdam(orthogonal=True), damping=1e-8),
    "whole-gradients": own(GRADIENTS),
    "whole-gradients-split": own(GRADIENTS, split=True),
    "whole-gradients-tables": own(GRADIENTS, split="tables"),
    "whole-gradients-tables-slow": own(GRADIENTS, momentum=0.95, split="tables"),
    "whole-root-tables": own(
        GRADIENTS, rule=replace(PMUON, sides="inputs", power=0.5), split="tables"
    ),
    # PMuon for hidden matrices, Adam at a part of the rate else
    **{
        f"whole-split-{rate:g}": own(GRADIENTS, fallback=Adam(rate=rate), split=True)
        for rate in (0.02, 0.05, 0.1)
    },
    "whole-nor": own(GRADIENTS, rule=replace(PMUON, beta2=0.95)),
    "whole-nor-split-0.05": own(
        GRADIENTS, rule=replace(PMUON, beta2=0.95), fallback=SLOW, split=True
    ),
    "whole-soap-muon": own(SOAP_MUON),
    "whole-soap-muon-split-0.05": own(SOAP_MUON, fallback=SLOW, split=True),
}
