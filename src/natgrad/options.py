"""Every option: its default, its check and its text, here and nowhere else.

`Options` is one frozen, validated value. `KFAC.defaults`, `SPNGD.defaults` and
`Polar.defaults` are such values; constructors start from them and replace what they are
given. What belongs to an update rule, a length, an average or a decay is an option of
those classes, in `natgrad.rules`.
"""

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Union, get_args

import torch

from natgrad.distributed.options import CommOptions
from natgrad.factors.budget import Budget
from natgrad.factors.refresh import Every, Paced, Refresh
from natgrad.math.precision import HALF
from natgrad.plan import Strategy
from natgrad.plan.strategies import FIRST_PLACEMENT, FIRST_STRATEGY
from natgrad.quadratic.options import (
    AUTO,
    Auto,
    AutoDamping,
    Hessian,
    require_hessian,
    require_rate,
)
from natgrad.requiring import require_choice, require_count, require_number
from natgrad.rules.fallbacks import Plain, is_fallback
from natgrad.rules.kronecker import Kronecker
from natgrad.rules.lengths import KLClip, LayerTrust, Length
from natgrad.rules.motion import Average, AverageUpdates, Coupled, Decay
from natgrad.rules.parts import NAMES, Damping, Parts, plain
from natgrad.rules.rule import Rule

if TYPE_CHECKING:
    from natgrad.plan import HardwareProfile

Profile = Union["HardwareProfile", str, Path]
Fisher = Literal["empirical", "sampled"]
Loss = Literal["mean", "sum", "tokens"]
Accumulation = Literal["mean", "sum"]
Sharing = Literal["expand", "reduce"]
Norm = Literal["skip", "unit", "diag", "full"]

