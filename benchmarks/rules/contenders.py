"""Who competes: methods with what is fixed and what is tuned of each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

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
TRUSTED: dict[str, Range] = {LR: (0.02, 0.4)}

# What the recipes had before the ablation found less of it to be better.
BEFORE: dict[str, str] = {"optimizer.momentum": "0.95"}
# Polar as it was then, as the options of SPNGD, and what each variant changes of it.
POLAR: dict[str, str] = {
    **BEFORE,
    "optimizer.name": "spngd",
    "optimizer.average": "gradient",
    "optimizer.nesterov": "True",
    "curvature.statistics": "inputs",
    "curvature.scale": "orthogonal",
    "curvature.trust": "layer",
    "curvature.rest": "adaptive",
    "curvature.norm": "skip",
    "curvature.damping-style": "relative",
}
# Adam in K-FAC's eigenbasis: what else Polar could be made of.
ADAM: dict[str, str] = {
    "curvature.scale": "adaptive",
    "curvature.statistics": "both",
    DAMPING: "1e-3",
}

CONTENDERS: dict[str, Contender] = {
    "sgd": Contender(method="sgd", tuned={LR: (0.05, 3.0), **MOMENTUM}),
    "lars": Contender(method="lars", tuned={**TRUSTED, **MOMENTUM}),
    "adamw": Contender(method="adamw", tuned={LR: (1e-3, 6e-2), **MOMENTUM}),
    "muon": Contender(
        method="muon",
        tuned={LR: (0.01, 0.5), "optimizer.rest-lr": (0.02, 1.0)},
        fixed={"optimizer.momentum": "0.95"},  # as published
    ),
    "muon+trust": Contender(method="muon_trust", tuned={**TRUSTED, **MOMENTUM}),
    # at the momentum of the recipes, which is Polar's: one setting to tune, as there
    "muon+trust, only lr tuned": Contender(method="muon_trust", tuned=TRUSTED),
    "muon+trust at momentum 0.95, only lr tuned": Contender(
        method="muon_trust", tuned=TRUSTED, fixed=BEFORE
    ),
    "soap": Contender(method="soap", tuned={LR: (2e-3, 6e-2), **MOMENTUM}),
    "soap+trust": Contender(method="soap_trust", tuned={**TRUSTED, **MOMENTUM}),
    "soap+trust, only lr tuned": Contender(method="soap_trust", tuned=TRUSTED),
    "soap+trust at momentum 0.95, only lr tuned": Contender(
        method="soap_trust", tuned=TRUSTED, fixed=BEFORE
    ),
    # without momentum, which it mixes with plain gradients and diverges by
    "shampoo": Contender(
        method="shampoo",
        tuned={LR: (0.05, 3.0), "optimizer.weight-decay": (1e-5, 1e-2)},
    ),
    "kfac": Contender(method="kfac", tuned={LR: (0.05, 3.0), DAMPING: (1e-3, 1.0)}),
    "spngd": Contender(method="spngd", tuned={LR: (0.01, 0.5), DAMPING: (1e-3, 1.0)}),
    "polar": Contender(method="polar", tuned={**TRUSTED, DAMPING: (0.1, 10.0)}),
    # its defaults: what a user gets who tunes the learning rate alone
    "polar, only lr tuned": Contender(method="polar", tuned=TRUSTED),
    "polar at momentum 0.95": Contender(
        method="polar", tuned={**TRUSTED, DAMPING: (0.1, 10.0)}, fixed=BEFORE
    ),
    "polar at momentum 0.95, only lr tuned": Contender(
        method="polar", tuned=TRUSTED, fixed=BEFORE
    ),
    "kfac+adam+trust": Contender(
        method="polar", tuned={**TRUSTED, **MOMENTUM}, fixed={**POLAR, **ADAM}
    ),
}

VARIANTS: dict[str, tuple[dict[str, str], Range]] = {
    "as it is": ({}, (0.05, 0.4)),
    "statistics: both": ({"curvature.statistics": "both"}, (0.05, 0.4)),
    "statistics: outputs": ({"curvature.statistics": "outputs"}, (0.05, 0.4)),
    # orthogonalised alone: Muon with all else as in Polar
    "statistics: none (damping 1e6)": ({DAMPING: "1e6"}, (0.05, 0.4)),
    "scale: orthogonal, whitening full": ({"curvature.whitening": "full"}, (0.05, 0.4)),
    "scale: kronecker": ({"curvature.scale": "kronecker"}, (0.05, 0.4)),
    "scale: kronecker, statistics: both": (
        {"curvature.scale": "kronecker", "curvature.statistics": "both"},
        (0.05, 0.4),
    ),
    "scale: adaptive, statistics: both": (
        ADAM,
        (0.05, 0.4),
    ),
    "scale: adaptive, statistics: both, basis: tracked": (
        {**ADAM, "curvature.basis": "tracked"},
        (0.05, 0.4),
    ),
    "scale: adaptive, statistics: both, moments: restart": (
        {**ADAM, "curvature.moments": "restart"},
        (0.05, 0.4),
    ),
    "scale: corrected, statistics: both": (
        {"curvature.scale": "corrected", "curvature.statistics": "both"},
        (0.05, 0.4),
    ),
    "trust: none": ({"curvature.trust": "none"}, (0.01, 1.0)),
    "momentum of the update": ({"optimizer.average": "update"}, (0.0025, 0.02)),
    "momentum 0.9": ({"optimizer.momentum": "0.9"}, (0.05, 0.4)),
    "momentum 0.8": ({"optimizer.momentum": "0.8"}, (0.05, 0.4)),
    "momentum 0.9, damping 0.3": (
        {"optimizer.momentum": "0.9", DAMPING: "0.3"},
        (0.05, 0.4),
    ),
    "no Nesterov": ({"optimizer.nesterov": "False"}, (0.05, 0.4)),
    "statistics every step": (
        {"refresh.statistics": "1", "refresh.inverses": "1"},
        (0.05, 0.4),
    ),
    "statistics every 20 steps": (
        {"refresh.statistics": "20", "refresh.inverses": "20"},
        (0.05, 0.4),
    ),
    "statistics of every 4th example": ({"curvature.subsample": "4"}, (0.05, 0.4)),
    "damping 0.1": ({DAMPING: "0.1"}, (0.05, 0.4)),
    "damping 10": ({DAMPING: "10"}, (0.05, 0.4)),
    "norms: plain gradient": ({"curvature.rest": "plain"}, (0.05, 0.4)),
    "norms: unit Fisher": ({"curvature.norm": "unit"}, (0.05, 0.4)),
}
ABLATIONS: dict[str, Contender] = {
    name: Contender(method="polar", tuned={LR: lrs}, fixed={**POLAR, **change})
    for name, (change, lrs) in VARIANTS.items()
}
