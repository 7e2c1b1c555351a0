"""ResNet-32 on CIFAR-10: SGD for 200 epochs, K-FAC for 100, on N = 1, 2, 4, 8 GPUs.

Source: Pauloski et al., "Convolutional Neural Network Training with Distributed
K-FAC", SC 2020, section VI-C1: learning rate N x 0.1, batch N x 128, divided by ten at
epochs 35, 75, 90 (K-FAC) or 100, 150 (SGD), five epochs of linear warmup, K-FAC every
10 iterations. The text says ResNet-34; its Tables I and II and Figure 4 say ResNet-32,
which is what 92.49 % (its baseline) belongs to. Momentum 0.9 and damping 0.001 are the
paper's ImageNet values, kappa 1e-3 is section V-C's; weight decay 5e-4 is customary.

Published: Table II. Not run here in full.
"""

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

# GPUs: SGD, K-FAC (Table II)
PUBLISHED = {
    1: ("92.76 %", "92.93 %"),
    2: ("92.77 %", "92.76 %"),
    4: ("92.58 %", "92.90 %"),
    8: ("92.69 %", "92.92 %"),
}
EPOCHS = {"sgd": 200.0, "kfac": 100.0}
DECAYS = {"sgd": (100.0, 150.0), "kfac": (35.0, 75.0, 90.0)}


def recipe(method: str, gpus: int) -> Recipe:
    """One column and row of Table II."""
    config = TrainConfig(
        epochs=EPOCHS[method],
        batch=128 * gpus,
        micro_batch=128,
        targets=(92.49,),
        model=ModelConfig(name="resnet32"),
        data=DataConfig(name="cifar10"),
        optimizer=OptimizerConfig(
            kfac=method == "kfac", lr=0.1 * gpus, momentum=0.9, weight_decay=5e-4
        ),
        curvature=CurvatureConfig(
            largest_factor="whole", damping=1e-3, kappa=1e-3, strategy="factor_wise"
        ),
        refresh=RefreshConfig(statistics=1, inverses=10),
        schedule=ScheduleConfig(
            kind="steps", warmup_epochs=5.0, decay_epochs=DECAYS[method]
        ),
    )
    return Recipe(
        name=f"pauloski2020-cifar10-{method}-x{gpus}",
        config=config,
        source="Pauloski et al. 2020, section VI-C1, Table II",
        published=PUBLISHED[gpus][method == "kfac"],
    )


RECIPES = [recipe(method, gpus) for method in EPOCHS for gpus in PUBLISHED]
