"""SP-NGD: ResNet-50 on ImageNet, batches of 4,096 to 131,072, stale statistics.

Source: Osawa et al., "Scalable and Practical Natural Gradient for Large-Scale Deep
Learning", TPAMI 2020: settings from Table 2, sections 6.1 to 6.3 and 7.1; steps and
accuracy from Table 2. Empirical Fisher, unit-wise batch norm, adaptive refresh
(Algorithms 1 and 2) up to 32K as published; 65K and 131K were run always fresh.

Published: 74.8 to 75.6 % top-1 (Table 2, with stale statistics where it has them).
Not run here: ImageNet does not fit.
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

# batch: epochs, alpha_mixup, p_decay, e_start, e_end, eta_0, m_0, lambda, steps, result
TABLE = {
    4096: (35, 0.4, 11.0, 1.0, 53.0, 8.18e-3, 0.997, 2.5e-4, 10948)
    + ("74.8 % top-1 (fresh 75.2 %), statistics reduced to 23.6 %",),
    8192: (35, 0.4, 8.0, 1.0, 53.5, 1.25e-2, 0.993, 2.5e-4, 5434)
    + ("75.3 % top-1 (fresh 75.5 %), statistics reduced to 15.1 %",),
    16384: (35, 0.4, 8.0, 1.0, 53.5, 2.5e-2, 0.985, 2.5e-4, 2737)
    + ("75.2 % top-1 (fresh 75.3 %), statistics reduced to 5.4 %",),
    32768: (45, 0.6, 3.5, 1.5, 49.5, 3.0e-2, 0.97, 2.0e-4, 1760)
    + ("75.4 % top-1 (fresh 75.6 %), statistics reduced to 7.8 %",),
    65536: (60, 0.6, 2.9, 2.0, 64.5, 4.0e-2, 0.95, 1.5e-4, 1173)
    + ("75.6 % top-1 (fresh)",),
    131072: (90, 1.0, 2.9, 3.0, 100.0, 7.0e-2, 0.93, 1.0e-4, 873)
    + ("74.9 % top-1 (fresh)",),
}


def recipe(batch: int) -> Recipe:
    """The row of Table 2 for one batch size."""
    epochs, mixup, power, start, end, lr, momentum, damping, steps, top1 = TABLE[batch]
    stale = batch <= 32768
    config = TrainConfig(
        epochs=epochs,
        steps=steps,
        batch=batch,
        micro_batch=32,
        targets=(74.9,),
        model=ModelConfig(name="resnet50"),
        data=DataConfig(name="imagenet", mixup=mixup, erasing=0.5),
        optimizer=OptimizerConfig(name="spngd", lr=lr, momentum=momentum),
        curvature=CurvatureConfig(
            damping=damping,
            damping_style="factored",
            decay=0.0,
            fisher="empirical",
            norm="unit",
            rescale_weights=True,
        ),
        refresh=RefreshConfig(kind="adaptive" if stale else "every", tolerance=0.1),
        schedule=ScheduleConfig(
            kind="polynomial", start=start, end=end, power=power, couple_momentum=True
        ),
    )
    return Recipe(
        name=f"osawa2020-{batch // 1000}k",
        config=config,
        source="Osawa et al. 2020, Table 2",
        published=top1,
    )


RECIPES = [recipe(batch) for batch in TABLE]
