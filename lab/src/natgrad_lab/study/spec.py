"""What a study is: methods, grids, batch sizes, budget and schedule, all checked.

The defaults are those of Ma et al., "Inefficiency of K-FAC for Large Batch Size
Training" (2019), section III. Epochs and batches are those of a run (`TrainConfig`).
"""

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from natgrad_lab.train.config import SEEDS, SEEDS_LEGAL, require

MethodName = Literal["sgd", "kfac", "spngd", "polar"]
BudgetKind = Literal["epochs", "adjusted", "iterations"]
ScheduleName = Literal["scaled", "fixed"]
DampingStyle = Literal["normal", "approximated"]
METHODS: tuple[MethodName, ...] = ("sgd", "kfac", "spngd", "polar")
PAPER_BATCHES = tuple(2**power for power in range(7, 15))
SMOOTH = 6
"""Significant digits of a grid's values: a denser grid meets the old points exactly."""


def _plain(value: float) -> float:
    return float(f"{value:.{SMOOTH}g}")


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Values of one hyperparameter, from ``low`` to ``high``, both included.

    ``spacing="log"`` is even in log(x); ``"complement"`` is even in log(1 - x), for
    momentum: 0.9 to 0.999 gives 0.9, 0.99, 0.999 with 3 points. With ``values`` the
    list is taken as it is.
    """

    LIST: ClassVar[str] = "values"
    low: float | None = None
    """The least value."""
    high: float | None = None
    """The greatest value."""
    points: int = 8
    """How many values."""
    spacing: Literal["log", "complement"] = "log"
    """How they are spread."""
    values: tuple[float, ...] = ()
    """The values themselves, instead of low, high and points."""

    @staticmethod
    def lacks(table: dict[str, Any]) -> list[str]:
        """Keys that a table of a file needs and does not have."""
        ends = () if "values" in table else ("low", "high")
        return [name for name in ends if name not in table]

    def __post_init__(self) -> None:
        if self.values:
            ok = self.low is None and self.high is None
            require(ok, "values", self.values, "alone, without low and high")
            ok = len(set(self.values)) == len(self.values)
            require(ok, "values", self.values, "all different")
            return
        require(self.points >= 1, "points", self.points, ">= 1")
        low, high = self.low, self.high
        top = math.inf if self.spacing == "log" else 1.0
        require(low is not None and 0 < low < top, "low", low, f"in (0, {top:g})")
        assert low is not None
        ok = high is not None and low <= high < top
        require(ok, "high", high, f"in [low={low:g}, {top:g})")

    def expand(self) -> tuple[float, ...]:
        """The values, least first."""
        if self.values:
            return tuple(sorted(self.values))
        assert self.low is not None
        assert self.high is not None
        if self.spacing == "log":
            return tuple(_spread(self.low, self.high, self.points))
        ends = (1 - self.low, 1 - self.high)
        return tuple(_plain(1 - x) for x in _spread(*ends, self.points))


def _spread(first: float, last: float, points: int) -> list[float]:
    """Even in the logarithm; a single point is the first."""
    ratio = last / first
    shares = [i / max(1, points - 1) for i in range(points)]
    return [_plain(first * ratio**share) for share in shares]


def second_of(method: str) -> str:
    """The hyperparameter that is tuned beside the learning rate."""
    return "momentum" if method == "sgd" else "damping"


@dataclass(frozen=True, kw_only=True)
class Method:
    """One method's grid: the learning rate against one other hyperparameter.

    The other is ``momentum`` for sgd, ``damping`` for the others.
    """

    lr: Grid
    """Learning rates."""
    momentum: Grid | None = None
    """sgd: momenta."""
    damping: Grid | None = None
    """kfac, spngd, polar: dampings."""
    damping_styles: tuple[DampingStyle, ...] = ()
    """kfac, spngd: normal (eigenvalues) and approximated (factors), as in appendix B of
    Ma et al. Empty: normal for kfac, approximated for spngd."""
    recipe: str | None = None
    """Where this method's other settings come from. None: the study's recipe."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of `natgrad train` for this method only."""

    @property
    def other(self) -> str:
        """The name of the second hyperparameter."""
        return "momentum" if self.momentum is not None else "damping"

    @property
    def others(self) -> tuple[float, ...]:
        """The values of the second hyperparameter."""
        grid = self.momentum or self.damping
        assert grid is not None
        return grid.expand()

    def styles(self, name: str) -> tuple[str, ...]:
        """Damping styles of the method of that name; sgd has the one style ""."""
        if name in ONE_STYLE:
            return (ONE_STYLE[name],)
        own: DampingStyle = "normal" if name == "kfac" else "approximated"
        return self.damping_styles or (own,)


