"""A small vision transformer on digits, with AdamW and with K-FAC on AdamW.

Ours. Attention, layer norms and learned positions are all seen by K-FAC's hooks.
Learning rate and damping were chosen by hand. Not run here.
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

METHODS = ("adamw", "kfac")


def recipe(method: str) -> Recipe:
    """AdamW, alone or with preconditioned gradients."""
    config = TrainConfig(
        epochs=15.0,
        batch=64,
        targets=(90.0,),
        evaluate_every=1.0,
        model=ModelConfig(name="vit", width=64),
        data=DataConfig(name="digits", augment=False),
        optimizer=OptimizerConfig(name="adamw", kfac=method == "kfac", lr=1e-3),
        curvature=CurvatureConfig(damping=0.03, kl_clip=None, norm="unit"),
        refresh=RefreshConfig(statistics=1, inverses=10),
        schedule=ScheduleConfig(kind="cosine", warmup_epochs=1.0),
    )
    return Recipe(
        name=f"digits-vit-{method}", config=config, source="natgrad, embedded data"
    )


RECIPES = [recipe(method) for method in METHODS]
