"""The update rule, and its learning rate over time."""

import math
from dataclasses import dataclass, field
from typing import Literal

from natgrad_lab.train.config.checks import LATER, checks

OptimizerName = Literal["sgd", "adamw", "spngd", "polar", "muon", "soap", "shampoo"]
TRUSTED = ("sgd", "adamw", "muon", "soap")
ScheduleKind = Literal["constant", "steps", "polynomial", "cosine"]


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The update rule."""

    name: OptimizerName = "sgd"
    """sgd, adamw, spngd, polar; for comparison muon, soap, shampoo."""
    kfac: bool = False
    """Precondition the gradients with K-FAC first (sgd and adamw)."""
    auto: bool = field(default=False, metadata=LATER)
    """spngd: find damping, learning rate and momentum (`natgrad.SPNGD.auto`); lr and
    momentum say nothing then."""
    lr: float = 0.1
    """Learning rate at the start, after warmup."""
    momentum: float | None = None
    """Momentum; beta1 for adamw and soap. None: what spngd and polar have by default,
    0.9 for others."""
    beta2: float = 0.999
    """Decay of second moments (adamw, soap). What has no trust ratio beside one that
    has takes at most 0.95: runs here are short."""
    nesterov: bool | None = None
    """Nesterov momentum (sgd, spngd, polar); muon always has it. None: what spngd and
    polar have by default, none for others."""
    average: Literal["updates", "gradients"] | None = None
    """spngd, polar: what momentum averages. None: their default."""
    trust: bool = False
    """sgd, adamw, muon, soap: change each matrix by lr times its norm (a trust ratio);
    other parameters follow AdamW with rest_lr. With sgd this is LARS."""
    weight_decay: float | None = None
    """Weight decay, as the optimizer defines it. None: what spngd and polar have by
    default, 0 for others."""
    decay: Literal["coupled", "decoupled", "rescaled"] | None = None
    """spngd, polar: how weight decay enters; rescaled also keeps conv and linear
    weights at norm sqrt(2 d_out) (Osawa et al. 2020, eq. 24). None: their default."""
    rest: Literal["sgd", "adamw"] = "sgd"
    """muon: the rule of parameters that are not matrices. With trust it is adamw."""
    rest_lr: float | None = None
    """Its learning rate. None: lr, or for adamw a fifth of it, as in natgrad.Polar."""
    flat: bool = False
    """soap: take a convolution's weight for a matrix, as muon always does."""
    interval: int = 10
    """soap, shampoo: steps between two renewals of the preconditioner."""

    def __post_init__(self) -> None:
        check, rest = checks(self, "optimizer."), self.rest_lr
        check("lr", 0 < self.lr < math.inf, "> 0 and finite")
        check("momentum", 0 <= self.usual_momentum < 1, "in [0, 1)")
        check("beta2", 0 <= self.beta2 < 1, "in [0, 1)")
        check("weight_decay", self.usual_weight_decay >= 0, ">= 0")
        check("rest_lr", rest is None or rest > 0, "> 0 or none")
        check("interval", self.interval >= 1, ">= 1")
        ok = self.rest == "sgd" or self.name == "muon"
        check("rest", ok, "sgd unless optimizer.name is muon")
        for name in ("average", "decay"):
            ok = getattr(self, name) is None or self.alone
            check(name, ok, "none unless optimizer.name is spngd or polar")
        ok = not self.flat or self.name == "soap"
        check("flat", ok, "off unless optimizer.name is soap")
        ok = not self.auto or (self.name == "spngd" and self.momentum is None)
        check("auto", ok, "off unless optimizer.name is spngd, without a momentum")
        ok = not self.kfac or self.name in ("sgd", "adamw")
        check("kfac", ok, "off unless optimizer.name is sgd or adamw")
        ok = not self.trust or (self.name in TRUSTED and not self.kfac)
        legal = f"off unless optimizer.name is one of {', '.join(TRUSTED)}"
        check("trust", ok, f"{legal}, without kfac")

    @property
    def usual_momentum(self) -> float:
        """Of the optimizers that have no default of their own."""
        return 0.9 if self.momentum is None else self.momentum

    @property
    def usual_weight_decay(self) -> float:
        """Of the optimizers that have no default of their own."""
        return 0.0 if self.weight_decay is None else self.weight_decay

    @property
    def label(self) -> str:
        """For tables and figures: sgd, kfac+sgd, muon+trust, spngd..."""
        if self.trust:
            return "lars" if self.name == "sgd" else f"{self.name}+trust"
        if self.auto:
            return "kfac+auto"
        return f"kfac+{self.name}" if self.kfac else self.name

    @property
    def curved(self) -> bool:
        """Whether statistics are estimated (the curvature settings matter)."""
        return self.kfac or self.alone

    @property
    def alone(self) -> bool:
        """Whether it reduces gradients itself, without DistributedDataParallel."""
        return self.name in ("spngd", "polar")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """The learning rate over time."""

    kind: ScheduleKind = "constant"
    """constant, steps, polynomial (Osawa et al. 2020, eq. 21) or cosine."""
    warmup_epochs: float = 0.0
    """Linear warmup from lr * warmup_start to lr."""
    warmup_start: float = 0.1
    """First factor of the warmup."""
    decay_epochs: tuple[float, ...] = ()
    """steps: epochs at which the learning rate is multiplied by decay_factor."""
    decay_factor: float = 0.1
    """steps: what it is multiplied by."""
    start: float = 0.0
    """polynomial: e_start, the epoch at which the decay begins."""
    end: float | None = None
    """polynomial: e_end, the epoch of a zero learning rate. None: the last."""
    power: float = 1.0
    """polynomial: p_decay."""
    couple_momentum: bool = False
    """Keep momentum / lr fixed (Osawa et al. 2020, eq. 22)."""

    def __post_init__(self) -> None:
        check = checks(self, "schedule.")
        check("warmup_epochs", self.warmup_epochs >= 0, ">= 0")
        check("warmup_start", 0 <= self.warmup_start <= 1, "in [0, 1]")
        check("decay_factor", 0 < self.decay_factor <= 1, "in (0, 1]")
        check("power", self.power > 0, "> 0")
        ok = self.end is None or self.end > self.start
        check("end", ok, f"> start={self.start}")
        ok = self.kind == "polynomial" or not self.couple_momentum
        check("couple_momentum", ok, "off unless schedule.kind is polynomial")
