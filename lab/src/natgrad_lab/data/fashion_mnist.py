"""Fashion-MNIST: idx files, compressed or not."""

import gzip
import math
import zlib
from pathlib import Path

import numpy as np
import torch

from natgrad_lab.data.dataset import Dataset, TensorSplit, in_memory
from natgrad_lab.data.folders import DataError, find_folder

FOLDER = "fashion-mnist"
DEBIAN = Path("/usr/share/datasets/fashion-mnist")
UNSIGNED_BYTE = 0x08
CLASSES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
ADVICE = (
    "Run `natgrad data get fashion_mnist`, or on Debian "
    "`apt install dataset-fashion-mnist`."
)


def load(root: Path) -> Dataset:
    """60,000 grey images of 28 x 28 to train on, 10,000 to test on."""
    places = (root / FOLDER, root / "fashion_mnist", root / "FashionMNIST" / "raw")
    folder = find_folder((*places, root, DEBIAN), "train-images-idx3-ubyte", ADVICE)
    return in_memory(
        "fashion_mnist",
        _split(folder, "train"),
        _split(folder, "t10k"),
        CLASSES,
        note="Fashion-MNIST",
        padding=2,
        flip=True,
    )


def _split(folder: Path, part: str) -> TensorSplit:
    images = read_idx(_either(folder / f"{part}-images-idx3-ubyte"), dims=3)
    labels = read_idx(_either(folder / f"{part}-labels-idx1-ubyte"), dims=1)
    if len(images) != len(labels):
        counts = f"{len(images):,} images and {len(labels):,} labels"
        raise DataError(f"{folder} has {counts} in its {part} files. {ADVICE}")
    return TensorSplit(
        torch.from_numpy(images).unsqueeze(1), torch.from_numpy(labels).long()
    )


def _either(path: Path) -> Path:
    """The file as it is, or compressed."""
    packed = path.with_name(path.name + ".gz")
    found = next((p for p in (path, packed) if p.is_file()), None)
    if found is None:
        raise DataError(f"{path} is missing, as is {packed.name}. {ADVICE}")
    return found


def read_idx(path: Path, dims: int) -> np.ndarray:
    """An idx file of unsigned bytes as an array with `dims` dimensions."""
    data = _read(path)
    header = 4 + 4 * dims
    if data[:4] != bytes((0, 0, UNSIGNED_BYTE, dims)) or len(data) < header:
        raise DataError(f"{path} is not an idx file of {dims}-D bytes. {ADVICE}")
    shape = np.frombuffer(data, ">u4", dims, offset=4).tolist()
    if len(data) - header != math.prod(shape):
        got, expected = len(data) - header, math.prod(shape)
        raise DataError(f"{path} has {got:,} bytes, not {expected:,}. {ADVICE}")
    return np.frombuffer(bytearray(data), np.uint8, offset=header).reshape(shape)


def _read(path: Path) -> bytes:
    if path.suffix != ".gz":
        return path.read_bytes()
    try:
        with gzip.open(path) as file:
            return file.read()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is damaged ({error}). {ADVICE}") from error
