"""The cache of resized images: written in parts, resumed, checked and read."""

import json
import re
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.pictures import SIZES, jpeg, picture, write_imagenet

from natgrad_lab import data
from natgrad_lab.cli import main
from natgrad_lab.data.cache import (
    LIMIT,
    Form,
    damaged,
    estimate,
    open_cache,
    write_cache,
)
from natgrad_lab.data.cache_command import place
from natgrad_lab.data.imagenet import originals
from natgrad_lab.data.images import ImageSplit

SMALL = Form(side=32, shard=4)
"""Ten training images in three shards, four test images in one."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_imagenet(folder, train=5, val=2, sizes=[(60, 80), (80, 50), (90, 130)])
    return folder


def written(root: Path, out: Path, form: Form = SMALL, **options: int) -> list[str]:
    """Write a cache; the lines that were said."""
    said: list[str] = []
    splits, classes = originals(root)
    write_cache(out, splits, classes, form, say=said.append, **options)
    return said


def pixels(split: data.Split) -> torch.Tensor:
    return split.fetch(torch.arange(len(split)))[0].float()


def test_a_cache_has_all_images_and_labels(root: Path, tmp_path: Path) -> None:
    said = written(root, tmp_path)
    assert [line.split(":")[0] for line in said[:-1]] == [
        *("train-00000.tar", "train-00001.tar", "train-00002.tar", "val-00000.tar")
    ]
    assert re.search(r"whole: 14 images, .* kB an image, the largest", said[-1])
    cache, (splits, classes) = open_cache(tmp_path), originals(root)
    assert cache.classes == classes
    for name, split in splits.items():
        assert torch.equal(cache.splits[name].labels, split.labels)
        difference = pixels(cache.splits[name]) - pixels(split)
        # pictures are noise: at 32 pixels much of it is lost, but not where it is
        assert difference.abs().mean() < 0.4 * pixels(split).std()
        assert difference.mean((0, 2, 3)).abs().max() < 2


def test_the_mean_is_of_the_whole_training_set(root: Path, tmp_path: Path) -> None:
    written(root, tmp_path, Form(side=64, shard=4))
    found = data.load("imagenet", root, size=56, cache=tmp_path)
    wanted = data.load("imagenet", root, size=56)
    assert found.mean is not None
    assert wanted.mean is not None
    assert found.mean.shape == (3, 56, 56)
    assert (found.mean - wanted.mean).abs().mean() < 8
    assert found.note == "2 image folders (cached at 64 pixels, quality 95)"


def test_shards_are_tar_files_that_anyone_can_read(root: Path, tmp_path: Path) -> None:
    written(root, tmp_path)
    source = open_cache(tmp_path).splits["train"].source
    with tarfile.open(tmp_path / "train-00001.tar") as tar:
        names = tar.getnames()
        assert names[:2] == ["00000004.jpg", "00000004.cls"]
        assert len(names) == 8
        for member in tar.getmembers():
            file = tar.extractfile(member)
            assert file is not None
            number = int(member.name[:8])
            if member.name.endswith(".jpg"):
                assert file.read() == source.read(number)
            else:
                assert file.read() == str(number // 5).encode()


def test_ranks_write_it_together_and_the_last_one_opens_it(
    root: Path, tmp_path: Path
) -> None:
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    written(root, alone)
    first = written(root, shared, rank=1, world=2)
    assert [line.split(":")[0] for line in first] == [
        "train-00001.tar",
        "val-00000.tar",
    ]
    with pytest.raises(data.DataError, match=r"no cache\.json.*natgrad data cache"):
        open_cache(shared)
    assert "is whole" in written(root, shared, rank=0, world=2)[-1]
    for file in sorted(alone.glob("*.tar")):
        assert file.read_bytes() == (shared / file.name).read_bytes()
    assert (alone / "cache.json").read_text() == (shared / "cache.json").read_text()


def test_an_interrupted_cache_goes_on(root: Path, tmp_path: Path) -> None:
    written(root, tmp_path)
    kept = (tmp_path / "train-00000.tar").stat().st_mtime_ns
    wanted = (tmp_path / "train-00001.tar").read_bytes()
    (tmp_path / "cache.json").unlink()
    # one shard was never sealed, one is cut short
    (tmp_path / "train-00001.npz").unlink()
    (tmp_path / "val-00000.tar").write_bytes(b"short")
    said = written(root, tmp_path)
    assert [line.split(":")[0] for line in said[:2]] == [
        "train-00001.tar",
        "val-00000.tar",
    ]
    assert (tmp_path / "train-00000.tar").stat().st_mtime_ns == kept
    assert (tmp_path / "train-00001.tar").read_bytes() == wanted
    assert not list(tmp_path.glob("*.partial"))


def test_other_originals_are_written_anew(root: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    shutil.copytree(root, own)
    written(own, tmp_path / "cache")
    image = jpeg(picture(np.random.default_rng(0), 60, 60))
    (own / "imagenet/train/n1/another.JPEG").write_bytes(image)
    said = written(own, tmp_path / "cache")
    assert [line.split(":")[0] for line in said[:-1]] == [
        *("train-00001.tar", "train-00002.tar")
    ]
    assert len(open_cache(tmp_path / "cache").splits["train"]) == 11


def test_another_form_is_refused(root: Path, tmp_path: Path) -> None:
    written(root, tmp_path)
    with pytest.raises(data.DataError, match="has another cache"):
        written(root, tmp_path, Form(side=48, shard=4))
    with pytest.raises(data.DataError, match="images for crop='stretched', not 'res"):
        data.load("imagenet", root, crop="resized", cache=tmp_path)


@pytest.mark.parametrize("wrong", [{"side": 4}, {"quality": 5}, {"shard": 0}])
def test_a_wrong_form_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(data.DataError, match=f"Invalid {next(iter(wrong))}="):
        Form(**wrong)


def test_a_missing_shard_is_named(root: Path, tmp_path: Path) -> None:
    written(root, tmp_path)
    (tmp_path / "train-00002.tar").unlink()
    with pytest.raises(data.DataError, match=r"train-00002\.tar has 0 bytes, not"):
        open_cache(tmp_path)


def test_another_version_is_refused(root: Path, tmp_path: Path) -> None:
    written(root, tmp_path)
    facts = json.loads((tmp_path / "cache.json").read_text())
    (tmp_path / "cache.json").write_text(json.dumps({**facts, "version": 99}))
    with pytest.raises(data.DataError, match=r"version=99. Must be 1"):
        open_cache(tmp_path)


def test_a_flipped_bit_is_found(root: Path, tmp_path: Path) -> None:
    written(root, tmp_path)
    cache = open_cache(tmp_path)
    told: list[tuple[str, int, int]] = []
    assert not list(damaged(cache, progress=lambda *seen: told.append(seen)))
    assert told == [("train", 10, 10), ("val", 4, 4)]
    path = tmp_path / "train-00001.tar"
    content = bytearray(path.read_bytes())
    content[512 + 300] ^= 1
    path.write_bytes(content)
    (name,) = damaged(open_cache(tmp_path))
    assert "00000004.jpg" in name
    assert str(path) in name
    assert main(["data", "cache", "--out", str(tmp_path), "--check"]) == 1


def test_images_that_keep_their_aspect(root: Path, tmp_path: Path) -> None:
    """Their test images are resized by no more than they were when written."""
    written(root, tmp_path, Form(crop="resized", side=64, shard=4))
    loaded = data.load("imagenet", root, crop="resized", size=56, cache=tmp_path)
    original = data.load("imagenet", root, crop="resized", size=56)
    _, test = data.loaders(loaded, batch_size=4, prefetch=0)
    _, true = data.loaders(original, batch_size=4, prefetch=0)
    found, wanted = next(iter(test))[0], next(iter(true))[0]
    assert (found - wanted).abs().mean() < 0.4 * wanted.std()
    train, _ = data.loaders(loaded, batch_size=4, prefetch=0)
    assert next(iter(train))[0].shape == (4, 3, 56, 56)


def test_an_image_takes_120_kb_at_most(tmp_path: Path) -> None:
    """Photographs take a third of it, and even noise is held to it."""
    rng = np.random.default_rng(0)
    write_imagenet(tmp_path, train=2, val=1, sizes=SIZES[:2])
    noise = rng.integers(0, 256, (300, 300, 3), dtype=np.uint8)
    (tmp_path / "imagenet/train/n0/noise.JPEG").write_bytes(jpeg(noise, 98))
    form = Form(quality=100)
    splits, classes = originals(tmp_path)
    guess = estimate(splits, Form(), tmp_path / "cache")
    assert guess.images == 7
    assert guess.bytes_each < 60_000
    write_cache(tmp_path / "cache", splits, classes, form)
    source = open_cache(tmp_path / "cache").splits["train"].source
    sizes = [len(source.read(i)) for i in range(5)]
    assert LIMIT * 0.8 < max(sizes) <= LIMIT


def test_the_command_says_the_size_first(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "cache"
    asked = ["data", "cache", "imagenet", "--root", str(root), "--out", str(out)]
    assert main([*asked, "--side", "32", "--rank", "1", "--world", "2"]) == 0
    assert "rank 1 of 2 is done" in capsys.readouterr().err
    assert main([*asked, "--side", "32", "--rank", "0", "--world", "2"]) == 0
    said = capsys.readouterr().err.splitlines()
    assert re.search(r"14 images in 2 shards, about .* kB each: .* GB .*free", said[0])
    assert "kB an image" in said[-1]
    assert main([*asked, "--check"]) == 0
    assert main([*asked, "--side", "4"]) == 2
    assert main([*asked, "--workers", "-1"]) == 2
    assert "Invalid workers=-1. Must be >= 1." in capsys.readouterr().err


def test_a_process_knows_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    assert place(None, None) == (0, 1), "a batch script is no task of srun"
    monkeypatch.setenv("SLURM_PROCID", "2")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    assert place(None, None) == (2, 4)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert place(None, None) == (1, 3)
    with pytest.raises(data.DataError, match=r"rank=3. Must be in \[0, 3\)"):
        place(3, None)


def test_a_batch_of_the_cache_resumes_exactly(root: Path, tmp_path: Path) -> None:
    written(root, tmp_path)
    loaded = data.load("imagenet", root, size=28, cache=tmp_path)
    assert isinstance(loaded.train, ImageSplit)
    first, _ = data.loaders(loaded, batch_size=4, erasing=0.5)
    with first:
        batches = [x for _ in range(2) for x, _ in first]
    second, _ = data.loaders(loaded, batch_size=4, erasing=0.5)
    with second:
        next(iter(second))
        state = second.state_dict()
    third, _ = data.loaders(loaded, batch_size=4, erasing=0.5)
    with third:
        third.load_state_dict(state)
        rest = [x for _ in range(2) for x, _ in third]
    assert len(batches) == 4
    for x, y in zip(batches[1:], rest, strict=True):
        assert torch.equal(x, y)
