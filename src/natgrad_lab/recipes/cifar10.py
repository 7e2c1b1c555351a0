"""A ResNet-8 on CIFAR-10 at batches of 128 and 2,048: minutes on two cores.

Ours: every method of the comparison with the same budget and schedule.

Measured on CIFAR-10 (JPEG), one epoch, one seed, nothing tuned, best accuracy in % at
batch 128 (391 steps) and 2,048 (25 steps): muon 64.0 and 37.2, spngd 60.1 and 33.7,
kfac 53.0 and 32.1, soap 52.6 and 38.8, sgd 50.6 and 27.9, adamw 50.2 and 33.6,
shampoo 48.6 and 34.7. Steps and seconds: benchmarks/results/comparison_methods.md.
"""

from natgrad_lab.recipes.recipe import Recipe
from natgrad_lab.recipes.small import rules
from natgrad_lab.train.config import (
    DataConfig,
    ModelConfig,
    ScheduleConfig,
    TrainConfig,
)

SOURCE = "natgrad"
BATCHES = (128, 2048)


def recipe(method: str, batch: int) -> Recipe:
    """One method at one batch size."""
    rule = rules(large=batch > 128)[method]
    config = TrainConfig(
        epochs=2.0,
        batch=batch,
        micro_batch=min(batch, 512),
        targets=(50.0, 60.0, 65.0),
        evaluate_every=0.25,
        model=ModelConfig(name="resnet8"),
        data=DataConfig(name="cifar10"),
        optimizer=rule.optimizer,
        curvature=rule.curvature,
        refresh=rule.refresh,
        schedule=ScheduleConfig(kind="cosine", warmup_epochs=0.1),
    )
    return Recipe(name=f"cifar10-{method}-{batch}", config=config, source=SOURCE)


RECIPES = [recipe(method, batch) for batch in BATCHES for method in rules(large=False)]
