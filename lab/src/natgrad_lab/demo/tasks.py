"""The demo's tasks: small networks on data that scikit-learn carries."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from sklearn.datasets import load_digits, load_sample_image
from torch import Tensor, nn
from torch.nn import functional as F

Data = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained, on what, and how it is judged.

    Attributes:
        name: For tables.
        network: A new network, from the global random state.
        data: Inputs and targets to train on, and to judge by.
        loss: Of outputs and targets.
        value: The same on the data to judge by, in ``unit``; the lower the better.
        batch, steps: Examples in a step, and steps in all.
    """

    name: str
    network: Callable[[], nn.Module]
    data: Callable[[], tuple[Data, Data]]
    loss: Callable[[Tensor, Tensor], Tensor]
    value: Callable[[Tensor, Tensor], float]
    unit: str
    batch: int
    steps: int

    def batches(self, data: Data, seed: int) -> Iterator[Data]:
        """Random batches without end, the same for every optimizer."""
        source = torch.Generator().manual_seed(seed)
        inputs, targets = data
        while True:
            order = torch.randperm(len(inputs), generator=source)
            for rows in order.split(self.batch):
                if len(rows) == self.batch:
                    yield inputs[rows], targets[rows]


class Sine(nn.Module):
    """``sin(30 x)`` in the first layer and ``sin(x)`` in others, as SIREN has it."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.scale * x)


def _autoencoder() -> nn.Module:
    widths = (64, 128, 64, 32, 8, 32, 64, 128, 64)
    layers: list[nn.Module] = []
    for n, m in pairwise(widths):
        layers += [nn.Linear(n, m), nn.Tanh()]
        nn.init.xavier_normal_(layers[-2].weight)  # pyright: ignore[reportArgumentType]
    return nn.Sequential(*layers[:-1])


def _picture_network() -> nn.Module:
    return nn.Sequential(
        *(nn.Linear(2, 64), Sine(10.0), nn.Linear(64, 64), Sine(3.0)),
        *(nn.Linear(64, 64), Sine(3.0), nn.Linear(64, 3)),
    )


def _classifier() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, stride=2), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(32 * 9, 10)),
    )


def _digits() -> tuple[Data, Data]:
    data, target = load_digits(return_X_y=True)
    images = torch.tensor(data, dtype=torch.float32) / 16
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], torch.tensor(target)[order]
    return (images[360:], labels[360:]), (images[:360], labels[:360])


def _codes() -> tuple[Data, Data]:
    (train, _), (test, _) = _digits()
    return (train, train), (test, test)


def _images() -> tuple[Data, Data]:
    (train, labels), (test, others) = _digits()
    return (train.view(-1, 1, 8, 8), labels), (test.view(-1, 1, 8, 8), others)


def _picture() -> tuple[Data, Data]:
    """Places in [-1, 1]^2 and colours in [0, 1] of a photograph, 32 by 48."""
    photo = torch.tensor(load_sample_image("china.jpg"), dtype=torch.float32) / 255
    small = F.interpolate(photo.permute(2, 0, 1)[None], (32, 48), mode="area")[0]
    rows, columns = torch.linspace(-1, 1, 32), torch.linspace(-1, 1, 48)
    places = torch.cartesian_prod(rows, columns)
    whole = places, small.flatten(1).T.contiguous()
    return whole, whole


def _squared(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().sum(1).mean() / 2


def _squared_value(outputs: Tensor, targets: Tensor) -> float:
    return 2 * _squared(outputs, targets).item()


def _entropy_value(outputs: Tensor, targets: Tensor) -> float:
    return F.cross_entropy(outputs, targets).item()


TASKS = {
    task.name: task
    for task in (
        Task(
            name="autoencoder",
            network=_autoencoder,
            data=_codes,
            loss=_squared,
            value=_squared_value,
            unit="squared error of an unseen image",
            batch=512,
            steps=150,
        ),
        Task(
            name="picture",
            network=_picture_network,
            data=_picture,
            loss=_squared,
            value=_squared_value,
            unit="squared error of a pixel",
            batch=1536,
            steps=150,
        ),
        Task(
            name="digits",
            network=_classifier,
            data=_images,
            loss=F.cross_entropy,
            value=_entropy_value,
            unit="cross-entropy of an unseen image",
            batch=718,
            steps=40,
        ),
    )
}
