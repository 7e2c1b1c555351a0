"""Datasets from files written here, and what is said when they are wrong."""

import gzip
import math
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from natgrad_lab import data
from natgrad_lab.data import cifar10, fashion_mnist, imagenet, table, text
from natgrad_lab.data.folders import data_root


def write_cifar10(root: Path, records: int = 4) -> np.ndarray:
    folder = root / cifar10.FOLDER
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    every = rng.integers(0, 256, (6, records, cifar10.RECORD), dtype=np.uint8)
    every[:, :, 0] %= 10
    for name, part in zip((*cifar10.TRAIN, cifar10.TEST), every, strict=True):
        part.tofile(folder / name)
    return every


def idx(array: np.ndarray) -> bytes:
    shape = struct.pack(f">{array.ndim}I", *array.shape)
    return bytes((0, 0, 8, array.ndim)) + shape + array.tobytes()


def write_fashion(folder: Path, *, packed: bool) -> dict[str, np.ndarray]:
    folder.mkdir(parents=True)
    rng = np.random.default_rng(1)
    arrays = {}
    for part, count in (("train", 6), ("t10k", 3)):
        images = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = rng.integers(0, 10, count, dtype=np.uint8)
        arrays[f"{part}-images-idx3-ubyte"] = images
        arrays[f"{part}-labels-idx1-ubyte"] = labels
    for name, array in arrays.items():
        content = gzip.compress(idx(array)) if packed else idx(array)
        (folder / (name + ".gz" * packed)).write_bytes(content)
    return arrays


def test_digits_are_all_there_once():
    digits = data.load("digits")
    assert isinstance(digits.train, data.TensorSplit)
    assert (len(digits.train), len(digits.test)) == (1437, 360)
    assert digits.train.inputs.shape[1:] == digits.shape == (1, 8, 8)
    assert digits.train.inputs.dtype == torch.uint8
    assert digits.train.inputs.max() == 255
    assert digits.train.labels.bincount().min() > 100


def test_cifar10_reads_the_binary_layout(tmp_path):
    every = write_cifar10(tmp_path)
    loaded = data.load("cifar10", tmp_path, records=4)
    images, labels = loaded.train.fetch(torch.arange(20))
    records = every[:5].reshape(20, -1)
    assert labels.tolist() == records[:, 0].tolist()
    assert np.array_equal(images.numpy(), records[:, 1:].reshape(20, 3, 32, 32))
    assert labels.dtype == torch.int64
    assert np.array_equal(
        loaded.test.fetch(torch.arange(4))[0].flatten(1).numpy(), every[5, :, 1:]
    )
    assert loaded.note == "CIFAR-10 (not the official files)"


def test_cifar10_is_found_when_the_root_is_its_folder(tmp_path):
    write_cifar10(tmp_path)
    folder = tmp_path / cifar10.FOLDER
    assert len(data.load("cifar10", folder, records=4).train) == 20


def test_cifar10_says_which_files_it_read():
    jpeg = cifar10.OFFICIAL | {cifar10.TEST: cifar10.JPEG_TEST}
    assert cifar10.describe(dict(cifar10.OFFICIAL)) == "CIFAR-10"
    assert cifar10.describe(jpeg) == "CIFAR-10 (JPEG)"


def test_missing_data_lists_the_folders_and_the_command(tmp_path):
    with pytest.raises(data.DataError) as error:
        data.load("cifar10", tmp_path)
    assert str(tmp_path / cifar10.FOLDER) in str(error.value)
    assert "natgrad data get cifar10" in str(error.value)


def test_one_missing_file_is_named(tmp_path):
    write_cifar10(tmp_path)
    gone = tmp_path / cifar10.FOLDER / "data_batch_3.bin"
    gone.unlink()
    with pytest.raises(data.DataError, match=r"data_batch_3.bin is missing.*data get"):
        data.load("cifar10", tmp_path, records=4)


def test_a_truncated_file_is_named(tmp_path):
    write_cifar10(tmp_path)
    short = tmp_path / cifar10.FOLDER / "test_batch.bin"
    short.write_bytes(short.read_bytes()[: 3 * cifar10.RECORD])
    with pytest.raises(
        data.DataError, match=r"test_batch.bin has 9,219 bytes, not 12,292"
    ):
        data.load("cifar10", tmp_path, records=4)


