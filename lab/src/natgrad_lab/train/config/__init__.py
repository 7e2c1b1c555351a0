"""Everything a run can be told, as frozen dataclasses that check themselves.

Epochs are real numbers everywhere: ``epoch = step * batch / examples``.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from natgrad_lab.train.config.checks import LATER, checks, require
from natgrad_lab.train.config.curvature import CurvatureConfig, RefreshConfig
from natgrad_lab.train.config.data import DataConfig, ModelConfig
from natgrad_lab.train.config.optimizer import (
    OptimizerConfig,
    OptimizerName,
    ScheduleConfig,
)

__all__ = [
    "SEEDS",
    "SEEDS_LEGAL",
    "CurvatureConfig",
    "DataConfig",
    "ModelConfig",
    "OptimizerConfig",
    "OptimizerName",
    "Precision",
    "RefreshConfig",
    "ScheduleConfig",
    "TrainConfig",
    "require",
]
SEEDS = 2**31
SEEDS_LEGAL = f"in [0, {SEEDS})"
"""Torch's generators, numpy's and a study's storage all take these."""
Precision = Literal["float32", "bfloat16", "float16"]


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
        check, micro, threads = checks(self), self.micro_batch, self.threads
        check("epochs", 0 < self.epochs < math.inf, "> 0 and finite")
        check("steps", self.steps is None or self.steps >= 1, ">= 1")
        check("batch", self.batch >= 1, ">= 1")
        check("micro_batch", micro is None or micro >= 1, ">= 1 or none")
        check("seed", 0 <= self.seed < SEEDS, SEEDS_LEGAL)
        for target in self.targets:
            require(0 < target <= 100, "targets", target, "percentages in (0, 100]")
        check("evaluate_every", self.evaluate_every > 0, "> 0")
        check("checkpoint_every", self.checkpoint_every >= 0, ">= 0")
        check("log_every", self.log_every >= 1, ">= 1")
        check("diagnostics", self.diagnostics >= 0, ">= 0")
        legal = "0 unless the optimizer is spngd, polar or has kfac"
        check("diagnostics", not self.diagnostics or self.optimizer.curved, legal)
        fixed = self.curvature.damping, self.curvature.damping_start
        plain = self.schedule == ScheduleConfig() and self.precision != "float16"
        ok = not self.optimizer.auto or (plain and fixed == (None, None))
        legal = "off with a damping, a schedule or float16"
        require(ok, "optimizer.auto", self.optimizer.auto, legal)
        limit = 10**8  # three years, in seconds
        check("timeout", 0 < self.timeout <= limit, f"in (0, {limit}]")
        ok = threads is None or 1 <= threads <= 1024
        check("threads", ok, "in 1 to 1024, or none")

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
