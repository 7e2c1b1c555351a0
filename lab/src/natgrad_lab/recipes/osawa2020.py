"""SP-NGD: ResNet-50 on ImageNet, batches of 4,096 to 131,072, stale statistics.

Source: Osawa et al., "Scalable and Practical Natural Gradient for Large-Scale Deep
Learning", TPAMI 2020: settings from Table 2, sections 6.1 to 6.3 and 7.1; steps and
accuracy from Table 2. Empirical Fisher, unit-wise batch norm, adaptive refresh
(Algorithms 1 and 2) up to 32K as published; 65K and 131K were run always fresh. Half
precision, of the products of statistics too, and channels_last are section 5.2's; a
loss scale, which float16 needs, is not mentioned there. Running mixup and erasing are
those of the authors' published code, one lambda per image (--data.mixup-kind step: one
per step, as the equations are printed).

Not printed, and different in that code: rho, which multiplies the damping of batch
norm, is 1 here and 16 there (--curvature.norm-damping-ratio 16), and batch norm's
weights begin at 1 here and are drawn from N(1, 0.05^2) there (--model.norm-deviation
0.05).

Published: 74.8 to 75.6 % top-1 (Table 2, with stale statistics where it has them).
Not run here: ImageNet does not fit.
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
    """A row of Table 2, in the paper's symbols."""

    alpha_mixup: float
    p_decay: float
    e_start: float
    e_end: float
    eta_0: float
    m_0: float
    damping: float
    steps: int
    fresh: str
    stale: str = ""
    reduction: str = ""


TABLE_2 = {
    4096: Row(
        *(0.4, 11.0, 1.0, 53.0, 8.18e-3, 0.997, 2.5e-4, 10948),
        *("75.2 %", "74.8 %", "23.6 %"),
    ),
    8192: Row(
        *(0.4, 8.0, 1.0, 53.5, 1.25e-2, 0.993, 2.5e-4, 5434),
        *("75.5 %", "75.3 %", "15.1 %"),
    ),
    16384: Row(
        *(0.4, 8.0, 1.0, 53.5, 2.5e-2, 0.985, 2.5e-4, 2737),
        *("75.3 %", "75.2 %", "5.4 %"),
    ),
    32768: Row(
        *(0.6, 3.5, 1.5, 49.5, 3.0e-2, 0.97, 2.0e-4, 1760),
        *("75.6 %", "75.4 %", "7.8 %"),
    ),
    65536: Row(0.6, 2.9, 2.0, 64.5, 4.0e-2, 0.95, 1.5e-4, 1173, "75.6 %"),
    131072: Row(1.0, 2.9, 3.0, 100.0, 7.0e-2, 0.93, 1.0e-4, 873, "74.9 %"),
}
# section 7.2
EPOCHS = {4096: 35, 8192: 35, 16384: 35, 32768: 45, 65536: 60, 131072: 90}


def recipe(batch: int) -> Recipe:
    """The row of Table 2 for one batch size."""
    row = TABLE_2[batch]
    config = TrainConfig(
        epochs=EPOCHS[batch],
        steps=row.steps,
        batch=batch,
        micro_batch=32,
        precision="float16",
        targets=(74.9,),
        model=ModelConfig(name="resnet50"),
        data=DataConfig(name="imagenet", mixup=row.alpha_mixup, erasing=0.5),
        optimizer=OptimizerConfig(
            name="spngd", lr=row.eta_0, momentum=row.m_0, decay="rescaled"
        ),
        curvature=CurvatureConfig(
            largest_factor="whole",
            damping=row.damping,
            style="factored",
            factor_decay=0.0,
            factor_precision="float16",
            fisher="empirical",
            norm="unit",
        ),
        refresh=RefreshConfig(kind="adaptive" if row.stale else "every", tolerance=0.1),
        schedule=ScheduleConfig(
            kind="polynomial",
            start=row.e_start,
            end=row.e_end,
            power=row.p_decay,
            couple_momentum=True,
        ),
    )
    return Recipe(
        name=f"osawa2020-{batch // 1000}k",
        config=config,
        source="Osawa et al. 2020, Table 2",
        published=published(row),
    )


def published(row: Row) -> str:
    """What Table 2 reports."""
    if not row.stale:
        return f"{row.fresh} top-1 (fresh)"
    reduced = f"statistics reduced to {row.reduction}"
    return f"{row.stale} top-1 (fresh {row.fresh}), {reduced}"


RECIPES = [recipe(batch) for batch in TABLE_2]
