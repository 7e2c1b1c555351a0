"""ResNet-50 on ImageNet in 35 epochs with K-FAC, batches of 4,096 to 131,072.

Source: Osawa et al., "Large-Scale Distributed Second-Order Optimization Using
Kronecker-Factored Approximate Curvature for Deep Convolutional Neural Networks",
CVPR 2019: settings from Table 3, sections 4.1 to 4.4; epochs, iterations and accuracy
from Table 1. Diagonal Fisher for batch norm (section 5.4), every statistic fresh.
A process takes 32 images at a time, as their GPUs did; the rest accumulates.

Published: 75.0 to 75.3 % top-1 (Table 1). Not run here: ImageNet does not fit.
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

# batch: epochs, iterations, top-1,
#        alpha_mixup, gamma_0, gamma_target, rho_BN, t_warmup,
#        p_decay, e_start, e_end, eta_0, m_0
TABLE = {
    4096: (35, 10948, "75.1 ± 0.09 %")
    + (0.4, 2.5e-2, 2.5e-4, 16.0, 313)
    + (11.0, 1.0, 53.0, 8.18e-3, 0.997),
    8192: (35, 5434, "75.2 ± 0.05 %")
    + (0.4, 2.5e-2, 2.5e-4, 16.0, 157)
    + (8.0, 1.0, 53.5, 1.25e-2, 0.993),
    16384: (35, 2737, "75.2 ± 0.03 %")
    + (0.4, 2.5e-2, 2.5e-4, 32.0, 79)
    + (8.0, 1.0, 53.5, 2.5e-2, 0.985),
    32768: (45, 1760, "75.3 ± 0.13 %")
    + (0.6, 2.0e-2, 2.0e-4, 16.0, 59)
    + (3.5, 1.5, 49.5, 3.0e-2, 0.97),
    65536: (60, 1173, "75.0 ± 0.09 %")
    + (0.6, 1.5e-2, 1.5e-4, 16.0, 40)
    + (2.9, 2.0, 64.5, 4.0e-2, 0.95),
    131072: (100, 978, "75.0 ± 0.06 %")
    + (1.0, 1.0e-2, 1.0e-4, 8.0, 30)
    + (2.9, 3.0, 107.6, 7.0e-2, 0.93),
}


def recipe(batch: int) -> Recipe:
    """The column of Table 3 for one batch size."""
    epochs, steps, top1, mixup, first, damping, ratio, warmup, *rest = TABLE[batch]
    power, start, end, lr, momentum = rest
    config = TrainConfig(
        epochs=epochs,
        steps=steps,
        batch=batch,
        micro_batch=32,
        targets=(75.0,),
        model=ModelConfig(name="resnet50"),
        data=DataConfig(name="imagenet", mixup=mixup, erasing=0.5),
        optimizer=OptimizerConfig(name="spngd", lr=lr, momentum=momentum),
        curvature=CurvatureConfig(
            damping=damping,
            damping_start=first,
            damping_warmup=warmup,
            damping_style="factored",
            decay=0.0,
            norm="diag",
            norm_damping_ratio=ratio,
            rescale_weights=True,
        ),
        refresh=RefreshConfig(kind="every"),
        schedule=ScheduleConfig(
            kind="polynomial", start=start, end=end, power=power, couple_momentum=True
        ),
    )
    return Recipe(
        name=f"osawa2019-{batch // 1000}k",
        config=config,
        source="Osawa et al. 2019, Table 3",
        published=f"{top1} top-1",
    )


RECIPES = [recipe(batch) for batch in TABLE]
