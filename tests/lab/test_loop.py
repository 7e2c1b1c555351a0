"""Whole runs on digits with a narrow ResNet-8: records, resume, accumulation."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.world import run_world

from natgrad_lab.cli import main
from natgrad_lab.errors import UserError
from natgrad_lab.recipes import find
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
from natgrad_lab.train.loop import Ending, Trainer
from natgrad_lab.train.processes import World
from natgrad_lab.train.records import read_metrics
from natgrad_lab.train.session import start as create_together

SGD = OptimizerConfig(lr=0.05)
KFAC = OptimizerConfig(kfac=True, lr=0.05)
SPNGD = OptimizerConfig(name="spngd", lr=0.02)


def config(**settings: Any) -> TrainConfig:
    """A run of a second: 12 steps."""
    base = TrainConfig(
        steps=12,
        batch=64,
        log_every=4,
        evaluate_every=0.3,
        checkpoint_every=0.0,
        threads=1,
        model=ModelConfig(width=4),
        optimizer=SGD,
        curvature=CurvatureConfig(damping=0.1, norm="unit"),
        refresh=RefreshConfig(statistics=2, inverses=4),
        schedule=ScheduleConfig(kind="cosine"),
    )
    return replace(base, **settings)


def start(folder: Path, settings: TrainConfig) -> Trainer:
    """A trainer in a new folder."""
    return Trainer(runs.create(folder, "test", settings), World(), show=False)


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: x.clone() for name, x in trainer.model.state_dict().items()}


@pytest.mark.parametrize("optimizer", [SGD, KFAC, SPNGD], ids=lambda o: o.label)
def test_a_run_writes_what_it_does(optimizer: OptimizerConfig, tmp_path: Path) -> None:
    settings = config(optimizer=optimizer, tensorboard=True)
    if optimizer is KFAC:  # the paper's clip: 12 steps must show that it learns
        curvature = replace(settings.curvature, kappa=1e-3)
        settings = replace(settings, curvature=curvature)
    trainer = start(tmp_path, settings)
    assert trainer.train() == Ending(reason="done", step=12)
    records = read_metrics(tmp_path / "metrics.jsonl")
    trains = [each for each in records if each["kind"] == "train"]
    assert [each["step"] for each in trains] == [4, 8, 12]
    assert trains[-1]["loss"] < trains[0]["loss"]
    assert set(trains[0]["phases"]) == {"data", "forward", "backward", "update"}
    assert 0 <= trains[0]["waiting"] < 1
    assert trains[0]["lr"] < optimizer.lr
    tests = [each for each in records if each["kind"] == "test"]
    assert tests[-1]["step"] == 12
    assert tests[-1]["accuracy"] > 15
    if optimizer.curved:
        assert trains[0]["damping"] == 0.1
        assert trains[0]["refreshed"] > 0
        assert trains[0]["skipped"] > 0
        assert trains[0]["reduction"] == pytest.approx(0.5)
        assert trains[0]["bytes"] == 0
    assert list((tmp_path / "tensorboard").iterdir())
    assert (tmp_path / "checkpoints" / "step-00000012" / "manifest.json").is_file()


RESUMED = {
    "sgd": config(data=DataConfig(mixup=0.4, erasing=0.5, label_smoothing=0.1)),
    "adamw": config(optimizer=OptimizerConfig(name="adamw", lr=1e-3)),
    "muon": config(optimizer=OptimizerConfig(name="muon", lr=0.02)),
    "soap": config(optimizer=OptimizerConfig(name="soap", lr=1e-3, interval=3)),
    "shampoo": config(optimizer=OptimizerConfig(name="shampoo", lr=0.05, interval=3)),
    "kfac": config(optimizer=KFAC, batch=64, micro_batch=32),
    "mixup": config(
        micro_batch=16, data=DataConfig(mixup=0.4, mixup_kind="step", erasing=0.5)
    ),
    "image": config(
        micro_batch=16, data=DataConfig(mixup=0.4, mixup_kind="image", erasing=0.5)
    ),
    "sampled": config(
        optimizer=KFAC, curvature=CurvatureConfig(damping=0.1, fisher="sampled")
    ),
    "spngd": config(
        optimizer=SPNGD,
        refresh=RefreshConfig(kind="adaptive"),
        data=DataConfig(mixup=0.4),
        schedule=ScheduleConfig(kind="polynomial", power=2.0, couple_momentum=True),
    ),
}


@pytest.mark.parametrize("name", RESUMED)
def test_resume_is_bitwise_in_the_middle_of_an_interval(
    name: str, tmp_path: Path
) -> None:
    settings = RESUMED[name]
    whole = start(tmp_path / "whole", settings)
    whole.train()
    half = start(tmp_path / "half", settings)
    half.total = 7  # stops there as an interruption would, not as a shorter run
    half.train()
    again = Trainer(runs.load(tmp_path / "half"), World(), show=False)
    assert again.train(resume=True) == Ending(reason="done", step=12)
    expected = weights(whole)
    for key, value in weights(again).items():
        assert torch.equal(value, expected[key]), key
    losses = [
        [each["loss"] for each in read_metrics(path) if each["kind"] == "train"][-1]
        for path in (tmp_path / "whole/metrics.jsonl", tmp_path / "half/metrics.jsonl")
    ]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("mixup", [0.0, 0.4])
def test_accumulation_equals_the_whole_batch(mixup: float, tmp_path: Path) -> None:
    # Batch norm sees micro-batches, so the network must have none: an MLP.
    base = config(
        model=ModelConfig(name="mlp"),
        optimizer=KFAC,
        data=DataConfig(augment=False, mixup=mixup, mixup_kind="step"),
        steps=4,
    )
    whole = start(tmp_path / "whole", base)
    parts = start(tmp_path / "parts", replace(base, micro_batch=16))
    whole.train()
    parts.train()
    for a, b in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_divergence_ends_the_run(tmp_path: Path) -> None:
    settings = config(optimizer=OptimizerConfig(lr=1e30), schedule=ScheduleConfig())
    assert start(tmp_path, settings).train().reason == "diverged"


def test_divergence_that_an_optimizer_raises_on_ends_the_run(tmp_path: Path) -> None:
    shampoo = OptimizerConfig(name="shampoo", lr=1e30)
    settings = config(optimizer=shampoo, schedule=ScheduleConfig(), log_every=1000)
    assert start(tmp_path, settings).train().reason == "diverged"


def test_text_trains_with_token_means(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    for name in ("a.py", "b.py"):
        text = "for i in range(10):\n    print(i)\n" * 200
        (tmp_path / "text" / name).write_text(text)
    settings = config(
        steps=2,
        batch=4,
        log_every=1,
        model=ModelConfig(name="gpt", width=16),
        data=DataConfig(name="text", root=tmp_path),
        optimizer=KFAC,
    )
    assert start(tmp_path / "run", settings).train().reason == "done"


def test_text_of_a_folder_is_trained_on_and_named(tmp_path: Path) -> None:
    folder = tmp_path / "poems"
    folder.mkdir()
    for name in ("a.txt", "b.txt"):
        (folder / name).write_text("roses are red, violets are blue\n" * 200)
    settings = config(
        steps=2,
        batch=4,
        log_every=1,
        model=ModelConfig(name="gpt", width=16),
        data=DataConfig(name="text", folder=folder),
        optimizer=KFAC,
    )
    trainer = start(tmp_path / "run", settings)
    assert trainer.model.get_parameter("tokens.weight").shape[0] < 30
    trainer.train()
    assert runs.data_note(runs.load(tmp_path / "run")) == "text of poems (2 files)"


@pytest.mark.parametrize("method", ["adamw", "kfac"])
def test_a_vision_transformer_trains(method: str, tmp_path: Path) -> None:
    recipe = find(f"digits-vit-{method}").config
    few = replace(recipe, steps=10, threads=1, checkpoint_every=0.0, evaluate_every=99)
    often = replace(few, log_every=1, schedule=ScheduleConfig())
    trainer = start(tmp_path, often)
    curved = trainer.method.curved
    if curved is not None:
        blocks = {block.name for block in curved.engine.blocks}
        assert {"patches", "positions.table", "blocks.0.attention.qkv"} <= blocks
    assert trainer.train().reason == "done"
    records = read_metrics(tmp_path / "metrics.jsonl")
    losses = [each["loss"] for each in records if each["kind"] == "train"]
    assert sum(losses[-3:]) < 0.99 * sum(losses[:3])


def test_kfac_works_on_adamw_by_the_command_line(tmp_path: Path) -> None:
    asked = ["--optimizer.name", "adamw", "--optimizer.lr", "3e-3", "--steps", "8"]
    asked += ["--model.width", "4", "--threads", "1", "--log-every", "4"]
    out = ["--out", str(tmp_path / "run")]
    assert main(["train", "digits-kfac", *asked, *out]) == 0
    assert runs.load(tmp_path / "run").config.optimizer.label == "kfac+adamw"
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    trains = [each for each in records if each["kind"] == "train"]
    assert trains[-1]["loss"] < trains[0]["loss"]
    assert trains[-1]["refreshed"] > 0


def test_a_model_without_that_setting_is_named(tmp_path: Path) -> None:
    settings = config(model=ModelConfig(name="mlp", width=3))
    with pytest.raises(UserError, match=r"model\.width=3\. Must be none: mlp has no"):
        start(tmp_path, settings)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_after_a_step(number: signal.Signals, tmp_path: Path) -> None:
    trainer = start(tmp_path, config(steps=100_000))
    before = signal.getsignal(number)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), number))
    timer.start()
    ending = trainer.train()
    assert (ending.reason, ending.by) == ("interrupted", number)
    assert signal.getsignal(number) is before
    again = Trainer(runs.load(tmp_path), World(), show=False)
    again.total = ending.step + 2
    assert again.train(resume=True) == Ending(reason="done", step=ending.step + 2)


def test_ctrl_c_in_a_terminal_leaves_a_resumable_run(tmp_path: Path) -> None:
    out = tmp_path / "run"
    long = ["digits-sgd", "--out", str(out), "--steps", "100000", "--model.width", "4"]
    long += ["--log-every", "1", "--evaluate-every", "1000", "--threads", "1"]
    with subprocess.Popen(
        [sys.executable, "-m", "natgrad_lab", "train", *long],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        wait_for_records(out / "metrics.jsonl", process)
        process.send_signal(signal.SIGINT)
        printed, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert f"natgrad train --resume {out}" in printed
    assert list((out / "checkpoints").glob("step-*/manifest.json"))


def wait_for_records(path: Path, process: Any) -> None:
    """Until the run has logged a few steps."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        if path.is_file() and path.read_text().count("\n") > 3:
            return
        time.sleep(0.05)
    process.kill()
    raise AssertionError(f"no records: {process.communicate()[1]}")


