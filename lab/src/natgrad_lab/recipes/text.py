"""A small GPT on characters (Python's own standard library): minutes on two cores.

Ours: every method of the comparison with the same budget and schedule. For other text,
name its folder with --data.folder. Not run here with these settings.
"""

from natgrad_lab.recipes.recipe import Recipe
from natgrad_lab.recipes.small import rules
from natgrad_lab.train.config import (
    DataConfig,
    ModelConfig,
    ScheduleConfig,
    TrainConfig,
)

SOURCE = "natgrad"
# batch sizes and epochs: 300 and 156 steps
EPOCHS = {32: 0.12, 256: 0.5}
METHODS = [method for method in rules(large=False) if method != "shampoo"]


def recipe(method: str, batch: int) -> Recipe:
    """One method at one batch size (sequences of 128 characters)."""
    rule, epochs = rules(large=batch > 128)[method], EPOCHS[batch]
    config = TrainConfig(
        epochs=epochs,
        batch=batch,
        micro_batch=min(batch, 64),
        targets=(40.0, 50.0),
        evaluate_every=epochs / 4,
        model=ModelConfig(name="gpt", width=64),
        data=DataConfig(name="text", augment=False),
        optimizer=rule.optimizer,
        curvature=rule.curvature,
        refresh=rule.refresh,
        schedule=ScheduleConfig(kind="cosine", warmup_epochs=epochs / 20),
    )
    return Recipe(name=f"text-{method}-{batch}", config=config, source=SOURCE)


RECIPES = [recipe(method, batch) for batch in EPOCHS for method in METHODS]
