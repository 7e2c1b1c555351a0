"""Every recipe can be built, and the papers' numbers are the papers'."""

import math
from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch

import natgrad
from natgrad_lab import models
from natgrad_lab.errors import UserError
from natgrad_lab.recipes import FILES, RECIPES, find, ma2019
from natgrad_lab.train.methods import make
from natgrad_lab.train.options import options_of
from natgrad_lab.train.schedules import make_scheduler

# Shape of an example, classes, examples.
DATA = {
    "digits": ((1, 8, 8), 10, 1437),
    "fashion_mnist": ((1, 28, 28), 10, 60_000),
    "cifar10": ((3, 32, 32), 10, 50_000),
    "text": ((128,), 128, 79_610),
    "imagenet": ((3, 224, 224), 1000, 1_281_167),
    "autoencoder": ((64,), 64, 1437),
    "picture": ((2,), 3, 5530),
    "poisson": ((3,), 1, 500),
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


@pytest.mark.parametrize("name", ["digits-polar", "cifar10-polar-2048"])
def test_polar_s_recipes_have_its_defaults(name: str) -> None:
    config = RECIPES[name].config
    found, wanted = options_of(config, examples=100), natgrad.Polar.defaults
    assert callable(found.damping)
    assert found.damping(0) == wanted.damping
    same = replace(found, damping=wanted.damping, lr=wanted.lr, comm=wanted.comm)
    assert same == wanted


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_a_sane_length(name: str) -> None:
    config = RECIPES[name].config
    examples = DATA[config.data.name][2]
    steps = config.total_steps(examples)
    assert math.isclose(config.epoch(steps, examples), config.epochs, rel_tol=0.03)


# The papers' tables, as their texts print them.
OSAWA_2019_TABLE_3 = """
BS      mixup  gamma_0  target  rho_BN  warmup  p     start  end    eta_0    m_0
4096    0.4    2.5e-2   2.5e-4  16.0    313     11.0  1      53     8.18e-3  0.997
8192    0.4    2.5e-2   2.5e-4  16.0    157     8.0   1      53.5   1.25e-2  0.993
16384   0.4    2.5e-2   2.5e-4  32.0    79      8.0   1      53.5   2.5e-2   0.985
32768   0.6    2.0e-2   2.0e-4  16.0    59      3.5   1.5    49.5   3.0e-2   0.97
65536   0.6    1.5e-2   1.5e-4  16.0    40      2.9   2      64.5   4.0e-2   0.95
131072  1.0    1.0e-2   1.0e-4  8.0     30      2.9   3      107.6  7.0e-2   0.93
"""
OSAWA_2019_TABLE_1 = """
BS      epochs  steps  accuracy
4096    35      10948  75.1±0.09
8192    35      5434   75.2±0.05
16384   35      2737   75.2±0.03
32768   45      1760   75.3±0.13
65536   60      1173   75.0±0.09
131072  100     978    75.0±0.06
"""
OSAWA_2020_TABLE_2 = """
BS   mixup  p     start  end   eta_0    m_0    lambda  steps  fresh  stale  reduction
4K   0.4    11.0  1      53    8.18e-3  0.997  2.5e-4  10948  75.2   74.8   23.6
8K   0.4    8.0   1      53.5  1.25e-2  0.993  2.5e-4  5434   75.5   75.3   15.1
16K  0.4    8.0   1      53.5  2.5e-2   0.985  2.5e-4  2737   75.3   75.2   5.4
32K  0.6    3.5   1.5    49.5  3.0e-2   0.97   2.0e-4  1760   75.6   75.4   7.8
65K  0.6    2.9   2      64.5  4.0e-2   0.95   1.5e-4  1173   75.6   n/a    n/a
131K 1.0    2.9   3      100   7.0e-2   0.93   1.0e-4  873    74.9   n/a    n/a
"""


def rows(table: str) -> dict[str, dict[str, str]]:
    """A printed table's rows by their first cell."""
    names, *lines = (line.split() for line in table.strip().splitlines())
    cells = [dict(zip(names, line, strict=True)) for line in lines]
    return {each[names[0]]: each for each in cells}


def scheme(name: str) -> dict[str, float]:
    """What both of Osawa's tables print, as a recipe has it."""
    config = find(name).config
    schedule = config.schedule
    assert (schedule.kind, schedule.couple_momentum) == ("polynomial", True)
    assert config.optimizer.decay == "rescaled"
    assert config.data.erasing == 0.5
    assert config.data.mixup_kind == "image"  # as in the authors' code
    return {
        "mixup": config.data.mixup,
        "p": schedule.power,
        "start": schedule.start,
        "end": schedule.end or math.nan,
        "eta_0": config.optimizer.lr,
        "m_0": config.optimizer.usual_momentum,
    }


def numbers(row: dict[str, str], names: Iterable[str]) -> dict[str, float]:
    return {name: float(row[name]) for name in names}


@pytest.mark.parametrize("batch", rows(OSAWA_2019_TABLE_3))
def test_osawa_2019_is_tables_1_and_3(batch: str) -> None:
    recipe = find(f"osawa2019-{int(batch) // 1000}k")
    config, curvature = recipe.config, recipe.config.curvature
    printed, result = rows(OSAWA_2019_TABLE_3)[batch], rows(OSAWA_2019_TABLE_1)[batch]
    found = scheme(recipe.name) | {
        "BS": config.batch,
        "gamma_0": curvature.damping_start,
        "target": curvature.damping,
        "rho_BN": curvature.norm_damping_ratio,
        "warmup": curvature.damping_warmup,
    }
    assert found == numbers(printed, printed)
    assert (config.epochs, config.steps) == (
        float(result["epochs"]),
        int(result["steps"]),
    )
    assert result["accuracy"] in recipe.published.replace(" ", "")


def test_osawa_2019_has_table_1s_batch_norm() -> None:
    # Figure 6: "no approx: the same training curve with K-FAC plotted in Figure 3";
    # diagonal is section 5.4's variant.
    found = {
        find(f"osawa2019-{k}k").config.curvature.norm for k in (4, 8, 16, 32, 65, 131)
    }
    assert found == {"full"}


@pytest.mark.parametrize("batch", rows(OSAWA_2020_TABLE_2))
def test_osawa_2020_is_table_2(batch: str) -> None:
    recipe = find(f"osawa2020-{batch.lower()}")
    config, printed = recipe.config, rows(OSAWA_2020_TABLE_2)[batch]
    found = scheme(recipe.name) | {"lambda": config.curvature.damping}
    found["steps"] = config.steps or 0
    assert found == numbers(printed, found)
    assert config.batch // 1000 == int(batch[:-1])
    curvature = config.curvature
    assert (curvature.fisher, curvature.norm) == ("empirical", "unit")
    stale = printed["stale"] != "n/a"
    assert config.refresh.kind == ("adaptive" if stale else "every")
    shown = [printed[name] for name in ("fresh", "stale", "reduction")]
    assert all(f"{value} %" in recipe.published for value in shown if value != "n/a")


# 003, section VI-C1 and Table II
PAULOSKI_TABLE_II = """
GPUs   1      2      4      8
sgd    92.76  92.77  92.58  92.69
kfac   92.93  92.76  92.90  92.92
"""


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
@pytest.mark.parametrize("method", ["sgd", "kfac"])
def test_pauloski_on_cifar10_is_table_ii(method: str, gpus: int) -> None:
    recipe = find(f"pauloski2020-cifar10-{method}-x{gpus}")
    config, schedule = recipe.config, recipe.config.schedule
    kfac = method == "kfac"
    assert (config.batch, config.optimizer.kfac) == (128 * gpus, kfac)
    assert config.optimizer.lr == pytest.approx(0.1 * gpus)
    assert config.epochs == (100 if kfac else 200)
    assert schedule.decay_epochs == ((35, 75, 90) if kfac else (100, 150))
    assert (schedule.kind, schedule.warmup_epochs) == ("steps", 5)
    assert schedule.decay_factor == 0.1
    assert config.refresh.inverses == 10
    assert recipe.published == rows(PAULOSKI_TABLE_II)[method][str(gpus)] + " %"


# 003, Table III (64 GPUs, interval 500) and, for K-FAC at all scales, section VI-C3
PAULOSKI_TABLE_III = {
    "resnet50": ("76.2 %", "76.1 %", "76.2 %"),
    "resnet101": ("78.0 %", "77.7 %", "77.7 %"),
    "resnet152": ("78.2 %", "78.0 %", "78.0 %"),
}


@pytest.mark.parametrize("gpus", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("model", PAULOSKI_TABLE_III)
def test_pauloski_on_imagenet_is_section_vi(model: str, gpus: int) -> None:
    sgd = find(f"pauloski2020-imagenet-{model}-sgd-x{gpus}").config
    kfac = find(f"pauloski2020-imagenet-{model}-kfac-x{gpus}").config
    for config in (sgd, kfac):
        assert config.batch == 32 * gpus
        assert config.optimizer.lr == pytest.approx(0.0125 * gpus)
        assert config.optimizer.momentum == 0.9
        assert config.data.label_smoothing == 0.1
        assert config.schedule.warmup_epochs == 5
    assert (sgd.epochs, kfac.epochs) == (90, 55)
    assert sgd.schedule.decay_epochs == (30, 40, 80)
    assert kfac.schedule.decay_epochs == (25, 35, 40, 45, 50)
    assert kfac.curvature.damping == 1e-3
    interval = {16: 2000, 32: 1000, 64: 500, 128: 250, 256: 125}[gpus]
    assert kfac.refresh.inverses == interval
    assert kfac.refresh.statistics == interval // 10


@pytest.mark.parametrize("gpus", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("model", PAULOSKI_TABLE_III)
def test_pauloski_on_imagenet_shows_what_is_printed_for_its_scale(
    model: str, gpus: int
) -> None:
    sgd, kfac, scaled = PAULOSKI_TABLE_III[model]
    found = {
        method: find(f"pauloski2020-imagenet-{model}-{method}-x{gpus}").published
        for method in ("sgd", "kfac")
    }
    if gpus == 64:
        assert found["sgd"] == f"{sgd} top-1 (Table III)"
        assert found["kfac"] == f"{kfac} top-1 (Table III)"
        return
    assert found["kfac"].startswith(f"{scaled} top-1 (section VI-C3, all scales)")
    small = (model, gpus) == ("resnet50", 16)
    # Figure 5's run has another interval
    assert ("76.4 % with interval 10 (Figure 5)" in found["kfac"]) == small
    assert found["sgd"] == ("76.2 % top-1 (Figure 5)" if small else "not printed")


def test_pauloski_has_figure_5() -> None:
    """Section VI-C1: 16 GPUs, every 10 iterations, epochs to 75.9 %."""
    recipe = find("pauloski2020-imagenet-resnet50-kfac-x16-figure5")
    config = recipe.config
    other = find("pauloski2020-imagenet-resnet50-kfac-x16").config
    assert (config.batch, config.optimizer.lr) == (512, pytest.approx(0.2))
    assert (config.refresh.statistics, config.refresh.inverses) == (1, 10)
    assert replace(config, refresh=other.refresh) == other
    assert config.targets == (75.9,)
    assert config.evaluate_every == 1
    assert "75.9 % in epoch 43, SGD in epoch 76" in recipe.published


def test_ma_says_what_the_paper_does_not() -> None:
    config, text = (
        find("ma2019-kfac-1024").config,
        " ".join((ma2019.__doc__ or "").split()),
    )
    said = "The paper does not say three things"
    assert said in text
    assert (config.refresh.statistics, config.refresh.inverses) == (1, 10)
    assert "inverts them every 10" in text
    assert config.optimizer.momentum == 0.9
    assert "its momentum is 0.9" in text
    assert config.micro_batch == 128
    assert "128 examples at a time" in text


def log_grid(low: float, high: float) -> list[float]:
    return [low * (high / low) ** (i / 7) for i in range(8)]


def test_ma_has_points_of_the_papers_grid() -> None:
    sgd, kfac = (find(f"ma2019-{method}-128").config for method in ("sgd", "kfac"))
    chosen = [
        (sgd.optimizer.lr, log_grid(0.05, 9.62)),
        (kfac.optimizer.lr, log_grid(1e-3, 2.187)),
        (kfac.curvature.damping, log_grid(1e-4, 0.2187)),
    ]
    for value, grid in chosen:
        assert value is not None
        assert any(math.isclose(value, point, rel_tol=2e-3) for point in grid)
    assert (sgd.optimizer.momentum, sgd.optimizer.weight_decay) == (0.9, 5e-4)
    assert (kfac.curvature.factor_decay, kfac.curvature.kappa) == (0.9, 0.1)


@pytest.mark.parametrize("method", ["sgd", "kfac"])
@pytest.mark.parametrize("doublings", range(8))
def test_ma_extends_the_budget_with_the_batch(method: str, doublings: int) -> None:
    recipe = find(f"ma2019-{method}-{128 * 2**doublings}")
    config, epochs = recipe.config, 100 * (doublings + 1)
    assert config.epochs == epochs
    assert config.schedule.decay_epochs == pytest.approx((0.4 * epochs, 0.8 * epochs))
    assert config.schedule.decay_factor == 0.1
    assert recipe.published == "not printed (Figure 2 plots the best of 64)"


def test_an_unknown_recipe_gets_a_suggestion() -> None:
    with pytest.raises(UserError, match=r"Did you mean .*digits-sgd"):
        find("digit-sgd")


def test_meta_needs_no_memory() -> None:
    shape, classes, _ = DATA["imagenet"]
    model = models.build_for("resnet152", shape, classes, device="meta")
    assert all(p.device == torch.device("meta") for p in model.parameters())