# Methods whose damping cannot be had in several styles.
ONE_STYLE = {"sgd": "", "polar": "relative"}

PAPER_METHODS: dict[str, Method] = {
    "sgd": Method(
        lr=Grid(low=0.05, high=9.62),
        momentum=Grid(low=0.9, high=0.999, spacing="complement"),
    ),
    "kfac": Method(lr=Grid(low=1e-3, high=2.187), damping=Grid(low=1e-4, high=0.2187)),
}


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How long a trial trains, by its batch size m."""

    kind: BudgetKind = "adjusted"
    """epochs: the same for all m. adjusted: (log2(m / base_batch) + 1) x epochs.
    iterations: the same number of updates for all m."""
    epochs: float = 100.0
    """epochs, adjusted: passes over the data at base_batch."""
    iterations: int | None = None
    """iterations: updates."""
    base_batch: int | None = None
    """m0 of the adjusted rule and of speedups. None: the study's least batch."""

    def __post_init__(self) -> None:
        require(self.epochs > 0, "epochs", self.epochs, "> 0")
        steps, wanted = self.iterations, self.kind == "iterations"
        ok = (steps is not None and steps >= 1) if wanted else steps is None
        legal = ">= 1 with kind = 'iterations', else left out"
        require(ok, "iterations", steps, legal)
        base = self.base_batch
        require(base is None or base >= 1, "base_batch", base, ">= 1")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """When the learning rate is divided: stages of training."""

    kinds: tuple[ScheduleName, ...] = ("scaled",)
    """scaled: at shares of the trial's own budget. fixed: at the same epochs for all
    batches, those of base_batch (40 and 80 when the budget is 100 epochs)."""
    decays: tuple[float, ...] = (0.4, 0.8)
    """Shares of the budget at which it decays."""
    factor: float = 0.1
    """What the learning rate is multiplied by at each of them."""
    warmup_epochs: float = 0.0
    """Linear warmup at the start."""

    def __post_init__(self) -> None:
        require(bool(self.kinds), "kinds", self.kinds, "scaled, fixed or both")
        ok = len(set(self.kinds)) == len(self.kinds)
        require(ok, "kinds", self.kinds, "all different")
        ordered = list(self.decays) == sorted(set(self.decays))
        ok = ordered and all(0 < share < 1 for share in self.decays)
        require(ok, "decays", self.decays, "rising, each in (0, 1)")
        require(0 < self.factor <= 1, "factor", self.factor, "in (0, 1]")
        warmup = self.warmup_epochs
        require(warmup >= 0, "warmup_epochs", warmup, ">= 0")


