"""A ResNet-8 on CIFAR-10 at batches of 128 and 2,048: minutes on two cores.

Ours: every method of the comparison with the same budget and schedule.

Measured on CIFAR-10 (JPEG): `MEASURED` below, of one epoch (391 and 25 steps) instead
of the recipe's two, with one seed and nothing tuned, by

    natgrad train cifar10-METHOD-BATCH --epochs 1 --evaluate-every 0.25 --threads 1

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
# best accuracy in %
MEASURED = {
    128: {
        **{"muon": "64.0", "spngd": "60.1", "kfac": "53.0", "soap": "52.6"},
        **{"sgd": "50.6", "adamw": "50.2", "shampoo": "48.6"},
    },
    2048: {
        **{"soap": "38.8", "muon": "37.2", "shampoo": "34.7", "spngd": "33.7"},
        **{"adamw": "33.6", "kfac": "32.1", "sgd": "27.9"},
    },
}


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
    return Recipe(
        name=f"cifar10-{method}-{batch}",
        config=config,
        source=SOURCE,
        measured=in_epochs(MEASURED[batch].get(method), 1.0, " of CIFAR-10 (JPEG)"),
    )


RECIPES = [recipe(method, batch) for batch in BATCHES for method in rules(large=False)]
