"""Values learnt by squared error: an autoencoder, a picture, Poisson's equation.

Ours: ``-kfac`` is `natgrad.SPNGD` with nothing set, which finds its damping, learning
rate and momentum; the rivals have the best of six constant rates of
benchmarks/results/no_setting.md for natgrad's own Adam, SOAP and Muon. Those of torch
and pytorch_optimizer, which run here, were not tuned again.

The accuracy of a test is the part of the variance that is explained, in percent. Not
run here.
"""

from natgrad_lab.recipes.recipe import Recipe
from natgrad_lab.train.config import (
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
)

SOURCE = "natgrad, embedded data"
STEPS = 200
# model, batch, epochs
TASKS = {
    "autoencoder": ("autoencoder", 512, STEPS * 512 / 1437),
    "picture": ("sines", 5530, STEPS),
    "poisson": ("field", 500, STEPS),
}
RATES = {
    "adam": {"autoencoder": 0.01, "picture": 0.03, "poisson": 0.03},
    "soap": {"autoencoder": 0.01, "picture": 0.1, "poisson": 0.01},
    "muon": {"autoencoder": 0.01, "picture": 0.01, "poisson": 0.003},
}


def optimizer_of(method: str, task: str) -> OptimizerConfig:
    """What finds everything, or a rival at its rate."""
    if method == "kfac":
        return OptimizerConfig(name="spngd", auto=True)
    lr = RATES[method][task]
    if method == "muon":
        return OptimizerConfig(name="muon", lr=lr, rest="adamw", rest_lr=lr)
    return OptimizerConfig(name="adamw" if method == "adam" else "soap", lr=lr)


def recipe(method: str, task: str) -> Recipe:
    """One method on one task."""
    model, batch, epochs = TASKS[task]
    config = TrainConfig(
        epochs=epochs,
        steps=STEPS,
        batch=batch,
        targets=(90.0, 99.0),
        evaluate_every=epochs / 20,
        checkpoint_every=0,
        model=ModelConfig(name=model),
        data=DataConfig(name=task, augment=False),
        optimizer=optimizer_of(method, task),
    )
    return Recipe(name=f"{task}-{method}", config=config, source=SOURCE)


RECIPES = [recipe(method, task) for task in TASKS for method in ("kfac", *RATES)]
