"""Checkpoints of a run: whole or not at all, by name, safe to read, in any world."""

import errno
import json
import os
import pickle
import resource
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.support.world import run_world
from torch import Tensor

from natgrad_lab.errors import UserError
from natgrad_lab.train import checkpoint, storage
from natgrad_lab.train import manifest as manifests
from natgrad_lab.train import run as runs
from natgrad_lab.train.checkpoint import Checkpoints
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
from natgrad_lab.train.tree import Rows, join, split

# -- a state as tensors and JSON -------------------------------------------------------


def test_a_state_survives_the_split() -> None:
    state = {
        "a": {"weight": torch.ones(2), "step": 3, "betas": (0.9, 0.1), "none": None},
        "list": [torch.zeros(1), {"x": torch.ones(3)}, "text", float("inf")],
        "numbered": {0: {"m": torch.ones(1)}, 7: [1, [2]]},
    }
    tensors, outline = split(state)
    flat = {
        ("a", "weight"): tensors["a"]["weight"],
        ("list", "0"): tensors["list"]["0"],
        ("list", "1", "x"): tensors["list"]["1"]["x"],
        ("numbered", "0", "m"): tensors["numbered"]["0"]["m"],
    }
    again = join(json.loads(json.dumps(outline)), flat)
    assert repr(again) == repr(state)


def test_tensors_of_other_ranks_find_their_place() -> None:
    _, outline = split({"s": {"a": None, "inverse": None, "history": []}, "v": {}})
    one, two = torch.ones(1), torch.zeros(2)
    paths = {
        ("s", "a"): one,
        ("s", "inverse", "1"): two,
        ("s", "inverse", "0"): one,
        ("s", "history", "0"): two,
        ("v", "0.weight", "velocity"): one,
    }
    whole = join(outline, paths)
    assert whole["s"]["a"] is one
    assert [x.numel() for x in whole["s"]["inverse"]] == [1, 2]
    assert whole["s"]["history"][0] is two
    assert whole["v"]["0.weight"]["velocity"] is one


def test_a_state_that_no_file_can_hold_is_named() -> None:
    with pytest.raises(TypeError, match="Cannot save a set"):
        split({"x": {1, 2}})


# -- files -----------------------------------------------------------------------------


def state_of(step: int) -> dict[str, Any]:
    return {"w": torch.arange(12.0).reshape(3, 4) + step, "n": step, "r": rows(step)}


def rows(step: int) -> Rows:
    return Rows(torch.full((1, 2), float(step)))


def written(folder: Path, *steps: int) -> Checkpoints:
    checkpoints = Checkpoints(folder, World())
    for step in steps:
        assert checkpoints.save(step, state_of(step)) == ""
    assert checkpoints.wait() == ""
    return checkpoints


def test_the_newest_are_kept_and_latest_names_the_last(tmp_path: Path) -> None:
    state, world = written(tmp_path, 1, 2, 3).load()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "latest",
        "step-00000002",
        "step-00000003",
    ]
    assert (tmp_path / "latest").read_text() == "step-00000003"
    assert (state["step"], state["n"], world) == (3, 3, 1)
    assert torch.equal(state["w"], state_of(3)["w"])
    assert state["r"].tolist() == [[3.0, 3.0]]


def test_a_save_copies_before_it_returns(tmp_path: Path) -> None:
    checkpoints, x = Checkpoints(tmp_path, World()), torch.zeros(1000)
    checkpoints.save(1, {"x": x})
    x.fill_(7)
    checkpoints.wait()
    assert not checkpoints.load()[0]["x"].any()


def test_a_step_saved_twice_overwrites_nothing(tmp_path: Path) -> None:
    checkpoints = written(tmp_path, 5, 5)
    names = sorted(path.name for path in tmp_path.glob("step*"))
    assert names == ["step-00000005", "step-00000005.1"]
    assert checkpoints.load()[0]["step"] == 5


def test_torch_itself_can_load_the_tensors(tmp_path: Path) -> None:
    written(tmp_path, 4)
    target = {"w": torch.zeros(3, 4)}
    dcp.load(target, checkpoint_id=tmp_path / "step-00000004")
    assert torch.equal(target["w"], state_of(4)["w"])


def test_strides_survive(tmp_path: Path) -> None:
    """Else a resumed run multiplies in another order and rounds differently."""
    checkpoints = Checkpoints(tmp_path, World())
    checkpoints.save(1, {"x": torch.rand(4, 5).T})
    checkpoints.wait()
    assert checkpoints.load()[0]["x"].stride() == (1, 5)


