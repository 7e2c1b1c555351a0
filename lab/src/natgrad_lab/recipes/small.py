"""Update rules for the small recipes: one row a method, starting points by hand.

Two batch sizes: a small one, and one so large that few steps are left.
"""

from dataclasses import dataclass, field
from typing import Any

from natgrad_lab.train.config import CurvatureConfig, OptimizerConfig, RefreshConfig


@dataclass(frozen=True, kw_only=True)
class Rule:
    """An optimizer and, when it has them, its curvature settings."""

    optimizer: OptimizerConfig
    curvature: CurvatureConfig = field(default_factory=CurvatureConfig)
    refresh: RefreshConfig = field(default_factory=RefreshConfig)


def rules(large: bool) -> dict[str, Rule]:
    """Every method of the comparison, for a small or a large batch."""
    lr = 0.4 if large else 0.1
    kfac = CurvatureConfig(damping=0.03, kappa=1e-2, norm="unit")
    spngd = CurvatureConfig(damping=0.03, factor_decay=0.95, norm="unit")
    ahead: dict[str, Any] = {"momentum": 0.8, "nesterov": True}
    often = RefreshConfig(statistics=1, inverses=5 if large else 10)
    return {
        "sgd": Rule(optimizer=OptimizerConfig(lr=lr, weight_decay=5e-4)),
        "adamw": Rule(
            optimizer=OptimizerConfig(
                name="adamw", lr=1e-2 if large else 2e-3, weight_decay=0.05
            )
        ),
        "muon": Rule(
            optimizer=OptimizerConfig(
                name="muon", lr=0.05, rest_lr=lr, momentum=0.9, weight_decay=5e-4
            )
        ),
        "soap": Rule(
            optimizer=OptimizerConfig(
                name="soap", lr=1e-2 if large else 3e-3, momentum=0.95, beta2=0.95
            )
        ),
        "lars": Rule(optimizer=OptimizerConfig(lr=0.1, trust=True, **ahead)),
        "muon_trust": Rule(
            optimizer=OptimizerConfig(name="muon", lr=0.1, trust=True, **ahead)
        ),
        "soap_trust": Rule(
            optimizer=OptimizerConfig(
                name="soap", lr=0.1, trust=True, beta2=0.95, interval=5, **ahead
            )
        ),
        "polar": Rule(
            optimizer=OptimizerConfig(name="polar", lr=0.1),
        ),
        "shampoo": Rule(
            # Its momentum mixes plain and preconditioned gradients, which diverges at
            # any rate, and it makes no progress until the first roots are there.
            optimizer=OptimizerConfig(
                name="shampoo", lr=0.3, momentum=0.0, interval=1, weight_decay=5e-4
            )
        ),
        "kfac": Rule(
            optimizer=OptimizerConfig(kfac=True, lr=lr, weight_decay=5e-4),
            curvature=kfac,
            refresh=often,
        ),
        "spngd": Rule(
            optimizer=OptimizerConfig(name="spngd", lr=0.05 if large else 0.02),
            curvature=spngd,
            refresh=RefreshConfig(kind="adaptive"),
        ),
    }
