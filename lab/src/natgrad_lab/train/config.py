"""Everything a run can be told, as frozen dataclasses that check themselves.

Epochs are real numbers everywhere: ``epoch = step * batch / examples``.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

OptimizerName = Literal["sgd", "adamw", "spngd", "polar", "muon", "soap", "shampoo"]
TRUSTED = ("sgd", "adamw", "muon", "soap")
ScheduleKind = Literal["constant", "steps", "polynomial", "cosine"]
RefreshKind = Literal["every", "adaptive", "staircase", "late", "budget"]
SEEDS = 2**31
SEEDS_LEGAL = f"in [0, {SEEDS})"
"""Torch's generators, numpy's and a study's storage all take these."""
Crop = Literal["stretched", "resized"]
MixupKind = Literal["step", "image"]
Precision = Literal["float32", "bfloat16", "float16"]
IMAGES = ("crop", "size", "cache", "workers")
"""Settings of images that are decoded when they are asked for."""
LATER = {"later": True}
"""Metadata of a setting that came later. `run.plain` leaves it out while it has its
default, so that a study's hashes of older configurations stay what they were."""


def require(ok: bool, name: str, value: Any, legal: str) -> None:
    """Raise a ValueError that names the value and what is legal."""
    if not ok:
        raise ValueError(f"Invalid {name}={value!r}. Must be {legal}.")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The network: a name known to `natgrad_lab.models.build`."""

    name: str = "resnet8"
    """Model name, for example resnet20, resnet50, airbench, mlp, vit, gpt; for values
    autoencoder, sines, field."""
    width: int | None = None
    """Width of the CIFAR ResNets, airbench, vit, gpt and the models of values. None:
    the model's own."""
    channels_last: bool | None = None
    """Memory layout of images. None: channels_last for ResNets."""

    def __post_init__(self) -> None:
        width = self.width
        require(width is None or width >= 1, "model.width", width, ">= 1 or none")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The data set and how a training batch is varied."""

    name: str = "digits"
    """Data set name: digits, cifar10, fashion_mnist, imagenet, text; of values, learnt
    by squared error: autoencoder, picture, poisson."""
    root: Path | None = None
    """Folder of all data sets. None: $NATGRAD_DATA, or the user's cache."""
    folder: Path | None = field(default=None, metadata=LATER)
    """text: folder of text files (.txt, .md, .py, .rst, at any depth). None: the folder
    text in the root, or without one the sources of Python's standard library."""
    crop: Crop = field(default="stretched", metadata=LATER)
    """imagenet: what training sees of an image. stretched: a window of the image
    stretched to 256 x 256 (Osawa et al. 2020, 6.1). resized: a part of random area and
    aspect, resized (torchvision's RandomResizedCrop)."""
    size: int = field(default=224, metadata=LATER)
    """imagenet: side of the images that the model sees; 256 scales with it."""
    cache: Path | None = field(default=None, metadata=LATER)
    """imagenet: folder that `natgrad data cache` has written. None: the originals."""
    workers: int | None = field(default=None, metadata=LATER)
    """imagenet: threads a process that decode. None: its share of the cores."""
    on_device: bool | None = field(default=None, metadata=LATER)
    """Normalise, erase and mix on the device, where batches are sent ahead as pixels.
    False: on the host. None: on the device if that is a GPU."""
    augment: bool = True
    """Random crops and flips, where the data set has them."""
    mixup: float = 0.0
    """alpha of running mixup (Osawa et al. 2019, eq. 9-12); 0 turns it off."""
    mixup_kind: MixupKind = field(default="image", metadata=LATER)
    """image: one lambda per image, max(lambda, 1 - lambda); erased after mixing; only
    the last forward is kept, as in the authors' code. step: one lambda per step, as it
    is printed; erased before mixing; a process keeps its share of the last batch."""
    erasing: float = 0.0
    """Probability that a zero rectangle is put on an image (Osawa et al. 2019, 4.1)."""
    label_smoothing: float = 0.0
    """Share of the label spread evenly over all classes."""

    def __post_init__(self) -> None:
        text = self.name == "text"
        require(self.mixup >= 0, "data.mixup", self.mixup, ">= 0")
        require(not (text and self.mixup), "data.mixup", self.mixup, "0 for text")
        legal = "none unless data.name is text"
        require(text or self.folder is None, "data.folder", self.folder, legal)
        for name in IMAGES:
            value = getattr(self, name)
            ok = self.name == "imagenet" or value == getattr(type(self), name)
            require(ok, f"data.{name}", value, "unset unless data.name is imagenet")
        require(self.size >= 8, "data.size", self.size, ">= 8")
        workers = self.workers
        require(workers is None or workers >= 1, "data.workers", workers, ">= 1")
        require(0 <= self.erasing <= 1, "data.erasing", self.erasing, "in [0, 1]")
        smoothing = self.label_smoothing
        require(0 <= smoothing < 1, "data.label_smoothing", smoothing, "in [0, 1)")

    @property
    def options(self) -> dict[str, Any]:
        """What `natgrad_lab.data.load` is given beside name and root."""
        if self.name == "imagenet":
            images = {name: getattr(self, name) for name in IMAGES}
            threads = images.pop("workers")
            return {**images, "threads": threads}
        return {} if self.folder is None else {"folder": self.folder}


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
        require(0 < self.lr < math.inf, "optimizer.lr", self.lr, "> 0 and finite")
        momentum = self.usual_momentum
        require(0 <= momentum < 1, "optimizer.momentum", momentum, "in [0, 1)")
        require(0 <= self.beta2 < 1, "optimizer.beta2", self.beta2, "in [0, 1)")
        decay = self.usual_weight_decay
        require(decay >= 0, "optimizer.weight_decay", decay, ">= 0")
        rest = self.rest_lr
        require(rest is None or rest > 0, "optimizer.rest_lr", rest, "> 0 or none")
        require(self.interval >= 1, "optimizer.interval", self.interval, ">= 1")
        ok = self.rest == "sgd" or self.name == "muon"
        require(ok, "optimizer.rest", self.rest, "sgd unless optimizer.name is muon")
        for name in ("average", "decay"):
            value = getattr(self, name)
            legal = "none unless optimizer.name is spngd or polar"
            require(value is None or self.alone, f"optimizer.{name}", value, legal)
        ok = not self.flat or self.name == "soap"
        require(ok, "optimizer.flat", self.flat, "off unless optimizer.name is soap")
        ok = not self.auto or (self.name == "spngd" and self.momentum is None)
        legal = "off unless optimizer.name is spngd, without a momentum"
        require(ok, "optimizer.auto", self.auto, legal)
        legal = "off unless optimizer.name is sgd or adamw"
        ok = not self.kfac or self.name in ("sgd", "adamw")
        require(ok, "optimizer.kfac", self.kfac, legal)
        ok = not self.trust or (self.name in TRUSTED and not self.kfac)
        legal = f"off unless optimizer.name is one of {', '.join(TRUSTED)}"
        require(ok, "optimizer.trust", self.trust, f"{legal}, without kfac")

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
        for name in ("damping", "kappa", "fallback_rate", "norm_damping_ratio"):
            value = getattr(self, name)
            require(value is None or value > 0, f"curvature.{name}", value, "> 0")
        start, steps = self.damping_start, self.damping_warmup
        ok = start is None or start > 0
        require(ok, "curvature.damping_start", start, "> 0 or none")
        ok = (steps > 0) == (start is not None)
        legal = "> 0 with damping_start, else 0"
        require(ok, "curvature.damping_warmup", steps, legal)
        factor = self.damping_decay
        require(0 < factor <= 1, "curvature.damping_decay", factor, "in (0, 1]")
        decay = self.factor_decay
        ok = decay is None or 0 <= decay <= 1
        require(ok, "curvature.factor_decay", decay, "in [0, 1]")
        for name, word in (("subsample", "needed"), ("largest_factor", "whole")):
            value = getattr(self, name)
            ok = not isinstance(value, int) or value >= 1
            require(ok, f"curvature.{name}", value, f">= 1, {word} or none")
        ok = not self.half or self.wire is not None
        require(ok, "curvature.half", self.half, "none unless curvature.wire is given")
        size = self.bucket_mib
        ok = size is None or 0 < size < math.inf
        require(ok, "curvature.bucket_mib", size, "> 0 and finite")
        ok = self.kappa is None or self.length in (None, "kl_clip")
        legal = "none unless curvature.length is kl_clip"
        require(ok, "curvature.kappa", self.kappa, legal)


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
        timed = {"statistics": self.statistics, "inverses": self.inverses}
        for name, value in timed.items():
            require(value is None or value >= 1, f"refresh.{name}", value, ">= 1")
        require(
            self.always_fresh >= 0, "refresh.always_fresh", self.always_fresh, ">= 0"
        )
        tolerance = self.tolerance
        ok = tolerance is None or 0 < tolerance < 1
        require(ok, "refresh.tolerance", tolerance, "in (0, 1)")
        require(self.overhead > 0, "refresh.overhead", self.overhead, "> 0")
        require(
            self.decay_factor >= 1, "refresh.decay_factor", self.decay_factor, ">= 1"
        )


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
        warmup = self.warmup_epochs
        require(warmup >= 0, "schedule.warmup_epochs", warmup, ">= 0")
        first = self.warmup_start
        require(0 <= first <= 1, "schedule.warmup_start", first, "in [0, 1]")
        factor = self.decay_factor
        require(0 < factor <= 1, "schedule.decay_factor", factor, "in (0, 1]")
        require(self.power > 0, "schedule.power", self.power, "> 0")
        ok = self.end is None or self.end > self.start
        require(ok, "schedule.end", self.end, f"> start={self.start}")
        ok = self.kind == "polynomial" or not self.couple_momentum
        legal = "off unless schedule.kind is polynomial"
        require(ok, "schedule.couple_momentum", self.couple_momentum, legal)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run."""

    epochs: float = 10.0
    """Passes over the training data."""
    steps: int | None = None
    """Updates in all; overrides epochs."""
    batch: int = 128
    """Examples an update, over all processes."""
    micro_batch: int | None = None
    """Examples per forward on one process; gradients and statistics accumulate until
    the batch is full. None: a process takes its whole share at once."""
    seed: int = 0
    """Seed of the weights, the order of the data and its augmentation."""
    targets: tuple[float, ...] = ()
    """Test accuracies, in percent, to report steps and seconds to."""
    evaluate_every: float = 1.0
    """Epochs between evaluations."""
    checkpoint_every: float = 1.0
    """Epochs between checkpoints. 0: only at the end and on interruption."""
    log_every: int = 10
    """Steps between training records."""
    precision: Precision = field(default="float32", metadata=LATER)
    """Of the products in forward and backward: float32, bfloat16 (autocast) or float16
    (with a loss scale). Weights and statistics are float32 in any case."""
    threads: int | None = None
    """CPU threads a process. None: torch's default."""
    timeout: float = 600.0
    """Seconds after which a process that does not answer ends the others."""
    tensorboard: bool = False
    """Also write TensorBoard events into the run folder."""
    diagnostics: int = 0
    """Steps between looks at every layer, for `natgrad inspect`. 0: none."""
    out: Path | None = None
    """Run folder. None: runs/<recipe>-<date>."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    curvature: CurvatureConfig = field(default_factory=CurvatureConfig)
    refresh: RefreshConfig = field(default_factory=RefreshConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)

    def __post_init__(self) -> None:
        finite = 0 < self.epochs < math.inf
        require(finite, "epochs", self.epochs, "> 0 and finite")
        require(self.steps is None or self.steps >= 1, "steps", self.steps, ">= 1")
        require(self.batch >= 1, "batch", self.batch, ">= 1")
        micro = self.micro_batch
        require(micro is None or micro >= 1, "micro_batch", micro, ">= 1 or none")
        require(0 <= self.seed < SEEDS, "seed", self.seed, SEEDS_LEGAL)
        for target in self.targets:
            require(0 < target <= 100, "targets", target, "percentages in (0, 100]")
        require(self.evaluate_every > 0, "evaluate_every", self.evaluate_every, "> 0")
        every = self.checkpoint_every
        require(every >= 0, "checkpoint_every", every, ">= 0")
        require(self.log_every >= 1, "log_every", self.log_every, ">= 1")
        looks = self.diagnostics
        require(looks >= 0, "diagnostics", looks, ">= 0")
        legal = "0 unless the optimizer is spngd, polar or has kfac"
        require(not looks or self.optimizer.curved, "diagnostics", looks, legal)
        fixed = self.curvature.damping, self.curvature.damping_start
        plain = self.schedule == ScheduleConfig() and self.precision != "float16"
        ok = not self.optimizer.auto or (plain and fixed == (None, None))
        legal = "off with a damping, a schedule or float16"
        require(ok, "optimizer.auto", self.optimizer.auto, legal)
        limit = 10**8  # three years, in seconds
        require(0 < self.timeout <= limit, "timeout", self.timeout, f"in (0, {limit}]")
        threads = self.threads
        ok = threads is None or 1 <= threads <= 1024
        require(ok, "threads", threads, "in 1 to 1024, or none")

    def total_steps(self, examples: int) -> int:
        """Updates of the whole run on a training set of that size."""
        return self.steps or math.ceil(self.epochs * examples / self.batch)

    def epoch(self, step: int, examples: int) -> float:
        """The real-valued epoch after ``step`` updates."""
        return step * self.batch / examples

    def accumulation(self, world: int) -> tuple[int, int]:
        """(examples per forward on one process, forwards per update)."""
        micro = self.micro_batch or max(1, self.batch // world)
        legal = f"a multiple of {world} processes x micro_batch={micro}"
        require(self.batch % (world * micro) == 0, "batch", self.batch, legal)
        return micro, self.batch // (world * micro)