MLP = {"model": ModelConfig(name="mlp"), "data": DataConfig(augment=False)}
SHARED = {
    "sgd": config(**MLP, steps=6),
    "sgd-mixup": config(
        model=ModelConfig(name="mlp"),
        data=DataConfig(augment=False, mixup=0.4, mixup_kind="step"),
        micro_batch=16,
        steps=6,
    ),
    "kfac": config(**MLP, steps=6, optimizer=KFAC),
    "spngd": config(**MLP, steps=6, optimizer=SPNGD),
    "kfac-norm": config(steps=6, optimizer=KFAC),
    "spngd-norm": config(steps=6, optimizer=SPNGD),
    "spngd-micro": config(steps=6, optimizer=SPNGD, micro_batch=16),
}


def train_shared(rank: int, folder: Path, name: str) -> tuple[dict[str, Any], float]:
    """Weights after a run on two ranks, and how far a resumed one is from them."""
    world = World(rank=rank, size=2)
    seen = []
    for part, stop in (("whole", 6), ("half", 3)):
        run = create_together(folder / name / part, "test", SHARED[name], world)
        trainer = Trainer(run, world, show=False)
        trainer.total = stop
        trainer.train()
        seen.append(trainer)
    again = Trainer(runs.load(folder / name / "half"), world, show=False)
    again.train(resume=True)
    whole, resumed = weights(seen[0]), weights(again)
    away = [(whole[key] - resumed[key]).abs().max().item() for key in whole]
    return whole, max(away)


