"""A ResNet-8 on Fashion-MNIST at batches of 128 and 2,048: minutes on two cores.

Ours: every method of the comparison with the same budget and schedule.

Measured: `MEASURED` below, of half an epoch at batch 128 (235 steps) and one at 2,048
(30 steps) instead of the recipe's two, with one seed and nothing tuned, by

    natgrad train fashion-METHOD-128 --epochs 0.5 --evaluate-every 0.125 --threads 1
    natgrad train fashion-METHOD-2048 --epochs 1 --evaluate-every 0.25 --threads 1

Steps and seconds are in benchmarks/results/comparison_methods.md. The recipe's own two
epochs, and the methods that `MEASURED` does not have, were not run.
"""

from natgrad_lab.recipes.recipe import Recipe, in_epochs
from natgrad_lab.recipes.small import rules
from natgrad_lab.train.config import (
    DataConfig,
    ModelConfig,
    ScheduleConfig,
    TrainConfig,
)

SOURCE = "natgrad"
BATCHES = (128, 2048)
# best accuracy in %, and after how many epochs
MEASURED = {
    128: {
        **{"muon": "88.2", "spngd": "86.5", "soap": "85.0", "kfac": "84.5"},
        **{"sgd": "84.1", "adamw": "83.6", "shampoo": "83.4"},
    },
    2048: {
        **{"soap": "80.5", "muon": "79.0", "spngd": "78.7", "kfac": "77.5"},
        **{"adamw": "76.8", "shampoo": "75.8", "sgd": "72.9"},
    },
}
MEASURED_EPOCHS = {128: 0.5, 2048: 1.0}


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
    return Recipe(
        name=f"fashion-{method}-{batch}",
        config=config,
        source=SOURCE,
        measured=in_epochs(MEASURED[batch].get(method), MEASURED_EPOCHS[batch]),
    )


RECIPES = [recipe(method, batch) for batch in BATCHES for method in rules(large=False)]
