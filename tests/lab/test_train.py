"""Settings, schedules, folders, checkpoints and the loop (on digits, tiny models)."""

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import natgrad
from natgrad_lab.errors import UserError
from natgrad_lab.schema import build
from natgrad_lab.train import run as runs
from natgrad_lab.train.config import (
    CurvatureConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    RefreshConfig,
    ScheduleConfig,
    TrainConfig,
)
from natgrad_lab.train.metrics import Clock, MetricsWriter, waiting_share
from natgrad_lab.train.records import read_metrics
from natgrad_lab.train.schedules import make_damping, make_refresh, make_scheduler

# Settings


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (TrainConfig, {"batch": 0}, r"Invalid batch=0\. Must be >= 1"),
        (TrainConfig, {"epochs": -1.0}, r"Invalid epochs=-1\.0"),
        (TrainConfig, {"targets": (970.0,)}, r"Invalid targets=970\.0"),
        (OptimizerConfig, {"lr": 0.0}, r"Invalid optimizer\.lr=0\.0\. Must be > 0"),
        (OptimizerConfig, {"name": "spngd", "kfac": True}, r"optimizer\.kfac=True"),
        (CurvatureConfig, {"damping": -1.0}, r"Invalid curvature\.damping=-1\.0"),
        (CurvatureConfig, {"damping_warmup": 3}, r"damping_warmup=3"),
        (RefreshConfig, {"statistics": 0}, r"refresh\.statistics=0"),
        (ScheduleConfig, {"start": 3.0, "end": 2.0}, r"schedule\.end=2\.0"),
        (ScheduleConfig, {"couple_momentum": True}, r"couple_momentum=True"),
        (DataConfig, {"label_smoothing": 1.0}, r"data\.label_smoothing=1\.0"),
        (DataConfig, {"folder": Path("x")}, r"data\.folder=.*unless data.name is text"),
        (DataConfig, {"name": "text", "mixup": 0.4}, r"data\.mixup=0\.4"),
        (RefreshConfig, {"always_fresh": -1}, r"refresh\.always_fresh=-1.*>= 0"),
        (ModelConfig, {"width": 0}, r"model\.width=0"),
    ],
)
def test_settings_name_the_wrong_value(kind: Any, settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**settings)


def test_accumulation_mimics_any_batch() -> None:
    assert TrainConfig(batch=131072, micro_batch=32).accumulation(2) == (32, 2048)
    assert TrainConfig(batch=96).accumulation(3) == (32, 1)
    with pytest.raises(ValueError, match=r"Invalid batch=100\. Must be a multiple"):
        TrainConfig(batch=100, micro_batch=32).accumulation(2)


def test_steps_follow_from_epochs_as_the_papers_count_them() -> None:
    images = 1_281_167
    assert TrainConfig(batch=4096, epochs=35).total_steps(images) == 10948
    assert TrainConfig(batch=131072, epochs=100).total_steps(images) == 978
    assert TrainConfig(batch=4096, epochs=35, steps=7).total_steps(images) == 7


# Schedules


def factors(schedule: ScheduleConfig, steps: int, **settings: Any) -> list[float]:
    """The learning rate over a base of 1, 100 examples in batches of 10."""
    chosen = TrainConfig(batch=10, epochs=steps / 10, schedule=schedule, **settings)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.8)
    scheduler = make_scheduler(optimizer, chosen, examples=100)
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


def test_step_decay_happens_at_its_epochs() -> None:
    schedule = ScheduleConfig(kind="steps", decay_epochs=(1.0, 1.5), warmup_epochs=0.2)
    seen = factors(schedule, 20)
    assert seen[0] == pytest.approx(0.1)
    assert seen[1] == pytest.approx(0.55)
    assert seen[2:10] == pytest.approx([1.0] * 8)
    assert seen[10:15] == pytest.approx([0.1] * 5)
    assert seen[15:] == pytest.approx([0.01] * 5)


def test_cosine_ends_near_zero_and_polynomial_follows_its_equation() -> None:
    cosine = factors(ScheduleConfig(kind="cosine"), 20)
    assert cosine == pytest.approx(
        [0.5 * (1 + math.cos(math.pi * step / 20)) for step in range(20)]
    )
    schedule = ScheduleConfig(kind="polynomial", start=0.5, end=2.5, power=2.0)
    expected = [(1 - max(0.0, step / 10 - 0.5) / 2.0) ** 2 for step in range(20)]
    assert factors(schedule, 20) == pytest.approx(expected)


def test_damping_warms_up_and_decays() -> None:
    curvature = CurvatureConfig(
        damping=1e-4,
        damping_start=1e-2,
        damping_warmup=40,
        damping_decay_epochs=(10.0,),
        damping_decay=0.5,
    )
    damping = make_damping(TrainConfig(batch=10, curvature=curvature), 100, usual=1.0)
    value = 1e-2
    for step in range(100):
        assert damping(step) == pytest.approx(value)
        value += 2 * math.log10(1e-2 / 1e-4) / 40 * (1e-4 - value)
    assert damping(100) == pytest.approx(0.5 * value)


def test_refresh_intervals_grow_at_their_epochs() -> None:
    refresh = RefreshConfig(statistics=2, inverses=10, decay_epochs=(1.0,))
    rule = make_refresh(TrainConfig(batch=10, refresh=refresh), 100, natgrad.Every())
    timing: Any = None
    assert rule.after_statistic(9, timing) == 9 + 2
    assert rule.after_statistic(10, timing) == 10 + 4
    assert rule.after_inverse(10, timing) == 10 + 20


