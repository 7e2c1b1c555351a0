"""ResNet-50 on ImageNet in 35 epochs with K-FAC, batches of 4,096 to 131,072.

Source: Osawa et al., "Large-Scale Distributed Second-Order Optimization Using
Kronecker-Factored Approximate Curvature for Deep Convolutional Neural Networks",
CVPR 2019: settings from Table 3, sections 4.1 to 4.4; epochs, iterations and accuracy
from Table 1. Batch norm has its Fisher without approximation and every statistic is
fresh, as in Table 1 and Figure 3 (Figure 6's caption: "no approx"). For section 5.4's
variant add --curvature.norm diag, for its stale statistics --refresh.kind late.
A process takes 32 images at a time, as their GPUs did; the rest accumulates. Half
precision is section 1's ("for both computation and" communication) and section 3.4's
(Tensor Cores): float16 products here, those of statistics too, with a loss scale,
which it does not mention.
Running mixup and erasing are those of the authors' published code, one lambda per image
(--data.mixup-kind step: one per step, as the equations have it). Batch norm's weights
begin at 1; in that code they are drawn from N(1, 0.05^2) (--model.norm-deviation
0.05).

Published: 75.0 to 75.3 % top-1 (Table 1). Not run here: ImageNet does not fit.
"""

from typing import NamedTuple

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


class Row(NamedTuple):
    """A row of Table 3, in the paper's symbols."""

    alpha_mixup: float
    gamma_0: float
    gamma_target: float
    rho_bn: float
    t_warmup: int
    p_decay: float
    e_start: float
    e_end: float
    eta_0: float
    m_0: float


TABLE_3 = {
    4096: Row(0.4, 2.5e-2, 2.5e-4, 16.0, 313, 11.0, 1.0, 53.0, 8.18e-3, 0.997),
    8192: Row(0.4, 2.5e-2, 2.5e-4, 16.0, 157, 8.0, 1.0, 53.5, 1.25e-2, 0.993),
    16384: Row(0.4, 2.5e-2, 2.5e-4, 32.0, 79, 8.0, 1.0, 53.5, 2.5e-2, 0.985),
    32768: Row(0.6, 2.0e-2, 2.0e-4, 16.0, 59, 3.5, 1.5, 49.5, 3.0e-2, 0.97),
    65536: Row(0.6, 1.5e-2, 1.5e-4, 16.0, 40, 2.9, 2.0, 64.5, 4.0e-2, 0.95),
    131072: Row(1.0, 1.0e-2, 1.0e-4, 8.0, 30, 2.9, 3.0, 107.6, 7.0e-2, 0.93),
}
# batch: epochs, iterations, top-1 accuracy
TABLE_1 = {
    4096: (35.0, 10948, "75.1 ± 0.09 %"),
    8192: (35.0, 5434, "75.2 ± 0.05 %"),
    16384: (35.0, 2737, "75.2 ± 0.03 %"),
    32768: (45.0, 1760, "75.3 ± 0.13 %"),
    65536: (60.0, 1173, "75.0 ± 0.09 %"),
    131072: (100.0, 978, "75.0 ± 0.06 %"),
}


def recipe(batch: int) -> Recipe:
    """The column of Table 3 for one batch size."""
    row = TABLE_3[batch]
    epochs, steps, top1 = TABLE_1[batch]
    config = TrainConfig(
        epochs=epochs,
        steps=steps,
        batch=batch,
        micro_batch=32,
        precision="float16",
        targets=(75.0,),
        model=ModelConfig(name="resnet50"),
        data=DataConfig(name="imagenet", mixup=row.alpha_mixup, erasing=0.5),
        optimizer=OptimizerConfig(
            name="spngd", lr=row.eta_0, momentum=row.m_0, decay="rescaled"
        ),
        curvature=CurvatureConfig(
            largest_factor="whole",
            damping=row.gamma_target,
            damping_start=row.gamma_0,
            damping_warmup=row.t_warmup,
            style="factored",
            factor_decay=0.0,
            factor_precision="float16",
            norm="full",
            norm_damping_ratio=row.rho_bn,
        ),
        refresh=RefreshConfig(kind="every"),
        schedule=ScheduleConfig(
            kind="polynomial",
            start=row.e_start,
            end=row.e_end,
            power=row.p_decay,
            couple_momentum=True,
        ),
    )
    return Recipe(
        name=f"osawa2019-{batch // 1000}k",
        config=config,
        source="Osawa et al. 2019, Table 3",
        published=f"{top1} top-1",
    )


RECIPES = [recipe(batch) for batch in TABLE_3]
