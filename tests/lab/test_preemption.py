"""A recipe of each paper on two processes and generated images, stopped by SIGTERM.

The images are small and the model narrow; everything else is the recipe's: crop,
mixup, erasing, precision, statistics, schedule.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.pictures import write_imagenet
from tests.faults.launch import environment
from tests.support.world import run_world

from natgrad_lab.recipes import find
from natgrad_lab.train import run as runs
from natgrad_lab.train.checkpoint import Checkpoints
from natgrad_lab.train.config import ModelConfig, TrainConfig
from natgrad_lab.train.loop import Trainer
from natgrad_lab.train.processes import World
from natgrad_lab.train.records import read_metrics
from natgrad_lab.train.session import start

RECIPES = (
    "osawa2019-4k",
    "osawa2020-4k",
    "ma2019-kfac-128",
    "pauloski2020-imagenet-resnet50-kfac-x16",
)
STEPS, STOP = 20, 7


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_imagenet(folder, train=12, val=2, sizes=[(60, 80), (80, 60), (70, 70)])
    return folder


def settings(recipe: str, root: Path) -> TrainConfig:
    """A recipe made small."""
    config = find(recipe).config
    return replace(
        config,
        steps=STEPS,
        batch=8,
        micro_batch=2,
        log_every=1,
        evaluate_every=100.0,
        checkpoint_every=0.0,
        threads=1,
        model=ModelConfig(name="resnet8", width=4),
        data=replace(config.data, name="imagenet", root=root, size=32, workers=1),
    )


class Stopped(Trainer):
    """Gets a SIGTERM on one rank, in the middle of a step."""

    def _one_step(self) -> None:
        if self.step == STOP - 1 and self.world.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        super()._one_step()


def train_twice(rank: int, recipe: str, root: Path, out: Path) -> dict[str, Any]:
    """Weights and losses of a run, and of one that was stopped and resumed."""
    here, config = World(rank=rank, size=2), settings(recipe, root)
    whole = Trainer(start(out / "whole", recipe, config, here), here, show=False)
    first = whole.train()
    cut = Stopped(start(out / "cut", recipe, config, here), here, show=False).train()
    again = Trainer(runs.load(out / "cut"), here, show=False)
    last = again.train(resume=True)
    pairs = zip(whole.model.parameters(), again.model.parameters(), strict=True)
    return {
        "endings": [(e.reason, e.step, e.by) for e in (first, cut, last)],
        "equal": all(torch.equal(one, other) for one, other in pairs),
    }


def train_all(rank: int, root: Path, out: Path) -> dict[str, dict[str, Any]]:
    return {each: train_twice(rank, each, root, out / each) for each in RECIPES}


def losses(folder: Path) -> dict[int, float]:
    records = read_metrics(folder / "metrics.jsonl")
    return {each["step"]: each["loss"] for each in records if each["kind"] == "train"}


def test_a_recipe_of_each_paper_resumes_exactly(root: Path, tmp_path: Path) -> None:
    endings = [("done", STEPS, 0), ("interrupted", STOP, signal.SIGTERM)]
    for rank in run_world(2, train_all, root, tmp_path, timeout=240):
        for recipe, result in rank.items():
            assert result == {"endings": [*endings, endings[0]], "equal": True}, recipe
    for recipe in RECIPES:
        whole = losses(tmp_path / recipe / "whole")
        assert losses(tmp_path / recipe / "cut") == whole, recipe
        assert len(whole) == STEPS


WORDS = {
    "steps": STEPS,
    "batch": 8,
    "micro-batch": 2,
    "log-every": 1,
    "evaluate-every": 100,
    "checkpoint-every": 0,
    "threads": 1,
    "model.name": "resnet8",
    "model.width": 4,
    "data.name": "imagenet",
    "data.workers": 1,
}


@contextmanager
def torchrun(*words: str) -> Generator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "--monitor-interval", "0.1"]
    with subprocess.Popen(
        [*command, "-m", "natgrad_lab", "train", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
    ) as process:
        yield process


def run_to_its_end(*words: str) -> None:
    with torchrun(*words) as process:
        printed, _ = process.communicate(timeout=240)
    assert process.returncode == 0, printed


def stop_in_its_midst(out: Path, *words: str) -> None:
    """A scheduler signals the launcher, which passes it on."""
    with torchrun(*words, f"--out={out}") as process:
        while process.poll() is None and not (out / "metrics.jsonl").is_file():
            time.sleep(0.02)
        while process.poll() is None and not losses(out):
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        printed, _ = process.communicate(timeout=240)
    ending = read_metrics(out / "metrics.jsonl")[-1]
    assert (ending["kind"], ending["reason"]) == ("end", "interrupted"), printed
    assert 0 < ending["step"] < STEPS


def words_for(recipe: str, root: Path, size: int) -> list[str]:
    chosen = {**WORDS, "data.root": root, "data.size": size}
    return [recipe, *(f"--{name}={value}" for name, value in chosen.items())]


def test_torchrun_passes_sigterm_on_and_the_run_resumes(
    root: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    stop_in_its_midst(out, *words_for("osawa2020-4k", root, 32))
    run_to_its_end("--resume", str(out))
    assert list(losses(out)) == list(range(1, STEPS + 1))


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of ImageNet's sizes."""
    folder = tmp_path_factory.mktemp("photographs")
    write_imagenet(folder, train=12, val=2)
    return folder


@pytest.mark.long
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_resumes_exactly_under_torchrun(
    recipe: str, photographs: Path, tmp_path: Path
) -> None:
    """Images of 224 pixels, cut from photographs as the recipe cuts them."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    words = words_for(recipe, photographs, 224)
    run_to_its_end(*words, f"--out={whole}")
    stop_in_its_midst(cut, *words)
    run_to_its_end("--resume", str(cut))
    assert losses(cut) == losses(whole)
    assert len(losses(whole)) == STEPS
    states = [
        Checkpoints(out / "checkpoints", World()).load()[0] for out in (cut, whole)
    ]
    assert states[0]["step"] == STEPS
    for name, tensor in states[1]["model"].items():
        assert torch.equal(states[0]["model"][name], tensor), name