def test_a_wrong_label_is_noticed(tmp_path):
    write_cifar10(tmp_path)
    wrong = tmp_path / cifar10.FOLDER / "test_batch.bin"
    wrong.write_bytes(b"\x0a" + wrong.read_bytes()[1:])
    with pytest.raises(data.DataError, match="label above 9"):
        data.load("cifar10", tmp_path, records=4)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("folder", ["fashion-mnist", "FashionMNIST/raw", "."])
def test_fashion_mnist_reads_idx(tmp_path, packed, folder):
    arrays = write_fashion(tmp_path / "root" / folder, packed=packed)
    loaded = data.load("fashion_mnist", tmp_path / "root")
    images, labels = loaded.train.fetch(torch.arange(6))
    expected = arrays["train-images-idx3-ubyte"]
    assert np.array_equal(images[:, 0].numpy(), expected)
    assert labels.tolist() == arrays["train-labels-idx1-ubyte"].tolist()
    assert len(loaded.test) == 3


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda b: b[:-10], "is damaged"),
        (lambda b: b"not gzip", "is damaged"),
        (lambda b: gzip.compress(b"not idx"), "not an idx file"),
        (lambda b: gzip.compress(gzip.decompress(b)[:-1]), "4,703 bytes, not 4,704"),
    ],
)
def test_a_damaged_idx_file_is_named(tmp_path, spoil, message):
    write_fashion(tmp_path / "fashion-mnist", packed=True)
    path = tmp_path / "fashion-mnist" / "train-images-idx3-ubyte.gz"
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(data.DataError, match=f"train-images-idx3-ubyte.gz.*{message}"):
        data.load("fashion_mnist", tmp_path)