CHOICES: dict[str, tuple[str, ...]] = {
    "fisher": get_args(Fisher),
    "loss": get_args(Loss),
    "accumulation": get_args(Accumulation),
    "sharing": get_args(Sharing),
    "norm": get_args(Norm),
}
PARTS: dict[str, type] = {
    "rule": Rule,
    "fallback": Rule,
    "average": Average,
    "decay": Decay,
    "refresh": Refresh,
    "comm": CommOptions,
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """How curvature is estimated, applied and shared between ranks.

    ``options=dataclasses.replace(natgrad.KFAC.defaults, fisher="sampled")`` changes an
    option that a constructor has no argument for.

    Attributes:
        rule: how factors turn a layer's gradient into an update: `Kronecker` (K-FAC),
            `EKFAC`, `EigenAdam` or `Orthogonal`.
        fallback: the rule of parameters without factors: `Plain` or `Adam`.
        length: how long an update is: `Free`, `KLClip`, `LayerTrust` or `MuonLength`.
            None: `KLClip` for a natural gradient (`Kronecker`, `EKFAC`), `LayerTrust`
            for other rules.
        average: what momentum averages: `AverageUpdates` or `AverageGradients`.
        decay: how weight decay enters: `Coupled`, `Decoupled`, `Rescaled` or
            `FixedNorm`.
        lr: learning rate, > 0; a parameter group may have its own. ``"auto"``: the best
            under the quadratic model of the loss, in each step, for all groups.
        momentum: in [0, 1); a parameter group may have its own. ``"auto"``: as lr.
        weight_decay: >= 0; a parameter group may have its own.
        damping: lambda, added to the Fisher: a number >= 0, a function of the step
            (counted from 0), or an `AutoDamping`, which ``"auto"`` is short for.
        refresh: when statistics are estimated and inverted: `Every`, `Scheduled`,
            `Paced`, `Adaptive` or `Budget`.
        factor_decay: weight of the old value in the running average of a statistic, in
            [0, 1]. 0 keeps only the newest estimate; 1 forgets nothing, which makes it
            a sum instead of an average (Shampoo).
        factor_precision: what activations and gradients are rounded to before they are
            multiplied for a statistic: None (not at all), ``torch.bfloat16`` or
            ``torch.float16``. Sums are float32 in any case.
        fisher: ``"empirical"`` uses the gradients of the training loss;
            ``"sampled"`` uses labels drawn from the model (`sampled_backward`).
        hessian: of the loss at the outputs, for what is ``"auto"``: ``"loss"``, that of
            the loss as it is written; ``"gaussian"``, the Fisher of outputs that are a
            mean and a variance, or ``"gaussian_log"``, a mean and the logarithm of a
            variance; or a function of outputs and tangents (two lists) that returns
            what the Hessian makes of the tangents.
        batch_part: the part of each batch, in (0, 1], whose first examples stand for
            all in products with the Gauss-Newton matrix, for what is ``"auto"``.
        loss: what the loss does over its terms: ``"mean"`` over examples, ``"sum"``
            over examples, or ``"tokens"``: mean over examples and positions.
        accumulation: whether the loss of each of k micro-batches is divided by k
            (``"mean"``) or not (``"sum"``).
        sharing: how a linear layer treats dims between batch and features:
            ``"expand"`` (each position on its own) or ``"reduce"`` (averaged first).
        norm: the statistic of normalisation layers: ``"skip"``, ``"unit"``, ``"diag"``
            or ``"full"``.
        norm_damping_ratio: rho, multiplies the damping of normalisation layers.
        skip: names of layers, or of modules that contain layers, that have no
            statistics and follow the fallback.
        subsample: estimate from every k-th example, starting at a random one; 1 uses
            all. None: of each forward from as many as each layer needs
            (`natgrad.math.statistics.enough_examples`), on all ranks together.
            Unbiased, but for what a number of examples that k does not divide leaves
            over.
        largest_factor: rows that a factor may have, >= 1; a larger one is cut into as
            few and equal diagonal blocks as need be: of an input statistic whole
            channels, of a linear layer neighbouring inputs. None: no factor is cut;
            the papers cut none.
        gather_inputs: under tensor parallelism, gather inputs that ranks have cut by
            features, so that A is exact. False: each rank makes the A of its own
            features, and what is between those of two ranks counts as zero.
        matrices: how many matrices, of equally many rows, the weight of each linear
            layer is: 3 for one that makes Q, K and V at once, 3 times the heads for
            one matrix a head. They share one A. None: one matrix, and three for the
            in-projection of `torch.nn.MultiheadAttention`. Mostly for a parameter
            group: see `natgrad.groups`.
        strategy: how several ranks share the work: ``"factor_wise"``,
            ``"layer_wise"``, ``"spngd"``, ``natgrad.hybrid(fraction)``, or ``"auto"``:
            the one that the machine's profile says is fastest, printed with why and
            with its predicted overhead over SGD, and kept in ``choice``.
        placement: ``"longest_first"`` (by modelled cost), ``"measured"`` (the same, and
            again after the first refresh by the seconds that its inversions took) or
            ``"round_robin"`` (the papers').
        profile: the machine for ``"auto"``: a `natgrad.plan.HardwareProfile` or its
            file. None: the file that ``$NATGRAD_PROFILE`` names, that which ``natgrad
            calibrate`` wrote, or else built-in numbers.
        compile: run what rules do to directions through `torch.compile`, with this
            backend of its, such as ``"inductor"``, which takes a while in the
            first steps. None: as they are written.
        comm: buckets, precision and overlap of communication.
        group: a process group; the default one if None.
    """

    rule: Rule = field(default_factory=Kronecker)
    fallback: Rule = field(default_factory=Plain)
    length: Length | None = None
    average: Average = field(default_factory=AverageUpdates)
    decay: Decay = field(default_factory=Coupled)
    lr: float | Auto | None = None
    momentum: float | Auto = 0.9
    weight_decay: float = 0.0
    damping: Damping | AutoDamping | Auto = 1e-3
    refresh: Refresh = field(default_factory=lambda: Paced(Every(10, 100, early=True)))
    factor_decay: float = 0.95
    factor_precision: torch.dtype | None = None
    fisher: Fisher = "empirical"
    hessian: Hessian = "loss"
    batch_part: float = 1.0
    loss: Loss = "mean"
    accumulation: Accumulation = "mean"
    sharing: Sharing = "expand"
    norm: Norm = "skip"
    norm_damping_ratio: float = 1.0
    skip: Collection[str] = ()
    subsample: int | None = 1
    # 128 channels of a 3x3 convolution. A third of a second for an eigendecomposition,
    # and an inverse, on a core of 2020; a factor of 4,608 takes 60 times that.
    largest_factor: int | None = 1152
    matrices: int | None = None
    gather_inputs: bool = True
    strategy: str | Strategy = FIRST_STRATEGY
    placement: str = FIRST_PLACEMENT
    profile: Profile | None = None
    compile: str | None = None
    comm: CommOptions = field(default_factory=CommOptions)
    group: Any = None

    def __post_init__(self) -> None:
        for name, kind in PARTS.items():
            if not isinstance(getattr(self, name), kind):
                raise TypeError(_of_another_kind(name, getattr(self, name), kind))
        if self.length is not None and not isinstance(self.length, Length):
            raise TypeError(_of_another_kind("length", self.length, Length))
        for name, legal in CHOICES.items():
            require_choice(name, getattr(self, name), legal)
        if self.damping == AUTO:
            object.__setattr__(self, "damping", AutoDamping())
        self._require_numbers()
        require_hessian(self.hessian)
        if self.factor_precision not in (None, *HALF):
            raise ValueError(
                f"Invalid factor_precision={self.factor_precision}. Must be in "
                f"{(None, *HALF)}."
            )
        if self.subsample is not None:
            require_count("subsample", self.subsample, also=", or None")
        if self.largest_factor is not None:
            require_count("largest_factor", self.largest_factor, also=", or None")
        if self.matrices is not None:
            require_count("matrices", self.matrices, also=", or None")
        if self.compile is not None:
            _require_backend(self.compile)
        if isinstance(self.skip, str) or not isinstance(self.skip, Collection):
            raise TypeError(
                f"Invalid skip={self.skip!r}. Must be a collection of layer names."
            )
        # in one order on every rank, also if given as a set
        object.__setattr__(self, "skip", tuple(sorted(self.skip)))
        self._require_together()

    def _require_numbers(self) -> None:
        if self.lr is not None:
            require_rate("lr", self.lr, "a number > 0", above=0.0)
        require_rate("momentum", self.momentum, "in [0, 1)", low=0.0, below=1.0)
        require_number("weight_decay", self.weight_decay, "a number >= 0", low=0.0)
        if not (callable(self.damping) or isinstance(self.damping, AutoDamping)):
            require_number("damping", self.damping, "a finite number >= 0", low=0.0)
        name, value = "factor_decay", self.factor_decay
        require_number(name, value, "in [0, 1]", low=0.0, high=1.0)
        legal = "in (0, 1]"
        require_number("batch_part", self.batch_part, legal, above=0.0, high=1.0)
        name, value = "norm_damping_ratio", self.norm_damping_ratio
        require_number(name, value, "a number > 0", above=0.0)

    def _require_together(self) -> None:
        """Refuse choices that do not go together, and say why."""
        if not is_fallback(self.fallback):
            raise ValueError(
                f"Invalid fallback={self.fallback!r}. Parameters without a layer have "
                "no factors, so must be Plain() or Adam()."
            )
        if isinstance(self.length, KLClip) and not self.rule.natural:
            raise ValueError(
                f"Invalid length={self.length!r} with rule={self.rule!r}. The KL "
                "divergence is of a natural gradient, which this is not: must be "
                "LayerTrust() or Free()."
            )
        self._require_auto()
        if self.rule.corrects and not self.gather_inputs:
            raise ValueError(
                f"Invalid gather_inputs=False with rule={self.rule!r}. Must be True: "
                "its second moment is of whole inputs."
            )
        if self.loss == "tokens" and self.sharing == "reduce":
            raise ValueError(
                "Invalid sharing='reduce' with loss='tokens'. A reduced layer has no "
                "positions left to average over: use loss='mean' or sharing='expand'."
            )

    def _require_auto(self) -> None:
        """The quadratic model is of a sum of an update and of the last change."""
        if AUTO in (self.lr, self.momentum):
            which = f"lr={self.lr!r} and momentum={self.momentum!r}"
            if self.average != AverageUpdates():
                raise ValueError(
                    f"Invalid average={self.average!r} with {which}. Must be "
                    "AverageUpdates()."
                )
            if not isinstance(self.decay, Coupled):
                raise ValueError(
                    f"Invalid decay={self.decay!r} with {which}. Must be Coupled(): "
                    "weight decay is part of the objective."
                )
            if isinstance(self.length, KLClip):
                raise ValueError(
                    f"Invalid length={self.length!r} with {which}. Must be Free() or "
                    "LayerTrust(): the clip is another way to choose the rate."
                )
        relative = getattr(self.rule, "style", None) == "relative"
        if isinstance(self.damping, AutoDamping) and (
            relative or not self.rule.natural
        ):
            raise ValueError(
                f"Invalid damping={self.damping!r} with rule={self.rule!r}. Must be a "
                "number: only Kronecker() and EKFAC(), with a style that is not "
                "relative, add damping to the curvature."
            )

    @property
    def the_length(self) -> Length:
        """The length, or what the rule has if none is given."""
        if self.length is not None:
            return self.length
        return KLClip() if self.rule.natural else LayerTrust()

    @property
    def is_auto(self) -> bool:
        """Whether anything is found by the quadratic model."""
        found = AUTO in (self.lr, self.momentum)
        return found or isinstance(self.damping, AutoDamping)

    def parts(self) -> Parts:
        """What an update is made of."""
        damping = self.damping
        assert not isinstance(damping, AutoDamping | str)  # the engine has its value
        return Parts(
            rule=self.rule,
            fallback=self.fallback,
            length=self.the_length,
            average=self.average,
            decay=self.decay,
            damping=damping,
            refresh=self.refresh,
            matrices=self.matrices,
        )


def _require_backend(name: Any) -> None:
    legal = [str(x) for x in torch.compiler.list_backends(exclude_tags=())]
    if name not in legal:
        raise ValueError(f"Invalid compile={name!r}. Must be None or in {legal}.")


def _of_another_kind(name: str, value: Any, kind: type) -> str:
    legal = sorted(c.__name__ for c in _leaves(kind))
    return (
        f"Invalid {name}={value!r}. Must be {' or '.join(f'{x}(...)' for x in legal)}."
    )


def _leaves(kind: type) -> list[type]:
    below = [leaf for child in kind.__subclasses__() for leaf in _leaves(child)]
    return below or [kind]


def parts_of_group(group: dict[str, Any], options: Options) -> Parts:
    """The parts of a parameter group's update; the group keeps them as plain data."""
    own = {name: group[name] for name in NAMES if name in group}
    if own.get("damping") == AUTO or isinstance(own.get("damping"), AutoDamping):
        raise ValueError(
            f"Invalid damping={own['damping']!r} of a parameter group. One damping is "
            "found for all: must be given to the optimizer."
        )
    if isinstance(own.get("refresh"), Budget):
        raise ValueError(
            "Invalid refresh=Budget(...) of a parameter group. A budget is of a whole "
            "step: must be given to the optimizer."
        )
    group |= {name: plain(part) for name, part in own.items()}
    return dataclasses.replace(options, **own).parts()


def defaults_for(
    name: str, defaults: Options, auto: Options | None, *rates: Any
) -> Options:
    """The defaults of a class, or those that it has if one of the rates is "auto"."""
    asked = [x for x in rates if x == AUTO or isinstance(x, AutoDamping)]
    if not asked:
        return defaults
    if auto is None:
        raise ValueError(
            f"Invalid {asked[0]!r} for {name}. Rates are found by a quadratic model of "
            "the loss, for natural gradients: must be a number, or use SPNGD."
        )
    return auto


class NotGiven:
    """The default of a constructor's argument: the option keeps its value."""

    def __repr__(self) -> str:
        return "<not given>"


NOT_GIVEN = NotGiven()


def given(defaults: Options, options: Options | NotGiven, **changes: Any) -> Options:
    """The options that were given, or the defaults, with the changes that were."""
    if isinstance(options, NotGiven):
        options = defaults
    if not isinstance(options, Options):
        raise TypeError(
            f"Invalid options={options!r}. Must be an Options value, such as "
            "dataclasses.replace(natgrad.KFAC.defaults, ...)."
        )
    known = {name: x for name, x in changes.items() if not isinstance(x, NotGiven)}
    return dataclasses.replace(options, **known)
