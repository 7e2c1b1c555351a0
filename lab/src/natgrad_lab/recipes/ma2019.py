"""ResNet-20 on CIFAR-10, K-FAC against SGD at batches of 128 to 16,384.

Source: Ma et al., "Inefficiency of K-FAC for Large Batch Size Training", section III:
weight decay 5e-4; (log2(batch / 128) + 1) x 100 epochs (the adjusted budget); the
learning rate divided by ten at 40 % and 80 % of them (the scaled schedule); decay of
the statistics 0.9; update clipping 0.1; normal damping.

The paper tunes each batch size over 64 points (K-FAC: learning rate 1e-3 to 2.187 and
damping 1e-4 to 0.2187; SGD: learning rate 0.05 to 9.62 and momentum 0.9 to 0.999) and
does not print the winners: the values here are points of that grid (of 8 by 8, evenly
spread in log space), equal for all batches. Update clipping bounds the same quantity as
the KL clip.

The paper does not say three things that a run needs. Here K-FAC estimates its
statistics at every step and inverts them every 10 (--refresh.inverses 1 inverts at
every step), its momentum is 0.9, and a batch goes through the network 128 examples at a
time, which is what batch norm averages over (--micro-batch).

Published: not printed; Figure 2 plots the best accuracy of the grid. Not run here.
"""

import math

from natgrad_lab.recipes.recipe import Recipe
from natgrad_lab.train.config import (
    CurvatureConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    RefreshConfig,
    ScheduleConfig,
    TrainConfig,
)

BATCHES = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
OPTIMIZERS = {
    "sgd": OptimizerConfig(lr=0.106, momentum=0.9, weight_decay=5e-4),
    "kfac": OptimizerConfig(kfac=True, lr=0.081, momentum=0.9, weight_decay=5e-4),
}


def recipe(method: str, batch: int) -> Recipe:
    """One method at one batch size, under the adjusted budget."""
    epochs = 100.0 * (math.log2(batch / 128) + 1)
    config = TrainConfig(
        epochs=epochs,
        batch=batch,
        micro_batch=128,
        targets=(90.0,),
        model=ModelConfig(name="resnet20"),
        data=DataConfig(name="cifar10"),
        optimizer=OPTIMIZERS[method],
        curvature=CurvatureConfig(
            largest_factor="whole", damping=0.0081, factor_decay=0.9, kappa=0.1
        ),
        refresh=RefreshConfig(statistics=1, inverses=10),
        schedule=ScheduleConfig(
            kind="steps", decay_epochs=(0.4 * epochs, 0.8 * epochs), decay_factor=0.1
        ),
    )
    return Recipe(
        name=f"ma2019-{method}-{batch}",
        config=config,
        source="Ma et al. 2019, section III",
        published="not printed (Figure 2 plots the best of 64)",
    )


RECIPES = [recipe(method, batch) for method in OPTIMIZERS for batch in BATCHES]
