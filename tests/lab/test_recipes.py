"""Every recipe can be built, and the papers' numbers are the papers'."""

import math

import pytest
import torch

from natgrad_lab import models
from natgrad_lab.errors import UserError
from natgrad_lab.recipes import FILES, RECIPES, find
from natgrad_lab.train.methods import make
from natgrad_lab.train.schedules import make_scheduler

# Shape of an example, classes, examples.
DATA = {
    "digits": ((1, 8, 8), 10, 1437),
    "fashion_mnist": ((1, 28, 28), 10, 60_000),
    "cifar10": ((3, 32, 32), 10, 50_000),
    "text": ((128,), 128, 79_610),
    "imagenet": ((3, 224, 224), 1000, 1_281_167),
}


def test_names_are_unique_and_every_file_says_its_source() -> None:
    assert len(RECIPES) == sum(len(file.RECIPES) for file in FILES)
    for file in FILES:
        assert file.__doc__
        assert "Source: " in file.__doc__ or "Ours" in file.__doc__
        assert all(recipe.source for recipe in file.RECIPES)


# The thirty ImageNet recipes of one file differ in batch and depth only.
BUILT = [name for name in RECIPES if "imagenet" not in name or name.endswith("x64")]


@pytest.mark.parametrize("name", BUILT)
def test_a_recipe_builds_on_meta(name: str) -> None:
    config = RECIPES[name].config
    shape, classes, examples = DATA[config.data.name]
    model = models.build_for(config.model.name, shape, classes, device="meta")
    method = make(model, config, examples=examples)
    make_scheduler(method.optimizer, config, examples)
    assert (method.curved is not None) == config.optimizer.curved
    assert config.accumulation(1)[0] * config.accumulation(1)[1] == config.batch
    method.close()


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_a_sane_length(name: str) -> None:
    config = RECIPES[name].config
    examples = DATA[config.data.name][2]
    steps = config.total_steps(examples)
    assert math.isclose(config.epoch(steps, examples), config.epochs, rel_tol=0.03)


@pytest.mark.parametrize(
    ("name", "steps", "lr", "momentum", "damping"),
    [
        ("osawa2019-4k", 10948, 8.18e-3, 0.997, 2.5e-4),
        ("osawa2019-131k", 978, 7.0e-2, 0.93, 1.0e-4),
        ("osawa2020-32k", 1760, 3.0e-2, 0.97, 2.0e-4),
        ("osawa2020-131k", 873, 7.0e-2, 0.93, 1.0e-4),
    ],
)
def test_osawa(
    name: str, steps: int, lr: float, momentum: float, damping: float
) -> None:
    config = find(name).config
    assert config.steps == steps
    assert (config.optimizer.lr, config.optimizer.momentum) == (lr, momentum)
    assert config.curvature.damping == damping


def test_pauloski() -> None:
    config = find("pauloski2020-imagenet-resnet50-kfac-x64").config
    assert (config.batch, config.optimizer.lr) == (2048, pytest.approx(0.8))
    assert (config.refresh.statistics, config.refresh.inverses) == (50, 500)
    cifar = find("pauloski2020-cifar10-sgd-x8").config
    assert (cifar.batch, cifar.optimizer.lr) == (1024, pytest.approx(0.8))
    assert cifar.schedule.decay_epochs == (100.0, 150.0)


def test_ma_extends_the_budget_with_the_batch() -> None:
    assert find("ma2019-kfac-128").config.epochs == 100
    large = find("ma2019-kfac-16384").config
    assert large.epochs == 800
    assert large.schedule.decay_epochs == (320.0, 640.0)


def test_an_unknown_recipe_gets_a_suggestion() -> None:
    with pytest.raises(UserError, match=r"Did you mean .*digits-sgd"):
        find("digit-sgd")


def test_meta_needs_no_memory() -> None:
    shape, classes, _ = DATA["imagenet"]
    model = models.build_for("resnet152", shape, classes, device="meta")
    assert all(p.device == torch.device("meta") for p in model.parameters())