@dataclass(frozen=True, kw_only=True)
class StudySpec:
    """A whole study: every method at every batch size over its grid."""

    name: str
    """Name of the study in its storage, and of its folder."""
    recipe: str = "ma2019-sgd-128"
    """The recipe whose model, data and other settings are studied."""
    batches: tuple[int, ...] = PAPER_BATCHES
    """Batch sizes m."""
    repeats: int = 1
    """Trials of each configuration, with seeds seed, seed + 1, ..."""
    seed: int = 0
    """The first seed."""
    evaluate_every: float = 1.0
    """Epochs between two points of a curve."""
    evaluations: int | None = None
    """Points of a whole curve, evenly spread, instead of evaluate_every. One before
    training is added."""
    checkpoints: int = 10
    """Checkpoints a trial writes on its way: a killed trial repeats less than this
    share of itself."""
    micro_batch: int | None = None
    """Examples per forward, where the batch is larger. None: the whole batch."""
    threads: int = 1
    """CPU threads a worker. Part of what is hashed: sums depend on it."""
    storage: str | None = None
    """Optuna storage: sqlite:///FILE or postgresql://... None: a file in the folder."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of `natgrad train` for all methods, for example model.width."""
    budget: Budget = field(default_factory=Budget)
    schedule: Schedule = field(default_factory=Schedule)
    methods: dict[str, Method] = field(default_factory=lambda: dict(PAPER_METHODS))

    @staticmethod
    def lacks(table: dict[str, Any]) -> list[str]:
        """Keys that a table of a file needs and does not have."""
        methods = table.get("methods")
        given = methods if isinstance(methods, dict) else {}
        return [
            f"methods.{name}.{second_of(name)}"
            for name, keys in given.items()
            if name in METHODS
            and isinstance(keys, dict)
            and second_of(name) not in keys
        ]

    def __post_init__(self) -> None:
        ok = bool(self.name) and all(c.isalnum() or c in "-_." for c in self.name)
        require(ok, "name", self.name, "letters, digits, '-', '_' and '.'")
        legal = "the name of a folder: '.' and '..' are others"
        require(self.name not in (".", ".."), "name", self.name, legal)
        last = self.seed + self.repeats - 1
        require(self.seed >= 0 and last < SEEDS, "seed", self.seed, SEEDS_LEGAL)
        ok = bool(self.batches) and min(self.batches) >= 1
        require(ok, "batches", self.batches, "batch sizes >= 1")
        ok = len(set(self.batches)) == len(self.batches)
        require(ok, "batches", self.batches, "all different")
        require(self.repeats >= 1, "repeats", self.repeats, ">= 1")
        require(self.evaluate_every > 0, "evaluate_every", self.evaluate_every, "> 0")
        count = self.evaluations
        require(count is None or count >= 1, "evaluations", count, ">= 1")
        require(self.checkpoints >= 1, "checkpoints", self.checkpoints, ">= 1")
        require(self.threads >= 1, "threads", self.threads, ">= 1")
        micro = self.micro_batch
        require(micro is None or micro >= 1, "micro_batch", micro, ">= 1")
        require(bool(self.methods), "methods", {}, f"among {', '.join(METHODS)}")
        self._check_budget()
        for name, method in self.methods.items():
            _check_method(name, method)

    @property
    def base_batch(self) -> int:
        """m0: the batch that speedups and the adjusted budget refer to."""
        return self.budget.base_batch or min(self.batches)

    def _check_budget(self) -> None:
        if self.budget.kind == "adjusted":
            base, least = self.base_batch, min(self.batches)
            legal = f"<= the least batch, {least}, with an adjusted budget"
            require(base <= least, "budget.base_batch", base, legal)


def _check_method(name: str, method: Method) -> None:
    require(name in METHODS, "method", name, f"one of {', '.join(METHODS)}")
    where = f"methods.{name}"
    momentum, damping = method.momentum, method.damping
    styles = method.damping_styles
    if name in ONE_STYLE:
        require(not styles, f"{where}.damping_styles", styles, "left out")
    if name == "sgd":
        require(momentum is not None, f"{where}.momentum", None, "a grid")
        require(damping is None, f"{where}.damping", damping, "left out: sgd has none")
        return
    require(damping is not None, f"{where}.damping", None, "a grid")
    legal = f"left out: {name}'s grid is lr x damping (set it in settings.optimizer)"
    require(momentum is None, f"{where}.momentum", momentum, legal)
    ok = len(set(styles)) == len(styles)
    require(ok, f"{where}.damping_styles", styles, "all different")
