"""How curvature is estimated and applied: one frozen, validated dataclass."""

import math
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Literal

from natgrad.refresh import Every, Refresh

Damping = float | Callable[[int], float]
DampingStyle = Literal["eigen", "factored"]
Fisher = Literal["empirical", "sampled"]
Loss = Literal["mean", "sum", "tokens"]
Accumulation = Literal["mean", "sum"]
Sharing = Literal["expand", "reduce"]
Norm = Literal["skip", "unit", "diag", "full"]

CHOICES: dict[str, tuple[str, ...]] = {
    "damping_style": ("eigen", "factored"),
    "fisher": ("empirical", "sampled"),
    "loss": ("mean", "sum", "tokens"),
    "accumulation": ("mean", "sum"),
    "sharing": ("expand", "reduce"),
    "norm": ("skip", "unit", "diag", "full"),
}


@dataclass(frozen=True, kw_only=True)
class Curvature:
    """What `KFAC` and `SPNGD` have in common; each documents the options it takes.

    Attributes:
        damping: lambda, added to the Fisher: a number >= 0, or a function of the
            step (counted from 0).
        damping_style: ``"eigen"`` adds lambda to the eigenvalues of the Kronecker
            product (exact, "normal" damping); ``"factored"`` splits it between the
            two factors (pi-split) and inverts by Cholesky.
        decay: weight of the old value in the running average of a statistic, in
            [0, 1). 0 keeps only the newest estimate.
        refresh: when statistics and inverses are made anew.
        fisher: ``"empirical"`` uses the gradients of the training loss;
            ``"sampled"`` uses labels drawn from the model (`sampled_backward`).
        loss: what the loss does over its terms: ``"mean"`` over examples, ``"sum"``
            over examples, or ``"tokens"``: mean over examples and positions.
        accumulation: whether the loss of each of k micro-batches is divided by k
            (``"mean"``) or not (``"sum"``).
        sharing: how a linear layer treats dims between batch and features:
            ``"expand"`` (each position on its own) or ``"reduce"`` (averaged first).
        norm: the block kind of normalisation layers.
        norm_damping_ratio: rho, multiplies the damping of normalisation layers.
        skip: names of layers, or of modules that contain layers, that keep their plain
            gradient.
        subsample: estimate from every k-th example, starting at a random one; 1 uses
            all. Unbiased, and the same choice on every rank.
    """

    damping: Damping = 1e-3
    damping_style: DampingStyle = "eigen"
    decay: float = 0.95
    refresh: Refresh = field(default_factory=Every)
    fisher: Fisher = "empirical"
    loss: Loss = "mean"
    accumulation: Accumulation = "mean"
    sharing: Sharing = "expand"
    norm: Norm = "skip"
    norm_damping_ratio: float = 1.0
    skip: Collection[str] = ()
    subsample: int = 1

    def __post_init__(self) -> None:
        for name, legal in CHOICES.items():
            require_choice(name, getattr(self, name), legal)
        if not callable(self.damping):
            require_number("damping", self.damping, "a finite number >= 0", low=0.0)
        require_number("decay", self.decay, "in [0, 1)", low=0.0, below=1.0)
        require_number(
            "norm_damping_ratio", self.norm_damping_ratio, "a number > 0", above=0.0
        )
        if not isinstance(self.refresh, Refresh):
            raise TypeError(
                f"Invalid refresh={self.refresh!r}. Must be Every(...), "
                "Scheduled(...), Adaptive(...) or another natgrad.Refresh."
            )
        require_count("subsample", self.subsample)
        if isinstance(self.skip, str):
            raise TypeError(
                f"Invalid skip={self.skip!r}. Must be a collection of layer names."
            )
        # in one order on every rank, also if given as a set
        object.__setattr__(self, "skip", tuple(sorted(self.skip)))
        if self.loss == "tokens" and self.sharing == "reduce":
            raise ValueError(
                "Invalid sharing='reduce' with loss='tokens'. A reduced layer has no "
                "positions left to average over: use loss='mean' or sharing='expand'."
            )

    def fingerprint(self) -> str:
        """All options as text, alike in processes that were given the same ones."""
        return re.sub(r" at 0x[0-9a-f]+", "", repr(self))

    def damping_at(self, step: int) -> float:
        """Lambda at a step, checked when it comes from a schedule."""
        if not callable(self.damping):
            return float(self.damping)
        value = float(self.damping(step))
        require_number(f"damping({step})", value, "a finite number >= 0", low=0.0)
        return value


def require_choice(name: str, value: Any, legal: Collection[str]) -> None:
    """Raise a ValueError that names the value and the legal ones."""
    if value not in legal:
        raise ValueError(
            f"Invalid {name}={value!r}. Must be one of {', '.join(map(repr, legal))}."
        )


def require_number(
    name: str,
    value: Any,
    legal: str,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    above: float = -math.inf,
    below: float = math.inf,
) -> None:
    """Raise unless it is a finite number, >= low, <= high, > above and < below."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"Invalid {name}={value!r}. Must be {legal}.")
    if not (math.isfinite(value) and low <= value <= high and above < value < below):
        raise ValueError(f"Invalid {name}={value!r}. Must be {legal}.")


def require_count(name: str, value: Any, least: int = 1) -> None:
    """Raise unless ``value`` is an integer >= ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"Invalid {name}={value!r}. Must be an integer >= {least}.")
