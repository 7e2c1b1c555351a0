"""Who competes: methods with what is fixed and what is tuned of each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import natgrad

Range = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A method of the recipes, what is fixed of it, and what is tuned.

    ``tuned`` maps options to ranges, searched by their logarithm; an option that begins
    with ``1-`` is searched by the logarithm of what is missing to 1.
    """

    method: str
    tuned: Mapping[str, Range]
    fixed: Mapping[str, str] = field(default_factory=lambda: {})

    def settings(self, point: Sequence[float]) -> dict[str, float]:
        """The options at a point of the unit cube."""
        found: dict[str, float] = {}
        for (name, (low, high)), u in zip(self.tuned.items(), point, strict=False):
            value = math.exp(math.log(low) + u * (math.log(high) - math.log(low)))
            missing = name.startswith("1-")
            found[name.removeprefix("1-")] = 1 - value if missing else value
        return found


LR, DAMPING = "optimizer.lr", "curvature.damping"
MOMENTUM: dict[str, Range] = {"1-optimizer.momentum": (0.02, 0.2)}
# What is scale-free does better with less of it in short runs.
LESS: dict[str, Range] = {"1-optimizer.momentum": (0.05, 0.4)}
TRUSTED: dict[str, Range] = {LR: (0.02, 0.4)}
SOAPS: Range = (2e-3, 6e-2)
BOLD: Range = (0.01, 0.15)
# Half of the points in `LESS` have more momentum than short runs like, which leaves few
# learning rates: the strongest rivals are tuned like Polar's defaults too.
POLARS_MOMENTUM = {"optimizer.momentum": str(natgrad.Polar.defaults.momentum)}

# Adam in K-FAC's eigenbasis: what else Polar could be made of.
ADAM: dict[str, str] = {"curvature.rule": "eigen_adam", DAMPING: "1e-3"}
KRONECKER: dict[str, str] = {
    "curvature.rule": "kronecker",
    "curvature.style": "relative",
}
EKFAC: dict[str, str] = {"curvature.rule": "ekfac", "curvature.style": "relative"}
INPUTS: dict[str, str] = {"curvature.sides": "inputs"}

CONTENDERS: dict[str, Contender] = {
    "sgd": Contender(method="sgd", tuned={LR: (0.05, 3.0), **MOMENTUM}),
    "lars": Contender(method="lars", tuned={**TRUSTED, **LESS}),
    "adamw": Contender(
        method="adamw",
        tuned={LR: (1e-3, 6e-2), **MOMENTUM},
        fixed={"optimizer.beta2": "0.95"},  # 0.999 is too long a memory for such runs
    ),
    "muon": Contender(
        method="muon",
        tuned={LR: (0.01, 0.5), **LESS},
        fixed={"optimizer.rest": "adamw"},
    ),
    "muon+trust": Contender(method="muon_trust", tuned={**TRUSTED, **LESS}),
    "muon+trust, only lr tuned": Contender(
        method="muon_trust", tuned=TRUSTED, fixed=POLARS_MOMENTUM
    ),
    "soap": Contender(method="soap", tuned={LR: SOAPS, **LESS}),
    "soap, only lr tuned": Contender(
        method="soap", tuned={LR: SOAPS}, fixed=POLARS_MOMENTUM
    ),
    # where six points of `soap` are best is a corner of their range
    "soap, momentum 0.5, only lr tuned": Contender(
        method="soap", tuned={LR: BOLD}, fixed={"optimizer.momentum": "0.5"}
    ),
    "soap, flat, momentum 0.5, only lr tuned": Contender(
        method="soap",
        tuned={LR: BOLD},
        fixed={"optimizer.momentum": "0.5", "optimizer.flat": "True"},
    ),
    "soap+trust": Contender(method="soap_trust", tuned={**TRUSTED, **LESS}),
    "soap+trust, only lr tuned": Contender(
        method="soap_trust", tuned=TRUSTED, fixed=POLARS_MOMENTUM
    ),
    "soap+trust, flat, only lr tuned": Contender(
        method="soap_trust",
        tuned=TRUSTED,
        fixed={**POLARS_MOMENTUM, "optimizer.flat": "True"},
    ),
    # without momentum, which it mixes with plain gradients and diverges by
    "shampoo": Contender(
        method="shampoo",
        tuned={LR: (0.05, 3.0), "optimizer.weight-decay": (1e-5, 1e-2)},
    ),
    "kfac": Contender(method="kfac", tuned={LR: (0.05, 3.0), DAMPING: (1e-3, 1.0)}),
    "spngd": Contender(method="spngd", tuned={LR: (0.01, 0.5), DAMPING: (1e-3, 1.0)}),
    "polar": Contender(method="polar", tuned={**TRUSTED, **LESS}),
    # its defaults: what a user gets who tunes the learning rate alone
    "polar, only lr tuned": Contender(method="polar", tuned=TRUSTED),
    # for text: embeddings by Adam's rule, to which Muon and SOAP leave them too
    "polar, tables skipped, only lr tuned": Contender(
        method="polar", tuned=TRUSTED, fixed={"curvature.skip": "tokens positions"}
    ),
    "kfac+adam+trust": Contender(method="polar", tuned={**TRUSTED, **LESS}, fixed=ADAM),
}