def test_every_refresh_rule_is_the_one_asked_for() -> None:
    def made(kind: Any, batch: int = 100) -> Any:
        asked = RefreshConfig(kind=kind, tolerance=0.3, overhead=0.2)
        settings = TrainConfig(refresh=asked, batch=batch)
        return make_refresh(settings, 1000, natgrad.Every(3, 6))

    assert made(None) == made("every") == natgrad.Every(3, 6)
    assert made("adaptive") == natgrad.Adaptive(tolerance=0.3)
    assert made("budget").overhead == 0.2
    for kind in ("staircase", "late"):
        assert (made(kind).rule, made(kind).steps_per_epoch) == (kind, 10)


@pytest.mark.parametrize("kind", ["staircase", "late"])
def test_a_short_run_can_leave_the_always_fresh_phase(kind: Any) -> None:
    def intervals(**settings: Any) -> set[int]:
        asked = RefreshConfig(kind=kind, **settings)
        rule = make_refresh(
            TrainConfig(refresh=asked, batch=100), 1000, natgrad.Every()
        )
        timing: Any = None
        return {rule.after_statistic(t, timing) - t for t in range(200)}

    assert intervals() == {1}
    assert intervals(always_fresh=20) >= {1, 20 if kind == "late" else 16}


# Folders, records, checkpoints


def test_settings_survive_the_folder(tmp_path: Path) -> None:
    optimizer = OptimizerConfig(kfac=True)
    settings = TrainConfig(
        targets=(97.0, 98.5), optimizer=optimizer, out=tmp_path / "x", steps=None
    )
    runs.create(tmp_path / "run", "name", settings)
    loaded = runs.load(tmp_path / "run")
    assert loaded.config == settings
    assert loaded.name == "name"
    versions = json.loads((tmp_path / "run" / "versions.json").read_text())
    assert versions["packages"]["torch"].startswith(torch.__version__.split("+")[0])


def test_what_the_data_are_is_kept_with_the_versions(tmp_path: Path) -> None:
    run = runs.create(tmp_path, "name", TrainConfig())
    assert runs.data_note(run) == "digits"
    runs.note_data(run, "digits (scikit-learn)")
    assert runs.data_note(run) == "digits (scikit-learn)"
    versions = json.loads((tmp_path / "versions.json").read_text())
    assert versions["data"] == "digits (scikit-learn)"
    assert versions["packages"]["torch"]


@pytest.mark.parametrize(
    ("text", "said"),
    [("{", "line 1"), ("[]", r"\[\]\. Must be a table"), ('{"data": 3}', "data = 3")],
)
def test_damaged_versions_are_named(tmp_path: Path, text: str, said: str) -> None:
    run = runs.create(tmp_path, "name", TrainConfig())
    (tmp_path / "versions.json").write_text(text)
    with pytest.raises(UserError, match=rf"versions\.json is damaged.*{said}"):
        runs.data_note(run)
    with pytest.warns(UserWarning, match=r"versions\.json is damaged.*written again"):
        runs.note_data(run, "digits (scikit-learn)")
    assert runs.data_note(run) == "digits (scikit-learn)"


def test_a_folder_of_text_is_a_setting(tmp_path: Path) -> None:
    asked = TrainConfig(data=DataConfig(name="text", folder=tmp_path))
    runs.create(tmp_path / "run", "name", asked)
    assert runs.load(tmp_path / "run").config == asked
    assert asked.data.options == {"folder": tmp_path}
    assert DataConfig(name="text").options == {}


def test_an_unset_folder_leaves_the_settings_as_they_were() -> None:
    # studies know a trial by the hash of these: a new setting must not change it
    settings = runs.plain(TrainConfig())
    assert "folder" not in settings["data"]
    assert settings["data"]["root"] is None
    assert build(TrainConfig, settings) == TrainConfig()


def test_a_folder_is_never_used_twice(tmp_path: Path) -> None:
    runs.create(tmp_path, "one", TrainConfig())
    with pytest.raises(UserError, match="already holds a run"):
        runs.create(tmp_path, "two", TrainConfig())


@pytest.mark.parametrize("text", ["{", '{"recipe": "x", "config": {"batchh": 3}}'])
def test_a_damaged_config_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"config\.json cannot be read"):
        runs.load(tmp_path)


def test_records_taken_back_by_a_resume_do_not_count(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    trained = {"lr": 0.1, "seconds": 1.0, "phases": {}}
    for step in (1, 2, 3):
        writer.write("train", step, loss=float(step), **trained)
    writer.write("resume", 2)
    writer.write("train", 3, loss=30.0, **trained)
    writer.close()
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"kind": "tra')
    losses = [each["loss"] for each in read_metrics(path) if each["kind"] == "train"]
    assert losses == [1.0, 2.0, 30.0]
    again = MetricsWriter(tmp_path)  # what was cut short must not swallow this
    again.write("resume", 1)
    again.close()
    losses = [each["loss"] for each in read_metrics(path) if each["kind"] == "train"]
    assert losses == [1.0]


def test_the_clock_separates_phases() -> None:
    clock = Clock()
    with clock.phase("data"):
        time.sleep(0.05)
    with clock.phase("data"):
        torch.mm(torch.ones(300, 300), torch.ones(300, 300))
    phases = clock.take()
    assert set(phases) == {"data"}
    assert clock.total >= 0.05
    assert 0.0 < clock.cpu < clock.total, "sleep takes no processor time"
    assert waiting_share({"data": 1.0, "forward": 3.0}) == 0.25
    assert clock.take() == {}
