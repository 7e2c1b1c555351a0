"""A picture as a function: from a place in [-1, 1]^2 to three colours."""

from pathlib import Path

import torch
from PIL import Image
from sklearn.datasets import load_sample_image

from natgrad_lab.data.dataset import Dataset, TensorSplit

HEIGHT, WIDTH = 64, 96


def load(root: Path) -> Dataset:
    """scikit-learn's china.jpg at 64 x 96; every tenth pixel is for testing."""
    whole = Image.fromarray(load_sample_image("china.jpg"))
    image = whole.resize((WIDTH, HEIGHT))
    colours = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    colours = colours.reshape(-1, 3).float() / 255
    places = torch.cartesian_prod(*(torch.linspace(-1, 1, n) for n in (HEIGHT, WIDTH)))
    out = torch.arange(len(places)) % 10 == 7
    return Dataset(
        name="picture",
        train=TensorSplit(places[~out], colours[~out]),
        test=TensorSplit(places[out], colours[out]),
        classes=(),
        shape=(2,),
        values=3,
        note="china.jpg (scikit-learn)",
    )
