"""How the Fisher is estimated and applied, and when it is estimated again."""

import math
from dataclasses import dataclass, field
from typing import Literal

from natgrad_lab.train.config.checks import LATER, checks

RefreshKind = Literal["every", "adaptive", "staircase", "late", "budget"]


@dataclass(frozen=True, kw_only=True)
class CurvatureConfig:
    """How the Fisher is estimated, damped and applied (kfac, spngd and polar).

    None: what the optimizer has by default (`natgrad.KFAC.defaults` and the others).
    """

    rule: Literal["kronecker", "ekfac", "eigen_adam", "orthogonal"] | None = None
    """How factors turn a gradient into an update: `natgrad.Kronecker` and others."""
    sides: Literal["both", "inputs", "outputs", "none"] | None = None
    """Which factors layers have: A and G, A, G, or neither."""
    source: Literal["activations", "gradients"] | None = None
    """What factors are estimated from."""
    power: float | None = None
    """What a factor is raised to (minus this)."""
    style: Literal["eigen", "factored", "relative", "whole", "root"] | None = None
    """eigen: exact (Pauloski et al. 2020, eq. 13-15). factored: pi-split and Cholesky
    (Osawa et al. 2020, eq. 12). relative: to each factor's mean eigenvalue. whole: the
    damping on each factor (Pauloski et al. 2020, eq. 11-12). root: its root on each
    (Ma et al. 2019, appendix B)."""
    whitening: Literal["half", "full"] | None = None
    """Of orthogonal."""
    basis: Literal["exact", "tracked"] | None = None
    """Eigenbases, where the rule has them: exact each time, or tracked."""
    moments: Literal["move", "keep", "restart"] | None = None
    """Second moments when a refresh replaces their bases: moved into them, kept, or
    reset."""
    beta2: float | None = None
    """Decay of the second moments of eigen_adam and adam."""
    length: Literal["free", "kl_clip", "layer_trust", "muon"] | None = None
    """How long a step is."""
    kappa: float | None = None
    """Of the KL clip (Pauloski et al. 2020, eq. 18)."""
    fallback: Literal["plain", "adam"] | None = None
    """The rule of parameters without factors: plain gradient, or Adam's."""
    fallback_rate: float | None = None
    """Of adam: the learning rate of those parameters over lr."""
    damping: float | None = None
    """lambda; the value reached after the warmup when there is one."""
    damping_start: float | None = None
    """First value of a damping warmup (Osawa et al. 2019, eq. 13-14). None: none."""
    damping_warmup: int = 0
    """Steps of the damping warmup."""
    damping_decay_epochs: tuple[float, ...] = ()
    """Epochs at which the damping is multiplied by damping_decay."""
    damping_decay: float = 0.5
    """What the damping is multiplied by at each of those epochs."""
    factor_decay: float | None = None
    """Weight of the old value in the running averages of the statistics."""
    fisher: Literal["empirical", "sampled"] | None = None
    """empirical: the loss's gradients. sampled: labels drawn from the model."""
    skip: tuple[str, ...] = ()
    """Names of layers, or of modules that contain layers, to leave without factors."""
    norm: Literal["skip", "unit", "diag", "full"] | None = None
    """How normalisation layers are treated."""
    norm_damping_ratio: float | None = None
    """rho_BN: multiplies the damping of norm layers (Osawa et al. 2019, 4.2)."""
    factor_precision: Literal["float16", "bfloat16"] | None = None
    """What activations and gradients are rounded to before they are multiplied for a
    statistic; none: not at all."""
    subsample: int | Literal["needed"] | None = None
    """Statistics from every k-th example only; 1: from all. needed: from as many as
    each layer needs, however large the batch."""
    largest_factor: int | Literal["whole"] | None = None
    """Rows that a factor may have: a larger one is cut into diagonal blocks. whole:
    none is cut; the papers cut none."""
    strategy: Literal["factor_wise", "layer_wise", "spngd", "auto"] | None = None
    """Who owns and who works, with several processes. auto: what the calibrated machine
    is fastest with."""
    placement: Literal["longest_first", "round_robin"] | None = None
    """How statistics are spread over the ranks."""
    wire: Literal["float16", "bfloat16"] | None = field(default=None, metadata=LATER)
    """What is sent in half precision, with several processes; none: float32."""
    half: tuple[str, ...] = field(default=(), metadata=LATER)
    """The exchanges that wire is for; none: share_inverses and share_updates."""
    bucket_mib: float | None = field(default=None, metadata=LATER)
    """Tensors are sent together up to this many MiB."""
    hierarchical: Literal["auto", "yes", "no"] = field(default="auto", metadata=LATER)
    """Reduce within hosts and then between them. auto: if hosts have equally many
    ranks, more than one."""

    def __post_init__(self) -> None:
        check = checks(self, "curvature.")
        for name in ("damping", "kappa", "fallback_rate", "norm_damping_ratio"):
            value = getattr(self, name)
            check(name, value is None or value > 0, "> 0")
        start, decay, size = self.damping_start, self.factor_decay, self.bucket_mib
        check("damping_start", start is None or start > 0, "> 0 or none")
        ok = (self.damping_warmup > 0) == (start is not None)
        check("damping_warmup", ok, "> 0 with damping_start, else 0")
        check("damping_decay", 0 < self.damping_decay <= 1, "in (0, 1]")
        check("factor_decay", decay is None or 0 <= decay <= 1, "in [0, 1]")
        for name, word in (("subsample", "needed"), ("largest_factor", "whole")):
            value = getattr(self, name)
            ok = not isinstance(value, int) or value >= 1
            check(name, ok, f">= 1, {word} or none")
        ok = not self.half or self.wire is not None
        check("half", ok, "none unless curvature.wire is given")
        check("bucket_mib", size is None or 0 < size < math.inf, "> 0 and finite")
        ok = self.kappa is None or self.length in (None, "kl_clip")
        check("kappa", ok, "none unless curvature.length is kl_clip")


@dataclass(frozen=True, kw_only=True)
class RefreshConfig:
    """When statistics are estimated again.

    None: what the optimizer has by default; where that is another kind, intervals of 1.
    """

    kind: RefreshKind | None = None
    """every: fixed intervals. adaptive: Osawa et al. 2020, algorithms 1-2. staircase,
    late: Osawa et al. 2019, eq. 20 and 21, after always_fresh steps. budget: as much
    as the overhead allows. None: every with an interval given, else the optimizer's
    default."""
    statistics: int | None = None
    """every: steps between two estimates of a statistic."""
    inverses: int | None = None
    """every: steps between two inversions."""
    always_fresh: int = field(default=500, metadata=LATER)
    """staircase, late: first steps that refresh everything. A run that is shorter never
    leaves them."""
    tolerance: float | None = None
    """adaptive: relative change below which a statistic counts as unchanged."""
    overhead: float = 0.1
    """budget: seconds a step may take over the plain optimizer's, as a share."""
    decay_epochs: tuple[float, ...] = ()
    """every: epochs at which both intervals are multiplied by decay_factor."""
    decay_factor: float = 2.0
    """every: what the intervals are multiplied by at each of those epochs."""

    def __post_init__(self) -> None:
        check, tolerance = checks(self, "refresh."), self.tolerance
        for name in ("statistics", "inverses"):
            value = getattr(self, name)
            check(name, value is None or value >= 1, ">= 1")
        check("always_fresh", self.always_fresh >= 0, ">= 0")
        check("tolerance", tolerance is None or 0 < tolerance < 1, "in (0, 1)")
        check("overhead", self.overhead > 0, "> 0")
        check("decay_factor", self.decay_factor >= 1, ">= 1")
