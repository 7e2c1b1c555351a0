"""CIFAR-10 in its official binary layout: records of a label and 3 x 32 x 32 pixels."""

import hashlib
from pathlib import Path

import numpy as np
import torch

from natgrad_lab.data.dataset import Dataset, TensorSplit, in_memory
from natgrad_lab.data.folders import DataError, find_folder

RECORD = 1 + 3 * 32 * 32
FOLDER = "cifar-10-batches-bin"
TRAIN = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
TEST = "test_batch.bin"
CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
ADVICE = (
    "Run `natgrad data get cifar10`, or unpack cifar-10-binary.tar.gz there and "
    "name the folder with --data.root or NATGRAD_DATA."
)
# SHA-256 of the official files, and of a JPEG re-encoding that is passed around
OFFICIAL = {
    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",  # noqa: E501
    "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",  # noqa: E501
    "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",  # noqa: E501
    "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",  # noqa: E501
    "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",  # noqa: E501
    "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",  # noqa: E501
}
JPEG_TEST = "2696e48ae3fe74d50ecaacc0b8092b89bf95cd3f6471d079f4cbd39a956c18c3"


def load(root: Path, records: int = 10_000) -> Dataset:
    """50,000 images of 32 x 32 to train on, 10,000 to test on.

    Args:
        root: holds the folder cifar-10-batches-bin, or is it.
        records: how many each of the six files must have.
    """
    folder = find_folder((root / FOLDER, root), TRAIN[0], ADVICE)
    files = {n: read_records(folder / n, records) for n in (*TRAIN, TEST)}
    return in_memory(
        "cifar10",
        _split(np.concatenate([files[n] for n in TRAIN])),
        _split(files[TEST]),
        CLASSES,
        note=describe(
            {n: hashlib.sha256(a.data).hexdigest() for n, a in files.items()}
        ),
        padding=4,
        flip=True,
    )


def read_records(path: Path, records: int) -> np.ndarray:
    """The records of one file, (records, 3073) uint8, checked."""
    try:
        data = np.fromfile(path, dtype=np.uint8)
    except FileNotFoundError:
        raise DataError(f"{path} is missing. {ADVICE}") from None
    if data.size != records * RECORD:
        expected = records * RECORD
        raise DataError(f"{path} has {data.size:,} bytes, not {expected:,}. {ADVICE}")
    data = data.reshape(records, RECORD)
    if data[:, 0].max() > 9:
        raise DataError(f"{path} has a label above 9: it is not CIFAR-10. {ADVICE}")
    return data


def describe(hashes: dict[str, str]) -> str:
    """What to call files with these SHA-256 hashes beside a result."""
    if hashes == OFFICIAL:
        return "CIFAR-10"
    jpeg = hashes[TEST] == JPEG_TEST
    return "CIFAR-10 (JPEG)" if jpeg else "CIFAR-10 (not the official files)"


def _split(records: np.ndarray) -> TensorSplit:
    data = torch.from_numpy(records)
    return TensorSplit(data[:, 1:].reshape(-1, 3, 32, 32), data[:, 0].long())