def test_a_missing_idx_file_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(fashion_mnist, "DEBIAN", tmp_path / "no")
    with pytest.raises(data.DataError, match="apt install dataset-fashion-mnist"):
        data.load("fashion_mnist", tmp_path)
    write_fashion(tmp_path / "fashion-mnist", packed=True)
    (tmp_path / "fashion-mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(data.DataError, match="t10k-labels-idx1-ubyte is missing"):
        data.load("fashion_mnist", tmp_path)


def test_channel_moments_are_numpys():
    images = torch.randint(0, 256, (5, 3, 4, 4), dtype=torch.uint8)
    mean, std = data.channel_moments(images)
    values = images.double().numpy()
    np.testing.assert_allclose(mean.flatten(), values.mean((0, 2, 3)), rtol=1e-6)
    np.testing.assert_allclose(std.flatten(), values.std((0, 2, 3)), rtol=1e-6)


def write_images(root: Path) -> None:
    rng = np.random.default_rng(2)
    for part, count in (("train", 3), ("val", 1)):
        for label, shade in (("n1", 40), ("n2", 200)):
            folder = root / "imagenet" / part / label
            folder.mkdir(parents=True)
            for i in range(count):
                noise = rng.integers(0, 40, (30, 50, 3), dtype=np.uint8)
                Image.fromarray(noise + np.uint8(shade)).save(folder / f"{i}.JPEG")


def test_imagenet_streams_a_folder(tmp_path):
    write_images(tmp_path)
    loaded = data.load("imagenet", tmp_path, threads=2)
    images, labels = loaded.train.fetch(torch.tensor([5, 0]))
    assert images.shape == (2, 3, 256, 256)
    assert images.dtype == torch.uint8
    assert labels.tolist() == [1, 0]
    assert (images.float().mean((1, 2, 3)) > 128).tolist() == [True, False]
    assert loaded.classes == ("n1", "n2")
    assert loaded.note == "2 image folders"


def test_the_mean_image_is_of_the_upper_left_and_is_kept(tmp_path):
    write_images(tmp_path)
    loaded = data.load("imagenet", tmp_path)
    every, _ = loaded.train.fetch(torch.arange(6))
    expected = every[:, :, :224, :224].float().mean(0)
    assert loaded.mean is not None
    torch.testing.assert_close(loaded.mean, expected)
    kept = next((tmp_path / "imagenet").glob("mean-*.npy"))
    np.save(kept, np.full((3, 256, 256), 7, np.float32))
    again = data.load("imagenet", tmp_path).mean
    assert again is not None
    assert again.unique().tolist() == [7]


def test_imagenet_batches_are_cropped_and_scaled(tmp_path):
    write_images(tmp_path)
    loaded = data.load("imagenet", tmp_path)
    train, test = data.loaders(loaded, batch_size=4, test_batch_size=2, prefetch=0)
    images, _ = next(iter(train))
    assert images.shape == (4, 3, 224, 224)
    assert images.abs().max() <= 1
    assert loaded.mean is not None
    raw = loaded.test.fetch(torch.arange(2))[0][:, :, 16:240, 16:240].float()
    expected = (raw - loaded.mean) / 255
    torch.testing.assert_close(next(iter(test))[0], expected, rtol=1e-5, atol=1e-5)


def test_a_damaged_image_is_named(tmp_path):
    write_images(tmp_path)
    (tmp_path / "imagenet/train/n1/1.JPEG").write_bytes(b"no image")
    with pytest.raises(data.DataError, match=r"1\.JPEG cannot be read"):
        data.load("imagenet", tmp_path)


def test_a_missing_folder_of_images_is_named(tmp_path):
    with pytest.raises(data.DataError, match=r"imagenet.train is missing.*image-net"):
        data.load("imagenet", tmp_path)
    write_images(tmp_path)
    (tmp_path / "imagenet/val/n9").mkdir()
    with pytest.raises(data.DataError, match=r"classes unknown to train: \['n9'\]"):
        data.load("imagenet", tmp_path)


def test_mean_image_tells_its_progress(tmp_path):
    write_images(tmp_path)
    train = data.load("imagenet", tmp_path).train
    assert isinstance(train, data.ImageSplit)
    told = []
    imagenet.mean_image(train, None, lambda done, total: told.append((done, total)))
    assert told == [(6, 6)]


def write_text(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "a.txt").write_text("hello world")
    (folder / "b.md").write_text("help, héllo")
    (folder / "c.bin").write_bytes(b"\xff" * 50)


def test_text_gives_the_next_character_as_label(tmp_path):
    write_text(tmp_path / "books")
    loaded = data.load("text", tmp_path, folder=tmp_path / "books", block=4)
    inputs, labels = loaded.train.fetch(torch.tensor([0, 1]))
    spelled = ["".join(loaded.classes[i] for i in row) for row in inputs]
    assert spelled == ["help", ", hé"]
    assert "".join(loaded.classes[i] for i in labels[0]) == "elp,"
    assert loaded.shape == (4,)
    assert loaded.is_text


def test_rare_characters_are_one(tmp_path):
    write_text(tmp_path / "text")
    loaded = data.load("text", tmp_path, block=4, limit=2)
    assert loaded.classes == ("h", "l", text.UNKNOWN)
    assert loaded.train.fetch(torch.tensor([0]))[0].tolist() == [[0, 2, 1, 2]]


def test_the_default_text_is_the_standard_library(tmp_path):
    loaded = data.load("text", tmp_path, block=64)
    assert "standard library" in loaded.note
    assert len(loaded.train) > 50_000
    assert len(loaded.classes) == 128


def test_too_little_text_is_said(tmp_path):
    write_text(tmp_path / "text")
    with pytest.raises(
        data.DataError, match="not enough text for examples of block=99"
    ):
        data.load("text", tmp_path, block=99)


def test_an_unknown_name_lists_the_names():
    with pytest.raises(data.DataError, match=r"name='mnist'.*digits, cifar10"):
        data.load("mnist")


def test_the_root_is_the_argument_the_environment_or_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NATGRAD_DATA", str(tmp_path / "env"))
    assert data_root(tmp_path) == tmp_path
    assert data_root() == tmp_path / "env"
    monkeypatch.delenv("NATGRAD_DATA")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert data_root() == tmp_path / "natgrad"


def test_every_name_has_a_module():
    folder = Path(table.__file__).parent
    assert all((folder / f"{name}.py").is_file() for name in data.NAMES)


def test_blocks_of_text_do_not_overlap():
    split = data.TextSplit(torch.arange(26, dtype=torch.uint8), 5)
    inputs, _ = split.fetch(torch.arange(len(split)))
    assert inputs.flatten().tolist() == list(range(math.floor(25 / 5) * 5))
