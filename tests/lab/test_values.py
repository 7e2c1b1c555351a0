"""Values learnt by squared error, and an optimizer that finds its rates, in `train`."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from natgrad_lab import data
from natgrad_lab.models.values import Field
from natgrad_lab.recipes import find
from natgrad_lab.train import run as runs
from natgrad_lab.train.config import OptimizerConfig, ScheduleConfig, TrainConfig
from natgrad_lab.train.loop import Ending, Trainer
from natgrad_lab.train.objective import Values
from natgrad_lab.train.processes import World
from natgrad_lab.train.records import read_metrics

TASKS = ("autoencoder", "picture", "poisson")
FOUND = ("damping", "ratio", "lr", "momentum")


def start(folder: Path, recipe: str, **changes: Any) -> Trainer:
    settings = replace(find(recipe).config, log_every=2, threads=1, **changes)
    return Trainer(runs.create(folder, recipe, settings), World(), show=False)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("method", ["kfac", "adam"])
def test_a_run_learns(task: str, method: str, tmp_path: Path) -> None:
    trainer = start(tmp_path, f"{task}-{method}", steps=6, evaluate_every=0.5)
    assert trainer.train() == Ending(reason="done", step=6)
    records = read_metrics(tmp_path / "metrics.jsonl")
    trains = [each for each in records if each["kind"] == "train"]
    assert trains[-1]["loss"] < trains[0]["loss"]
    tests = [each for each in records if each["kind"] == "test"]
    assert tests[-1]["accuracy"] < 100
    if method == "kfac":
        assert all(name in each for each in trains for name in FOUND)
        assert trains[-1]["damping"] != trains[0]["damping"]


def test_a_run_that_finds_its_rates_resumes_exactly(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"steps": 8, "micro_batch": 256, "checkpoint_every": 1.0}
    whole = start(tmp_path / "whole", "autoencoder-kfac", **changes)
    whole.train()
    stopped = start(tmp_path / "stopped", "autoencoder-kfac", **changes)
    stopped.total = 5
    stopped.train()
    resumed = Trainer(stopped.run, World(), show=False)
    resumed.train(resume=True)
    ends = whole.model.state_dict(), resumed.model.state_dict()
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_the_result_of_values_is_the_part_of_the_variance() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(2, 10, 3, dtype=torch.float64)
    objective = Values(3)
    totals = objective.totals(x[:4], y[:4]) + objective.totals(x[4:], y[4:])
    assert len(totals) == objective.size
    loss, explained = objective.result(totals)
    assert loss == pytest.approx(float(objective.loss(x, y)))
    left = (x - y).square().sum() / (y - y.mean(0)).square().sum()
    assert explained == pytest.approx(100 * float(1 - left))


def test_a_field_has_the_laplacian_of_its_value() -> None:
    torch.manual_seed(0)
    model, places = Field(width=5).double(), torch.rand(4, 2).double()

    def asked(x: torch.Tensor, edge: float) -> torch.Tensor:
        return model(torch.cat([x, torch.full_like(x[:, :1], edge)], dim=1))[:, 0]

    scale = data.load("poisson").test.fetch(torch.tensor([20 * 41 + 20]))[1].item()
    for i, x in enumerate(places):
        bend = torch.autograd.functional.hessian(
            lambda z: asked(z[None], 1.0)[0] / scale, x
        )
        torch.testing.assert_close(asked(places, 0.0)[i], bend.trace())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schedule": ScheduleConfig(kind="cosine")}, "off with a damping, a schedule"),
        ({"precision": "float16"}, "off with a damping, a schedule or float16"),
    ],
)
def test_what_finds_its_rates_has_no_schedule(changes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig(optimizer=OptimizerConfig(name="spngd", auto=True), **changes)
    with pytest.raises(ValueError, match="spngd, without a momentum"):
        OptimizerConfig(auto=True)
