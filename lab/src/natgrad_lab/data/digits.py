"""scikit-learn's digits: 1,797 images of 8 x 8, installed with the package."""

from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits

from natgrad_lab.data.dataset import Dataset, TensorSplit, in_memory


def load(root: Path) -> Dataset:
    """Every fifth image is for testing: 1,437 to train on and 360 to test on.

    Pixels, 0 to 16 in the file, are scaled to 0 to 255.
    """
    pixels, digits = load_digits(return_X_y=True)
    scaled = np.rint(pixels * (255 / 16)).astype(np.uint8)
    images = torch.from_numpy(scaled).view(-1, 1, 8, 8)
    labels = torch.from_numpy(digits).long()
    test = torch.arange(len(labels)) % 5 == 0
    return in_memory(
        "digits",
        TensorSplit(images[~test], labels[~test]),
        TensorSplit(images[test], labels[test]),
        [str(d) for d in range(10)],
        note="digits (scikit-learn)",
        padding=1,
        flip=False,
    )
