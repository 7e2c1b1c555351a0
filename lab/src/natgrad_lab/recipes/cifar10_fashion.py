"""A ResNet-8 on CIFAR-10 and Fashion-MNIST at batches of 128 and 2,048: minutes each.

Ours: every method of the comparison with the same budget and schedule.

Measured: `MEASURED` below, of less than the recipe's two epochs, with one seed and
nothing tuned, by

    natgrad train cifar10-METHOD-BATCH --epochs 1 --evaluate-every 0.25 --threads 1
    natgrad train fashion-METHOD-128 --epochs 0.5 --evaluate-every 0.125 --threads 1
    natgrad train fashion-METHOD-2048 --epochs 1 --evaluate-every 0.25 --threads 1

which are 391, 25 (CIFAR-10, as JPEG files), 235 and 30 steps (Fashion-MNIST). Steps
and seconds are in benchmarks/results/comparison_methods.md. The recipe's own two
epochs, and the methods that `MEASURED` does not have, were not run.
"""

from typing import NamedTuple

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


class Images(NamedTuple):
    """What differs between the data sets."""

    data: DataConfig
    targets: tuple[float, ...]
    epochs: dict[int, float]
    """How many were measured, by batch."""
    note: str = ""


IMAGES = {
    "fashion": Images(
        data=DataConfig(name="fashion_mnist", augment=False),
        targets=(85.0, 88.0, 90.0),
        epochs={128: 0.5, 2048: 1.0},
    ),
    "cifar10": Images(
        data=DataConfig(name="cifar10"),
        targets=(50.0, 60.0, 65.0),
        epochs={128: 1.0, 2048: 1.0},
        note=" of CIFAR-10 (JPEG)",
    ),
}
# best accuracy in %
MEASURED = {
    ("fashion", 128): {
        **{"muon": "88.2", "spngd": "86.5", "soap": "85.0", "kfac": "84.5"},
        **{"sgd": "84.1", "adamw": "83.6", "shampoo": "83.4"},
    },
    ("fashion", 2048): {
        **{"soap": "80.5", "muon": "79.0", "spngd": "78.7", "kfac": "77.5"},
        **{"adamw": "76.8", "shampoo": "75.8", "sgd": "72.9"},
    },
    ("cifar10", 128): {
        **{"muon": "64.0", "spngd": "60.1", "kfac": "53.0", "soap": "52.6"},
        **{"sgd": "50.6", "adamw": "50.2", "shampoo": "48.6"},
    },
    ("cifar10", 2048): {
        **{"soap": "38.8", "muon": "37.2", "shampoo": "34.7", "spngd": "33.7"},
        **{"adamw": "33.6", "kfac": "32.1", "sgd": "27.9"},
    },
}


def recipe(images: str, method: str, batch: int) -> Recipe:
    """One method on one data set at one batch size."""
    rule, of = rules(large=batch > 128)[method], IMAGES[images]
    config = TrainConfig(
        epochs=2.0,
        batch=batch,
        micro_batch=min(batch, 512),
        targets=of.targets,
        evaluate_every=0.25,
        model=ModelConfig(name="resnet8"),
        data=of.data,
        optimizer=rule.optimizer,
        curvature=rule.curvature,
        refresh=rule.refresh,
        schedule=ScheduleConfig(kind="cosine", warmup_epochs=0.1),
    )
    best = MEASURED[images, batch].get(method)
    return Recipe(
        name=f"{images}-{method}-{batch}",
        config=config,
        source=SOURCE,
        measured=in_epochs(best, of.epochs[batch], of.note),
    )


RECIPES = [
    recipe(images, method, batch)
    for images in IMAGES
    for batch in BATCHES
    for method in rules(large=False)
]
