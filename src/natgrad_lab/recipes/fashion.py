"""A ResNet-8 on Fashion-MNIST at batches of 128 and 2,048: minutes on two cores.

Ours: every method of the comparison with the same budget and schedule.

Measured with one seed and nothing tuned, best accuracy in % after half an epoch at
batch 128 (235 steps) and one at 2,048 (30 steps): muon 88.2 and 79.0, spngd 86.5 and
78.7, soap 85.0 and 80.5, kfac 84.5 and 77.5, sgd 84.1 and 72.9, adamw 83.6 and 76.8,
shampoo 83.4 and 75.8. Steps and seconds: benchmarks/results/comparison_methods.md.
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
        targets=(85.0, 88.0, 90.0),
        evaluate_every=0.25,
        model=ModelConfig(name="resnet8"),
        data=DataConfig(name="fashion_mnist", augment=False),
        optimizer=rule.optimizer,
        curvature=rule.curvature,
        refresh=rule.refresh,
        schedule=ScheduleConfig(kind="cosine", warmup_epochs=0.1),
    )
    return Recipe(name=f"fashion-{method}-{batch}", config=config, source=SOURCE)


RECIPES = [recipe(method, batch) for batch in BATCHES for method in rules(large=False)]