def train_all(rank: int, folder: Path) -> dict[str, tuple[dict[str, Any], float]]:
    """Every shared run in one pair of processes: starting them is what takes time."""
    return {name: train_shared(rank, folder, name) for name in SHARED}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp("shared")
    return folder, run_world(2, train_all, folder, timeout=200)


@pytest.mark.processes
@pytest.mark.parametrize("name", SHARED)
def test_two_processes_do_what_one_does_and_resume(
    name: str, shared: tuple[Path, list[Any]], tmp_path: Path
) -> None:
    folder, ranks = shared
    (mine, away), (theirs, theirs_away) = (rank[name] for rank in ranks)
    assert max(away, theirs_away) == 0.0
    for key, value in mine.items():  # batch norm's running averages are each rank's
        assert "running" in key or torch.equal(value, theirs[key]), key
    records = read_metrics(folder / name / "whole" / "metrics.jsonl")
    trains = [each for each in records if each["kind"] == "train"]
    assert name.startswith("sgd") or trains[-1]["bytes"] > 0
    if SHARED[name].model.name == "mlp":  # batch norm depends on the split
        alone = start(tmp_path / "alone", SHARED[name])
        alone.train()
        for key, value in weights(alone).items():
            torch.testing.assert_close(value, mine[key], rtol=1e-3, atol=1e-5)
