"""A ResNet-8 on scikit-learn's digits (8 x 8 pixels): seconds on any machine.

Ours. `natgrad demo` runs sgd, kfac, polar and spngd of these. Learning rates and
dampings were chosen by hand: those of sgd, kfac and polar here, the others are the
larger recipes'.

Measured: `MEASURED` below, the mean best accuracy of seeds 0, 1 and 2, by

    natgrad train digits-METHOD --seed SEED --threads 1

Steps to 97 %: sgd 72, kfac 70, spngd 64 (benchmarks/results/comparison_papers.md);
polar 55, with a mean best accuracy of 99.16. The other methods were not run.
"""

from dataclasses import replace

from natgrad_lab.recipes.recipe import Recipe, in_epochs
from natgrad_lab.recipes.small import Rule, rules
from natgrad_lab.train.config import (
    DataConfig,
    ModelConfig,
    ScheduleConfig,
    TrainConfig,
)

SOURCE = "natgrad, embedded data"
EPOCHS = 12.0
LRS = {"sgd": 0.3, "kfac": 0.3, "polar": 0.03}
# mean best accuracy in %
MEASURED = {"sgd": "98.52", "kfac": "98.80", "spngd": "99.17"}


def rule_of(method: str) -> Rule:
    """A method's settings on digits."""
    rule = rules(large=False)[method]
    if method in LRS:
        rule = replace(rule, optimizer=replace(rule.optimizer, lr=LRS[method]))
    if method == "kfac":
        rule = replace(rule, curvature=replace(rule.curvature, damping=0.3))
    return rule


def recipe(method: str) -> Recipe:
    """One method on digits."""
    rule = rule_of(method)
    config = TrainConfig(
        epochs=EPOCHS,
        batch=128,
        targets=(97.0,),
        evaluate_every=0.5,
        log_every=5,
        model=ModelConfig(name="resnet8"),
        data=DataConfig(name="digits"),
        optimizer=rule.optimizer,
        curvature=rule.curvature,
        refresh=rule.refresh,
        schedule=ScheduleConfig(kind="cosine", warmup_epochs=0.5),
    )
    return Recipe(
        name=f"digits-{method}",
        config=config,
        source=SOURCE,
        measured=in_epochs(MEASURED.get(method), EPOCHS, " (3 seeds)"),
    )


RECIPES = [recipe(method) for method in rules(large=False)]