class Bomb:
    """Code in a pickle."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("exploded"),))


Spoil = Callable[[Path], None]


def data_file(folder: Path) -> Path:
    return next(folder.glob("*.distcp"))


def cut(folder: Path) -> None:
    path = data_file(folder)
    path.write_bytes(path.read_bytes()[:-200])


def flip(folder: Path) -> None:
    path = data_file(folder)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def lose(folder: Path) -> None:
    data_file(folder).unlink()


def manifest(change: Callable[[str], str]) -> Spoil:
    def spoil(folder: Path) -> None:
        path = folder / manifests.MANIFEST
        path.write_text(change(path.read_text()))

    return spoil


def head(**values: Any) -> Spoil:
    return manifest(lambda text: json.dumps({**json.loads(text), **values}))


def old_format(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    torch.save({"format": 1}, folder / "rank-0.pt")


def explosive(folder: Path) -> None:
    """Both places where torch's own reader would run it."""
    (folder / ".metadata").write_bytes(pickle.dumps(Bomb()))
    data_file(folder).write_bytes(pickle.dumps(Bomb()))


SPOILED: dict[str, tuple[Spoil, str]] = {
    "truncated": (cut, r"__0_0\.distcp is truncated: \w+ ends at byte"),
    "a bit flipped": (flip, r"__0_0\.distcp is damaged: the checksum of \w+"),
    "file lost": (lose, r"__0_0\.distcp cannot be read: No such file"),
    "no manifest": (
        lambda folder: (folder / manifests.MANIFEST).unlink(),
        r"manifest\.json cannot be read: No such file",
    ),
    "manifest cut": (manifest(lambda t: t[:50]), r"manifest\.json is damaged"),
    "manifest empty": (manifest(lambda _: ""), r"manifest\.json is damaged"),
    "manifest changed": (
        manifest(lambda t: t.replace('\\"step\\": 2', '\\"step\\": 3')),
        r"manifest\.json is damaged: its digest",
    ),
    "foreign": (head(kind="other"), r"of another program\. Must be a natgrad"),
    "foreign json": (manifest(lambda _: "[1, 2]"), r"of another program"),
    "newer": (head(format=3), r"has format 3\. Must be format 2"),
    "older": (old_format, r"has format 1 \(one file a rank\)\. Must be format 2"),
    "code": (explosive, r"__0_0\.distcp is (truncated|damaged)"),
}