# Named as the ledger of runs has them.
VARIANTS: dict[str, tuple[dict[str, str], Range]] = {
    "as it is": ({}, (0.05, 0.2)),
    "statistics: both": ({"curvature.sides": "both"}, (0.05, 0.2)),
    "statistics: outputs": ({"curvature.sides": "outputs"}, (0.05, 0.2)),
    # orthogonalised alone: Muon with all else as in Polar
    "statistics: none (damping 1e6)": ({DAMPING: "1e6"}, (0.05, 0.2)),
    "scale: orthogonal, whitening full": ({"curvature.whitening": "full"}, (0.05, 0.2)),
    "scale: kronecker": ({**KRONECKER, **INPUTS}, (0.05, 0.2)),
    "scale: kronecker, statistics: both": (KRONECKER, (0.05, 0.2)),
    "scale: adaptive, statistics: both": (ADAM, (0.05, 0.2)),
    "scale: adaptive, statistics: both, basis: tracked": (
        {**ADAM, "curvature.basis": "tracked"},
        (0.05, 0.2),
    ),
    "scale: adaptive, statistics: both, moments: restart": (
        {**ADAM, "curvature.moments": "restart"},
        (0.05, 0.2),
    ),
    "scale: corrected, statistics: both": (EKFAC, (0.05, 0.2)),
    "trust: none": ({"curvature.length": "free"}, (0.01, 1.0)),
    "momentum of the update": ({"optimizer.average": "updates"}, (0.0025, 0.02)),
    "momentum 0.6": ({"optimizer.momentum": "0.6"}, (0.05, 0.2)),
    "momentum 0.9": ({"optimizer.momentum": "0.9"}, (0.05, 0.2)),
    "momentum 0.95": ({"optimizer.momentum": "0.95"}, (0.05, 0.2)),
    "no Nesterov": ({"optimizer.nesterov": "False"}, (0.05, 0.2)),
    "statistics every step": (
        {"refresh.statistics": "1", "refresh.inverses": "1"},
        (0.05, 0.2),
    ),
    "statistics every 20 steps": (
        {"refresh.statistics": "20", "refresh.inverses": "20"},
        (0.05, 0.2),
    ),
    "statistics of all examples": ({"curvature.subsample": "1"}, (0.05, 0.2)),
    "damping 0.1": ({DAMPING: "0.1"}, (0.05, 0.2)),
    "damping 10": ({DAMPING: "10"}, (0.05, 0.2)),
    "norms: at the whole learning rate": (
        {"curvature.fallback-rate": "1"},
        (0.05, 0.2),
    ),
    "norms: plain gradient": ({"curvature.fallback": "plain"}, (0.05, 0.2)),
    "norms: unit Fisher": ({"curvature.norm": "unit"}, (0.05, 0.2)),
}
ABLATIONS: dict[str, Contender] = {
    name: Contender(method="polar", tuned={LR: lrs}, fixed=change)
    for name, (change, lrs) in VARIANTS.items()
}
