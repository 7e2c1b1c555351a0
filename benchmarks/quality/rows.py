"""The contenders, by the names that the ledger has."""

from __future__ import annotations

from dataclasses import replace

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
    # what may close the gap of Polar on a language model at small batch
    "polar-nor-0.05": Contender(
        rule=ACTIVATIONS,
        lrs=RATES,
        whole=replace(WHOLE, rule=replace(ACTIVATIONS, beta2=0.95)),
        vocabulary=0.05,
    ),
    "polar-both-0.05": Contender(
        rule=ACTIVATIONS,
        lrs=RATES,
        whole=replace(WHOLE, rule=Orthogonal()),
        vocabulary=0.05,
    ),
    "polar-soap-muon-inputs": Contender(
        rule=SOAP,
        lrs=RATES,
        whole=replace(
            GRADIENTS,
            rule=replace(SOAP, orthogonal=True, sides="inputs"),
            damping=1e-8,
        ),
        vocabulary=0.05,
    ),
    "polar-eigen-inputs": Contender(
        rule=ACTIVATIONS,
        lrs=RATES,
        whole=replace(
            WHOLE, rule=EigenAdam(sides="inputs", orthogonal=True), damping=1e-8
        ),
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
    # published rules that had no row before: at the protocol's momentum, and Polar's
    **{
        name + suffix: replace(row, momentum=momentum)
        for suffix, momentum in (("", None), ("-0.8", 0.8))
        for name, row in PUBLISHED.items()
    },
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