@pytest.mark.parametrize("case", SPOILED)
def test_a_bad_file_is_named_and_the_last_good_one_used(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil, message = SPOILED[case]
    monkeypatch.chdir(tmp_path)
    checkpoints = written(tmp_path, 1, 2)
    spoil(tmp_path / "step-00000002")
    used = r"Used step-00000001 instead; the other is now step-00000002\.broken"
    with pytest.warns(UserWarning, match=rf"{message}[\s\S]*{used}"):
        state, _ = checkpoints.load()
    assert state["step"] == 1
    assert not (tmp_path / "exploded").exists()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Skipped")
        assert checkpoints.load()[0]["step"] == 1


def test_with_no_good_one_left_all_are_named(tmp_path: Path) -> None:
    checkpoints = written(tmp_path, 1, 2)
    for name in ("step-00000001", "step-00000002"):
        flip(tmp_path / name)
    with pytest.raises(UserError, match=r"No usable.*\n.*00002.*\n.*00001"):
        checkpoints.load()
    assert len(list(tmp_path.glob("step-0000000?"))) == 2


def test_a_state_that_cannot_be_used_is_named_and_the_one_before_used(
    tmp_path: Path,
) -> None:
    def use(state: dict[str, Any], world: int) -> None:
        if state["n"] == 2:
            raise ValueError("Invalid step=-1")

    checkpoints = written(tmp_path, 1, 2)
    expected = r"step-00000002 does not fit: ValueError: Invalid step=-1\. Used step-0"
    with pytest.warns(UserWarning, match=expected):
        state, _ = checkpoints.load(use=use)
    assert state["step"] == 1


def test_what_is_half_written_is_not_seen(tmp_path: Path) -> None:
    (tmp_path / "step-00000009.partial").mkdir()
    with pytest.raises(UserError, match="No usable checkpoint"):
        Checkpoints(tmp_path, World()).load()
    assert written(tmp_path, 1).load()[0]["step"] == 1


# -- a disk that is full ---------------------------------------------------------------


def full_disk(*args: Any, **kwargs: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


FAILING = {
    "data": (storage.FileSystemWriter, "write_data"),
    "index": (storage.FileSystemWriter, "finish"),
    "manifest": (storage, "write_whole"),
    "fsync": (os, "fsync"),
    "rename": (Path, "rename"),
}


@pytest.mark.parametrize("where", FAILING)
def test_a_full_disk_ends_the_save_only(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = written(tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(*FAILING[where], full_disk)
        checkpoints.save(2, state_of(2))
        problem = checkpoints.wait()
    assert "step 2 is not saved" in problem
    assert "No space left on device" in problem
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["latest", "step-00000001"]
    assert checkpoints.load()[0]["step"] == 1
    assert checkpoints.save(3, state_of(3)) == ""
    assert checkpoints.wait() == ""
    assert checkpoints.load()[0]["step"] == 3


def test_a_checkpoint_without_latest_is_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = written(tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_whole", full_disk)
        checkpoints.save(2, state_of(2))
        expected = "step-00000002 is saved, but after that.*No space left"
        with pytest.warns(UserWarning, match=expected):
            assert checkpoints.wait() == ""
    assert checkpoints.load()[0]["step"] == 2


def test_a_limit_of_the_system_on_files_ends_the_save_only(tmp_path: Path) -> None:
    checkpoints = written(tmp_path, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        checkpoints.save(2, {"x": torch.zeros(100_000)})
        problem = checkpoints.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "step 2 is not saved: OSError: [Errno 27] File too large" in problem
    assert checkpoints.load()[0]["step"] == 1


# -- whole runs ------------------------------------------------------------------------


def config(**settings: Any) -> TrainConfig:
    """Eight steps of an MLP without augmentation: the same for any number of ranks."""
    base = TrainConfig(
        steps=8,
        batch=48,
        log_every=2,
        evaluate_every=100.0,
        checkpoint_every=0.0,
        threads=1,
        model=ModelConfig(name="mlp"),
        data=DataConfig(augment=False, mixup=0.4),
        optimizer=OptimizerConfig(name="spngd", lr=0.02),
        curvature=CurvatureConfig(damping=0.1, norm="unit", factor_decay=0.6),
        refresh=RefreshConfig(statistics=2, inverses=3),
        schedule=ScheduleConfig(kind="polynomial", power=2.0, couple_momentum=True),
    )
    return replace(base, **settings)


def train(
    folder: Path, settings: TrainConfig, world: World, stop: int | None = None
) -> Trainer:
    run = create_together(folder, "test", settings, world)
    trainer = Trainer(run, world, show=False)
    trainer.total = stop or trainer.total
    trainer.train()
    return trainer


def resumed(folder: Path, world: World, **curvature: Any) -> Trainer:
    run = runs.load(folder)
    changed = replace(run.config, curvature=replace(run.config.curvature, **curvature))
    trainer = Trainer(replace(run, config=changed), world, show=False)
    assert trainer.train(resume=True) == Ending(reason="done", step=8)
    return trainer


def weights(trainer: Trainer) -> Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def losses(folder: Path) -> list[float]:
    records = read_metrics(folder / "metrics.jsonl")
    return [each["loss"] for each in records if each["kind"] == "train"]


def test_a_full_disk_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(checkpoint_every=0.02)
    monkeypatch.setattr(storage.FileSystemWriter, "write_data", full_disk)
    with pytest.warns(UserWarning, match="step 8 is not saved.*No space left"):
        trainer = train(tmp_path / "run", settings, World())
    assert trainer.step == 8
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert records[-1]["reason"] == "unsaved"
    assert sum(each["kind"] == "unsaved" for each in records) > 2
    monkeypatch.undo()
    train(tmp_path / "other", settings, World())
    assert losses(tmp_path / "run") == losses(tmp_path / "other")


def test_a_run_resumed_with_other_options_names_the_checkpoints(
    tmp_path: Path,
) -> None:
    train(tmp_path / "run", config(), World(), stop=4)
    expected = r"No usable.*\n.*step-00000004 does not fit: .*'style': 'factored'"
    with pytest.raises(UserError, match=expected):
        resumed(tmp_path / "run", World(), style="eigen")
    assert (tmp_path / "run" / "checkpoints" / "step-00000004").is_dir()


KFAC = OptimizerConfig(kfac=True, lr=0.05)
FACTORED = CurvatureConfig(damping=0.1, norm="unit", style="factored")
ELASTIC = {
    "spngd": config(),
    "spngd-adaptive": config(refresh=RefreshConfig(kind="adaptive")),
    "kfac": config(optimizer=KFAC, curvature=FACTORED, schedule=ScheduleConfig()),
    "kfac-eigen": config(optimizer=KFAC, schedule=ScheduleConfig(kind="cosine")),
}
CHANGES: dict[int, dict[str, str]] = {
    1: {},
    2: {"strategy": "layer_wise", "placement": "round_robin"},
    3: {"strategy": "factor_wise"},
}


def _save_all(rank: int, folder: Path) -> None:
    for name, settings in ELASTIC.items():
        train(folder / name, settings, World(rank=rank, size=2), stop=5)


def _resume_all(rank: int, world: int, folder: Path) -> dict[str, Tensor]:
    here, seen = World(rank=rank, size=world), dict[str, Tensor]()
    for name in ELASTIC:
        copy = folder / f"{name}-{world}"
        if here.main:
            shutil.copytree(folder / name, copy)
        here.barrier()
        seen[name] = weights(resumed(copy, here, **CHANGES[world]))
    return seen


@pytest.mark.processes
@pytest.mark.slow
def test_a_run_goes_on_in_any_world_under_any_plan(tmp_path: Path) -> None:
    """Saved by two ranks in the middle of an interval; to 1e-6 of never stopping."""
    run_world(2, _save_all, tmp_path, timeout=120)
    results = [_resume_all(0, 1, tmp_path)]
    for world in (2, 3):
        results += run_world(world, _resume_all, world, tmp_path, timeout=120)
    for name, settings in ELASTIC.items():
        expected = weights(train(tmp_path / "whole" / name, settings, World()))
        away = [(seen[name] - expected).abs().max().item() for seen in results]
        assert max(away) < 1e-6, (name, away)
