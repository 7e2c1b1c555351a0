"""What the training does on a device, wherever CUDA is. See CONTRIBUTING."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.pictures import SIZES, write_imagenet

from natgrad_lab import data
from natgrad_lab.recipes import find
from natgrad_lab.train import run as runs
from natgrad_lab.train.config import ModelConfig
from natgrad_lab.train.loop import Trainer
from natgrad_lab.train.metrics import Clock
from natgrad_lab.train.precision import Precision
from natgrad_lab.train.processes import World
from natgrad_lab.train.records import read_metrics

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="torch sees no CUDA device"
    ),
]
DEVICE = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("data")
    write_imagenet(place, train=8, val=2, sizes=SIZES[:3])
    return place


def test_batches_sent_ahead_are_those_of_the_host(root: Path) -> None:
    loaded = data.load("imagenet", root, size=64)
    settings: dict[str, Any] = {"batch_size": 4, "erasing": 0.5, "channels_last": True}
    here, _ = data.loaders(loaded, **settings)
    there, _ = data.loaders(loaded, **settings, device=DEVICE)
    with here, there:
        for (x, labels), (y, same) in zip(here, there, strict=True):
            assert y.device.type == "cuda"
            assert torch.equal(labels, same.cpu())
            torch.testing.assert_close(x, y.cpu())


def test_pixels_leave_from_pinned_memory(root: Path) -> None:
    loaded = data.load("imagenet", root, size=64)
    view = data.steps(loaded, device=DEVICE).view
    assert view is not None
    assert isinstance(loaded.train, data.ImageSplit)
    pixels, _ = loaded.train.view(torch.arange(2), view, torch.rand(2, view.randoms))
    assert pixels.is_pinned()


def test_a_phase_is_what_the_device_spent() -> None:
    clock, work = Clock.of(DEVICE), torch.randn(2048, 2048, device=DEVICE)
    for name, times in (("short", 10), ("long", 100)):
        with clock.phase(name):
            for _ in range(times):
                torch.mm(work, work)
    phases = clock.take()
    assert phases["long"] > 3 * phases["short"] > 0


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_a_recipe_trains_on_the_device(
    precision: Precision, root: Path, tmp_path: Path
) -> None:
    config = find("osawa2020-4k").config
    config = replace(
        config,
        steps=6,
        batch=8,
        micro_batch=4,
        log_every=1,
        precision=precision,
        model=ModelConfig(name="resnet8", width=8),
        data=replace(config.data, root=root, size=64),
    )
    run = runs.create(tmp_path / "run", "test", config)
    assert Trainer(run, World(device=DEVICE), show=False).train().reason == "done"
    records = read_metrics(run.metrics)
    assert len([x for x in records if x["kind"] == "train"]) == 6
