"""scikit-learn's digits as values to reproduce: 64 pixels in [0, 1]."""

from pathlib import Path

from natgrad_lab.data.dataset import Dataset, TensorSplit
from natgrad_lab.data.digits import load as load_digits


def load(root: Path) -> Dataset:
    """The images of `natgrad_lab.data.digits`; each is its own label."""
    digits = load_digits(root)
    splits: list[TensorSplit] = []
    for split in (digits.train, digits.test):
        assert isinstance(split, TensorSplit)
        pixels = split.inputs.flatten(1).float() / 255
        splits.append(TensorSplit(pixels, pixels))
    return Dataset(
        name="autoencoder",
        train=splits[0],
        test=splits[1],
        classes=(),
        shape=(64,),
        values=64,
        note=digits.note,
    )
