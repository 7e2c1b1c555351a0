"""How curvature is estimated and applied: one frozen, validated dataclass."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Literal, get_args

from natgrad.factors.refresh import Every, Refresh
from natgrad.requiring import require_choice, require_count, require_number

Damping = float | Callable[[int], float]
DampingStyle = Literal["eigen", "factored", "relative"]
Sides = Literal["both", "inputs", "outputs"]
Scale = Literal["kronecker", "corrected", "adaptive", "orthogonal"]
Whitening = Literal["half", "full"]
Basis = Literal["exact", "tracked"]
MovedMoments = Literal["move", "restart"]
Trust = Literal["none", "kl", "layer"]
Rest = Literal["plain", "adaptive"]
Form = Literal["eigen", "inverse", "root"]
Fisher = Literal["empirical", "sampled"]
Loss = Literal["mean", "sum", "tokens"]
Accumulation = Literal["mean", "sum"]
Sharing = Literal["expand", "reduce"]
Norm = Literal["skip", "unit", "diag", "full"]

# 128 channels of a 3x3 convolution. A third of a second for an eigendecomposition, and
# an inverse, on a core of 2020; a factor of 4,608 takes 60 times that.
LARGEST_FACTOR = 1152

CHOICES: dict[str, tuple[str, ...]] = {
    "statistics": get_args(Sides),
    "scale": get_args(Scale),
    "whitening": get_args(Whitening),
    "basis": get_args(Basis),
    "moments": get_args(MovedMoments),
    "trust": get_args(Trust),
    "rest": get_args(Rest),
    "damping_style": get_args(DampingStyle),
    "fisher": get_args(Fisher),
    "loss": get_args(Loss),
    "accumulation": get_args(Accumulation),
    "sharing": get_args(Sharing),
    "norm": get_args(Norm),
}


@dataclass(frozen=True, kw_only=True)
class Curvature:
    """What `KFAC` and `SPNGD` have in common; each documents the options it takes.

    The update rule is composed of `statistics` (what is known of a layer), `scale`
    (what its gradient V becomes) and `trust` (how long a step is):

    - ``"kronecker"``: ``(G + ..)^-1 V (A + ..)^-1``, the papers' K-FAC.
    - ``"corrected"``: in the eigenbases of A and G, divided by the second moment of
      the per-example gradient there (EKFAC).
    - ``"adaptive"``: in those bases, divided by the root of the running second moment
      of the gradient, without bias, as Adam does.
    - ``"orthogonal"``: the polar factor (all singular values 1) of the whitened
      gradient. ``whitening="half"``: ``W_G P W_A^T`` with P the polar factor of
      ``W_G^T V W_A`` and ``W W^T`` the damped inverse; ``"full"``: the polar factor of
      ``(G + ..)^-1 V (A + ..)^-1``.

    Attributes:
        statistics: ``"both"``, only ``"inputs"`` (A) or only ``"outputs"`` (G). What
            is left out is not estimated, sent or inverted. Normalisation layers have
            statistics of their own: `norm`.
        scale: how statistics scale a gradient, as above.
        whitening: ``"half"`` or ``"full"``, of ``scale="orthogonal"``.
        basis: eigenbases, where the rule has them, anew each time (``"exact"``), or
            ``"tracked"``: after the first, one step of orthogonal iteration from the
            last one (`natgrad.math.inverse.track`), which lags behind but is cheaper.
        moments: what becomes of second moments when a refresh replaces their bases:
            ``"move"`` them into the new ones, or ``"restart"`` them (until there is a
            new S, ``"corrected"`` then has K-FAC's own scale).
        trust: ``"none"``; ``"kl"``: all updates are scaled down so that their KL
            divergence is at most ``kl_clip``; ``"layer"``: each layer's update is given
            the norm of its weight (LARS), so that a learning rate of 0.01 changes every
            layer by 1%; of an embedding, the rows that were read. With
            ``rest="adaptive"`` so are those of matrices without a block. Norms and
            vectors are left out of it. A layer whose gradient is zero does not move.
        kl_clip: kappa of ``trust="kl"``, > 0; None turns it off.
        rest: the rule for parameters without a block: their ``"plain"`` gradient, or
            ``"adaptive"``: divided by the root of its second moment, as in Adam.
        rest_rate: multiplies the updates of ``rest="adaptive"``, > 0: the learning rate
            of those parameters as a part of the others'. Of no use with ``"plain"``.
        beta2: decay of the second moments of the ``"adaptive"`` rules, in [0, 1).
        damping: lambda, added to the Fisher: a number >= 0, or a function of the
            step (counted from 0).
        damping_style: ``"eigen"`` adds lambda to the eigenvalues of the Kronecker
            product (exact, "normal" damping); ``"factored"`` splits it between the
            two factors (pi-split) and inverts by Cholesky; ``"relative"`` adds lambda
            times its mean eigenvalue to each factor. The second moments of the
            ``"adaptive"`` rules are damped relative to their mean in any style.
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
        skip: names of layers, or of modules that contain layers, that have no block
            (see ``rest``).
        subsample: estimate from every k-th example, starting at a random one; 1 uses
            all. None: of each forward from as many as each layer needs
            (`natgrad.plan.spec.enough_examples`), on all ranks together. Unbiased, but
            for what a number of examples that k does not divide leaves over.
        largest_factor: rows that a factor may have, >= 1; a larger one is cut into as
            few and equal diagonal blocks as need be: of an input statistic whole
            channels, of a linear layer neighbouring inputs. None: no factor is cut.
    """

    statistics: Sides = "both"
    scale: Scale = "kronecker"
    whitening: Whitening = "half"
    basis: Basis = "exact"
    moments: MovedMoments = "move"
    trust: Trust = "none"
    kl_clip: float | None = 1e-3
    rest: Rest = "plain"
    rest_rate: float = 1.0
    beta2: float = 0.95
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
    subsample: int | None = 1
    largest_factor: int | None = LARGEST_FACTOR

    def __post_init__(self) -> None:
        for name, legal in CHOICES.items():
            require_choice(name, getattr(self, name), legal)
        if not callable(self.damping):
            require_number("damping", self.damping, "a finite number >= 0", low=0.0)
        require_number("decay", self.decay, "in [0, 1)", low=0.0, below=1.0)
        require_number("rest_rate", self.rest_rate, "a number > 0", above=0.0)
        require_number("beta2", self.beta2, "in [0, 1)", low=0.0, below=1.0)
        if self.kl_clip is not None:
            require_number("kl_clip", self.kl_clip, "a number > 0, or None", above=0.0)
        require_number(
            "norm_damping_ratio", self.norm_damping_ratio, "a number > 0", above=0.0
        )
        if not isinstance(self.refresh, Refresh):
            raise TypeError(
                f"Invalid refresh={self.refresh!r}. Must be Every(...), "
                "Scheduled(...), Adaptive(...), Budget(...) or another natgrad.Refresh."
            )
        if self.subsample is not None:
            require_count("subsample", self.subsample, also=", or None")
        if self.largest_factor is not None:
            require_count("largest_factor", self.largest_factor, also=", or None")
        if isinstance(self.skip, str) or not isinstance(self.skip, Collection):
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

        self._require_rule()

    def _require_rule(self) -> None:
        """Refuse choices that do not go together, and say why."""
        scale, style = self.scale, self.damping_style
        if scale == "orthogonal" and style == "eigen" and self.statistics == "both":
            raise ValueError(
                "Invalid damping_style='eigen' with scale='orthogonal'. Each side is "
                "whitened on its own, so must be 'factored' or 'relative'."
            )
        if scale == "corrected" and style == "factored":
            raise ValueError(
                "Invalid damping_style='factored' with scale='corrected'. The second "
                "moment is of the whole block, so must be 'eigen' or 'relative'."
            )
        if scale == "corrected" and self.statistics != "both":
            raise ValueError(
                f"Invalid statistics={self.statistics!r} with scale='corrected'. The "
                "second moment is in the eigenbases of A and G, so must be 'both'."
            )
        if self.trust == "kl" and scale in ("adaptive", "orthogonal"):
            raise ValueError(
                f"Invalid trust='kl' with scale={scale!r}. The KL divergence is of a "
                "natural gradient, which this is not: must be 'layer' or 'none'."
            )
        if self.whitening == "full" and scale != "orthogonal":
            raise ValueError(
                f"Invalid whitening='full' with scale={scale!r}. Must be 'half' unless "
                "scale='orthogonal'."
            )

        if self.basis == "tracked" and self.form != "eigen":
            raise ValueError(
                f"Invalid basis='tracked' with scale={scale!r}, damping_style={style!r}"
                f" and statistics={self.statistics!r}, which have no eigenbases. Must "
                "be 'exact'."
            )

    @property
    def form(self) -> Form:
        """What is made of A and G: their eigenbases, or dense inverses, or roots."""
        if self.scale in ("adaptive", "corrected"):
            return "eigen"
        if self.scale == "orthogonal" and self.whitening == "half":
            return "root"
        joint = self.statistics == "both" and self.damping_style == "eigen"
        return "eigen" if joint else "inverse"

    def damping_at(self, step: int) -> float:
        """Lambda at a step, checked when it comes from a schedule."""
        if not callable(self.damping):
            return float(self.damping)
        value = float(self.damping(step))
        require_number(f"damping({step})", value, "a finite number >= 0", low=0.0)
        return value


def style_for(
    style: DampingStyle | None, scale: Scale, statistics: Sides, usual: DampingStyle
) -> DampingStyle:
    """A damping style; if None, the usual one, or what the scale needs instead."""
    if style is not None:
        return style
    if scale == "orthogonal" and statistics == "both" and usual == "eigen":
        return "relative"
    return "eigen" if scale == "corrected" else usual


def trust_for(trust: Trust | None, scale: Scale, usual: Trust) -> Trust:
    """A trust; if None, the usual one, or what the scale needs instead."""
    if trust is not None:
        return trust
    natural = scale in ("kronecker", "corrected")
    return "layer" if usual == "kl" and not natural else usual
