"""Specifications: grids, budgets, schedules, keys, and TOML read exactly."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.lab.study.made import one, tiny

from natgrad_lab.errors import UserError
from natgrad_lab.recipes import find
from natgrad_lab.schema import build
from natgrad_lab.study.points import (
    Point,
    budget_epochs,
    decay_epochs,
    make_config,
    make_key,
    make_plan,
    points,
    same_trial,
    spec_to_plain,
)
from natgrad_lab.study.spec import Budget, Grid, Method, Schedule, StudySpec
from natgrad_lab.study.toml import read_study

STUDIES = Path(__file__).parents[3] / "studies"
EXAMPLES = 1437


def test_the_paper_s_grids() -> None:
    study = StudySpec(name="paper")
    kfac, sgd = study.methods["kfac"], study.methods["sgd"]
    assert kfac.lr.expand() == pytest.approx([1e-3 * 3**i for i in range(8)])
    assert kfac.others == pytest.approx([1e-4 * 3**i for i in range(8)])
    assert sgd.lr.expand()[0] == 0.05
    assert sgd.lr.expand()[-1] == 9.62
    ratios = [b / a for a, b in zip(sgd.lr.expand(), sgd.lr.expand()[1:], strict=False)]
    assert ratios == pytest.approx([ratios[0]] * 7, rel=1e-4)
    left = [1 - x for x in sgd.others]
    assert left == pytest.approx([0.1 * 0.01 ** (i / 7) for i in range(8)], rel=1e-3)
    assert study.batches == (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
    assert len(points(study)) == 2 * 64 * 8


def test_a_denser_grid_meets_the_old_points_exactly() -> None:
    coarse = Grid(low=0.01, high=3.0, points=4).expand()
    dense = Grid(low=0.01, high=3.0, points=7).expand()
    assert dense[::2] == coarse


def test_budgets_and_schedules_are_the_paper_s() -> None:
    study = StudySpec(name="paper")
    assert budget_epochs(study, 128, 50_000) == 100
    assert budget_epochs(study, 16384, 50_000) == 800
    assert decay_epochs(study, "scaled", 16384, 50_000) == (320, 640)
    assert decay_epochs(study, "fixed", 16384, 50_000) == (40, 80)
    same = replace(study, budget=Budget(kind="epochs", epochs=30.0))
    assert budget_epochs(same, 16384, 50_000) == 30
    steps = replace(study, budget=Budget(kind="iterations", iterations=100))
    config = make_config(steps, points(steps)[0], 50_000)
    assert config.total_steps(50_000) == 100
    assert config.schedule.decay_epochs == pytest.approx(
        (40 * config.batch / 50_000, 80 * config.batch / 50_000)
    )


def test_a_point_becomes_settings() -> None:
    methods = {
        "sgd": Method(lr=one(0.2), momentum=one(0.7)),
        "kfac": Method(
            lr=one(0.3),
            damping=one(0.02),
            damping_styles=("normal", "approximated"),
            recipe="digits-kfac",
            settings={"curvature": {"length": "free", "kappa": "none"}},
        ),
        "spngd": Method(lr=one(0.4), damping=one(0.03)),
        "polar": Method(lr=one(0.1), damping=one(2.0), recipe="digits-polar"),
    }
    made = tiny(methods=methods, batches=(32,), micro_batch=16, repeats=2, seed=5)
    found = [make_config(made, point, EXAMPLES) for point in points(made)]
    assert {each.seed for each in found} == {5, 6}
    sgd, normal, approximated, spngd, polar = [x for x in found if x.seed == 5]
    assert (sgd.optimizer.lr, sgd.optimizer.momentum) == (0.2, 0.7)
    assert not sgd.optimizer.kfac
    assert normal.optimizer.kfac
    assert normal.optimizer.usual_momentum == 0.9
    assert normal.curvature.damping == 0.02
    assert normal.curvature.length == "free"
    assert normal.curvature.norm == "unit"
    assert (normal.curvature.style, approximated.curvature.style) == (
        "eigen",
        "factored",
    )
    assert (spngd.optimizer.name, spngd.curvature.style) == (
        "spngd",
        "factored",
    )
    assert (polar.optimizer.name, polar.optimizer.lr) == ("polar", 0.1)
    assert (polar.curvature.damping, polar.curvature.style) == (2.0, "relative")
    assert all((x.batch, x.micro_batch, x.model.width) == (32, 16, 4) for x in found)


def test_points_of_a_curve_by_epochs_or_by_number() -> None:
    made = tiny(budget=Budget(epochs=2.0))
    large = next(each for each in points(made) if each.batch == 256)
    assert make_config(made, large, EXAMPLES).epochs == 6.0
    assert make_config(made, large, EXAMPLES).evaluate_every == 1.0
    ten = make_config(replace(made, evaluations=10), large, EXAMPLES)
    assert ten.evaluate_every == pytest.approx(0.6)
    assert ten.log_every == 1


def test_a_key_is_what_changes_numbers() -> None:
    made = tiny()
    config = make_config(made, points(made)[0], EXAMPLES)
    elsewhere = replace(config.data, root=Path("elsewhere"))
    same = replace(config, checkpoint_every=7.0, out=Path("x"), data=elsewhere)
    assert make_key(same) == make_key(config)
    assert make_key(replace(config, seed=1)) != make_key(config)
    assert make_key(replace(config, evaluate_every=0.3)) != make_key(config)


def test_a_larger_study_keeps_the_keys_of_the_smaller() -> None:
    small = set(make_plan(tiny()))
    wider = tiny(batches=(64, 128, 256), repeats=2)
    assert small < set(make_plan(wider))
    assert len(small) == 6


@pytest.mark.parametrize(
    "budget",
    [
        Budget(epochs=2.0),
        Budget(kind="epochs", epochs=2.0),
        Budget(kind="iterations", iterations=50),
    ],
    ids=lambda budget: budget.kind,
)
def test_points_that_are_one_trial_are_those_with_one_key(budget: Budget) -> None:
    kinds = Schedule(kinds=("fixed", "scaled"))
    made = tiny(schedule=kinds, budget=budget, batches=(64, 128, 256))
    by_key: dict[str, list[Point]] = {}
    for point in points(made):
        key = make_key(make_config(made, point, EXAMPLES))
        by_key.setdefault(key, []).append(point)
    assert set(make_plan(made)) == set(by_key)
    for group in by_key.values():
        assert all(set(same_trial(made, point)) == set(group) for point in group)
    assert max(map(len, by_key.values())) == 2


def test_the_paper_s_plan_has_as_many_trials_as_its_file_says() -> None:
    path = STUDIES / "ma2019.toml"
    found = read_study(path)
    keys = {make_key(make_config(found, each, 50_000)) for each in points(found)}
    said = path.read_text().replace("\n# ", " ")
    assert f" {len(keys):,} trials" in said


def test_a_batch_larger_than_the_data_is_said() -> None:
    with pytest.raises(UserError, match=r"2048\. Must be <= the 1,437 training"):
        make_plan(tiny(batches=(64, 2048)))


def test_missing_data_are_named_as_a_study_s_file_does(tmp_path: Path) -> None:
    settings = {"data": {"root": str(tmp_path)}}
    with pytest.raises(UserError, match=r"`settings\.data\.root` in the") as caught:
        make_plan(tiny(recipe="cifar10-sgd-128", settings=settings))
    assert "NATGRAD_DATA" in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert "--data" not in str(caught.value)


def test_a_specification_survives_its_storage() -> None:
    made = tiny(schedule=Schedule(kinds=("scaled", "fixed")), micro_batch=32)
    assert build(StudySpec, spec_to_plain(made), "") == made
    told = replace(made, storage="postgresql://me:secret@host/database")
    assert "secret" not in str(spec_to_plain(told))


@pytest.mark.parametrize("path", sorted(STUDIES.glob("*.toml")), ids=lambda p: p.stem)
def test_the_studies_that_come_with_natgrad_can_be_read(path: Path) -> None:
    found = read_study(path)
    for name, method in found.methods.items():
        assert find(method.recipe or found.recipe), name
        make_config(found, points(found)[0], 50_000)


GOOD = """
name = "x"
recipe = "digits-sgd"
batches = [64]
[budget]
epochs = 2
[methods.sgd]
lr = { low = 0.1, high = 1.0, points = 2 }
momentum = [0.9]
"""


def read(tmp_path: Path, text: str) -> StudySpec:
    path = tmp_path / "study.toml"
    path.write_text(text)
    return read_study(path)


def test_a_file_is_read(tmp_path: Path) -> None:
    found = read(tmp_path, GOOD)
    assert found.budget == Budget(epochs=2.0)
    assert found.methods["sgd"].lr.expand() == (0.1, 1.0)
    assert found.methods["sgd"].others == (0.9,)


WRONG = [
    ("batches = [64]", "batchs = [64]", ["'batchs'", "the top level", "'batches'"]),
    ("epochs = 2", "epoch = 2", ["'epoch'", "[budget]", "kind, epochs, iterations"]),
    ("high", "hihg", ["'hihg'", "[methods.sgd.lr]", "low, high, points"]),
    ("epochs = 2", "epochs = 'two'", ["budget.epochs", "'two'", "a number"]),
    ("[64]", "64", ["batches = 64", "a list"]),
    ("[64]", "[64.5]", ["batches[0] = 64.5", "a whole number"]),
    ("[64]", "[]", ["batches=()", "batch sizes"]),
    ("epochs = 2", "kind = 'days'", ["budget.kind", "epochs, adjusted, iterations"]),
    ("high = 1.0", "high = 0.01", ["methods.sgd.lr", "high=0.01", "[low=0.1"]),
    ("momentum = [0.9]", "", ["Missing key 'methods.sgd.momentum'"]),
    ("[methods.sgd]", "[methods.adam]", ["method='adam'", "sgd, kfac, spngd, polar"]),
    ("recipe", "receipt", ["'receipt'", "Did you mean 'recipe'"]),
    ('name = "x"', "", ["Missing key 'name'"]),
    ("[64]", "[64", ["line 5"]),
]


@pytest.mark.parametrize(("old", "new", "said"), WRONG)
def test_what_is_wrong_in_a_file_is_named(
    old: str, new: str, said: list[str], tmp_path: Path
) -> None:
    assert old in GOOD
    with pytest.raises(UserError) as caught:
        read(tmp_path, GOOD.replace(old, new))
    assert "study.toml" in str(caught.value)
    for part in said:
        assert part in str(caught.value)


INCOMPLETE = """
batchs = [64]
[methods.sgd]
lr = { high = 1.0 }
[methods.kfac]
recipe = 3
"""
LACKING = [
    *("name", "methods.sgd.lr.low", "methods.sgd.momentum"),
    *("methods.kfac.lr", "methods.kfac.damping"),
]


def test_everything_that_is_wrong_in_a_file_is_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        read(tmp_path, INCOMPLETE)
    lines = [line.strip() for line in str(caught.value).splitlines()]
    missing = {line for line in lines if "Missing" in line}
    assert missing == {f"Missing key {key!r}." for key in LACKING}
    assert any("'batchs'" in line for line in lines)
    assert any("methods.kfac.recipe = 3" in line for line in lines)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"model": {"widht": 3}}, r"'widht' in \[settings\.model\].*'width'"),
        ({"optimizer": {"lr": -1.0}}, r"settings\.optimizer.*optimizer\.lr=-1"),
        ({"model": 3}, r"settings\.model = 3\. Must be a table"),
    ],
)
def test_settings_of_runs_are_checked_too(settings: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        make_plan(tiny(settings=settings))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"budget": Budget(base_batch=128)}, "base_batch=128"),
        ({"name": "a b"}, "name='a b'"),
        ({"name": "."}, r"name='\.'"),
        ({"name": ".."}, r"name='\.\.'"),
        ({"seed": 10**23}, r"seed=1000.*Must be in \[0, 2147483648\)"),
        ({"repeats": 0}, "repeats=0"),
        ({"batches": (64, 64)}, "all different"),
        ({"methods": {"kfac": Method(lr=one(1.0))}}, r"methods\.kfac\.damping"),
    ],
)
def test_wrong_values_are_named(changes: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        tiny(**changes)


@pytest.mark.parametrize(
    ("kind", "settings", "said"),
    [
        (Grid, {"low": 0.1}, "high=None"),
        (Grid, {"low": 0.5, "high": 1.0, "spacing": "complement"}, r"high=1\.0"),
        (Grid, {"values": (1.0,), "low": 1.0}, "alone"),
        (Budget, {"kind": "iterations"}, "iterations=None"),
        (Budget, {"iterations": 3}, "iterations=3"),
        (Schedule, {"decays": (0.8, 0.4)}, "decays"),
        (Schedule, {"kinds": ()}, "kinds"),
    ],
)
def test_parts_check_themselves(kind: Any, settings: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        kind(**settings)
