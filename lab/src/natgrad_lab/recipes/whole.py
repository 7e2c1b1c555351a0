"""Whole trainings at large batch: Polar and Muon on the networks of two speedruns.

Ours. `airbench` is the CIFAR-10 speedrun of Jordan (2024) at a quarter of its width,
batch 10,000, 12 epochs; `gpt-small` a rotary GPT on the sources of Python's standard
library, 12,288 characters a step, 100 steps. Rates fall linearly to zero, over all of
the run or its last 70%. `benchmarks/quality` compares rules on these networks; it has
its own loop (the speedrun's augmentation, hidden matrices apart from the rest), so that
its figures are not those of these recipes. Not run here to the end.
"""

from natgrad_lab.recipes.recipe import Recipe
from natgrad_lab.train.config import (
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainConfig,
)

SOURCE = "natgrad"
# 100 steps on 79,610 sequences
SEQUENCES, TEXT_EPOCHS = 96, 0.12
FLAT = 0.3
OPTIMIZERS = {
    "airbench": {
        "polar": OptimizerConfig(name="polar", lr=0.24),
        "muon": OptimizerConfig(name="muon", lr=0.24, momentum=0.6, rest="adamw"),
    },
    "gpt-small": {
        "polar": OptimizerConfig(name="polar", lr=0.12),
        "muon": OptimizerConfig(
            name="muon", lr=0.04, momentum=0.8, rest="adamw", rest_lr=0.004
        ),
    },
}


def airbench(method: str) -> Recipe:
    """The speedrun."""
    config = TrainConfig(
        epochs=12.0,
        batch=10_000,
        targets=(78.0, 80.0, 82.0),
        evaluate_every=1.0,
        log_every=1,
        model=ModelConfig(name="airbench", width=16),
        data=DataConfig(name="cifar10", label_smoothing=0.2),
        optimizer=OPTIMIZERS["airbench"][method],
        schedule=ScheduleConfig(kind="polynomial"),
    )
    return Recipe(name=f"airbench-{method}", config=config, source=SOURCE)


def gpt_small(method: str) -> Recipe:
    """The language model."""
    config = TrainConfig(
        epochs=TEXT_EPOCHS,
        batch=SEQUENCES,
        micro_batch=48,
        targets=(50.0, 55.0),
        evaluate_every=TEXT_EPOCHS / 4,
        model=ModelConfig(name="gpt_rotary"),
        data=DataConfig(name="text", augment=False),
        optimizer=OPTIMIZERS["gpt-small"][method],
        schedule=ScheduleConfig(
            kind="polynomial", start=FLAT * TEXT_EPOCHS, end=TEXT_EPOCHS
        ),
    )
    return Recipe(name=f"gpt-small-{method}", config=config, source=SOURCE)


RECIPES = [
    make(method) for make in (airbench, gpt_small) for method in ("polar", "muon")
]
