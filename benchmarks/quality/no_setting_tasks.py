"""The tasks of `benchmarks.quality.no_setting`."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Sine(nn.Module):
    """The sine of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x)


class Task:
    """A network, its data, and what is looked at.

    Attributes:
        steps: of every run.
        batch: examples of a step; 0: all.
    """

    name, steps, batch = "", 200, 0
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]

    def network(self) -> nn.Module:
        """With torch's random state."""
        raise NotImplementedError

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The training loss."""
        return F.mse_loss(outputs, targets)

    def error(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Of the test; the loss where nothing else is said."""
        return self.loss(outputs, targets)

    def closure(self, model: nn.Module, at: Any) -> tuple[Any, Tensor]:
        """Outputs and loss of a batch."""
        x, y = self.train if at is None else (t[at] for t in self.train)
        outputs = model(x)
        return outputs, self.loss(outputs, y)

    def batches(self, seed: int) -> Iterator[Any]:
        """Without end; the same for every contender."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            n = len(self.train[0])
            order = torch.randperm(n, generator=generator)
            parts = order.split(self.batch) if self.batch else (None,)
            yield from (p for p in parts if p is None or len(p) == self.batch)

    def values(self, model: nn.Module) -> tuple[float, float]:
        """Loss on all training data, and the error on the test's."""
        with torch.no_grad():
            train = self.loss(model(self.train[0]), self.train[1])
            test = self.error(model(self.test[0]), self.test[1])
        return float(train), float(test)


class Picture(Task):
    """64 x 96 pixels of china.jpg; every tenth is held out."""

    name = "picture"

    def __init__(self) -> None:
        from PIL import Image
        from sklearn.datasets import load_sample_image

        image = Image.fromarray(load_sample_image("china.jpg")).resize((96, 64))
        colours = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        colours = colours.reshape(-1, 3).float() / 255
        places = torch.cartesian_prod(
            torch.linspace(-1, 1, 64), torch.linspace(-1, 1, 96)
        )
        out = torch.arange(len(places)) % 10 == 7
        self.train = places[~out], colours[~out]
        self.test = places[out], colours[out]

    def network(self) -> nn.Module:
        model = nn.Sequential(
            nn.Linear(2, 128), Sine(), nn.Linear(128, 128), Sine(), nn.Linear(128, 3)
        )
        nn.init.uniform_(model[0].weight, -15, 15)  # pyright: ignore[reportArgumentType]
        return model


class Autoencoder(Task):
    """Squared error of an image."""

    widths: tuple[int, ...] = ()

    def network(self) -> nn.Module:
        layers: list[nn.Module] = []
        for n, m in pairwise(self.widths):
            layers += [nn.Linear(n, m), nn.Tanh()]
        return nn.Sequential(*layers[:-1])

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().sum(1).mean()


class Digits(Autoencoder):
    """A deep tanh autoencoder of scikit-learn's digits."""

    name, batch = "digits", 512
    widths = (64, 128, 64, 32, 8, 32, 64, 128, 64)

    def __init__(self) -> None:
        x, _ = _digits()
        self.train, self.test = (x[360:], x[360:]), (x[:360], x[:360])


class Fashion(Autoencoder):
    """10,000 training images of Fashion-MNIST; its files are in data/fashion-mnist."""

    name, batch, widths = "fashion", 512, (784, 256, 64, 16, 64, 256, 784)

    def __init__(self) -> None:
        train, test = _images("train", 10_000), _images("t10k", 2_000)
        self.train, self.test = (train, train), (test, test)


class Patches(Autoencoder):
    """4,000 grey patches of 12 x 12 pixels of flower.jpg; tested on its right."""

    name, batch, widths = "patches", 512, (144, 128, 64, 16, 64, 128, 144)

    def __init__(self) -> None:
        from sklearn.datasets import load_sample_image

        image = torch.tensor(load_sample_image("flower.jpg")).float().mean(2) / 255
        left, right = image[:, :480], image[:, 480:]
        train, test = _patches(left, 4000), _patches(right, 1000)
        self.train, self.test = (train, train), (test, test)


class Classes(Task):
    """Digits with a ReLU network; the test's error is the part that is wrong."""

    name, batch = "classes", 256

    def __init__(self) -> None:
        x, y = _digits()
        self.train, self.test = (x[360:], y[360:]), (x[:360], y[:360])

    def network(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(64, 64),
            nn.ReLU(),
            nn.Linear(64, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets)

    def error(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.argmax(1) != targets).float().mean()


class Field(nn.Module):
    """u and its Laplacian at places ``(n, 2)``, carried from layer to layer."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        sizes = ((2, width), (width, width), (width, 1))
        self.layers = nn.ModuleList(nn.Linear(n, m) for n, m in sizes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        slopes = torch.eye(2).expand(len(x), 2, 2)
        rows = torch.cat([x.unsqueeze(1), slopes, torch.zeros(len(x), 1, 2)], dim=1)
        z = rows
        for layer in self.layers:
            assert isinstance(layer, nn.Linear)
            z = layer(rows) - layer.bias * torch.tensor([[0.0], [1.0], [1.0], [1.0]])
            t = torch.tanh(z[:, :1])
            first = 1 - t.square()
            bend = -2 * t * first * z[:, 1:3].square().sum(1, keepdim=True)
            rows = torch.cat([t, first * z[:, 1:3], first * z[:, 3:] + bend], dim=1)
        return z[:, 0, 0], z[:, 3, 0]


class Poisson(Task):
    """-u_xx - u_yy = f on a square; the test's error is that of u, relative."""

    name = "poisson"

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inside = torch.rand(400, 2, generator=generator)
        self.edge = torch.rand(100, 2, generator=generator)
        i = torch.arange(100)
        self.edge[i, i % 2] = (i % 4 > 1).float()
        self.places = torch.cartesian_prod(*[torch.linspace(0, 1, 41)] * 2)
        self.source = 2 * torch.pi**2 * _solution(self.inside)
        self.train = self.test = self.inside, self.source

    def network(self) -> nn.Module:
        return Field()

    def closure(self, model: nn.Module, at: Any) -> tuple[Any, Tensor]:
        residual = model(self.inside)[1] + self.source
        border = model(self.edge)[0]
        loss = residual.square().mean() + 10 * border.square().mean()
        return (residual, border), loss

    def values(self, model: nn.Module) -> tuple[float, float]:
        with torch.no_grad():
            exact = _solution(self.places)
            wrong = (model(self.places)[0] - exact).norm() / exact.norm()
            return float(self.closure(model, None)[1]), float(wrong)


def _solution(x: Tensor) -> Tensor:
    return torch.sin(torch.pi * x).prod(1)


def _images(part: str, count: int) -> Tensor:
    """The first images of one of its original files."""
    path = Path("data/fashion-mnist") / f"{part}-images-idx3-ubyte.gz"
    pixels = gzip.decompress(path.read_bytes())[16 : 16 + count * 784]
    found = torch.frombuffer(bytearray(pixels), dtype=torch.uint8)
    return found.reshape(-1, 784).float() / 255


def _patches(image: Tensor, count: int, side: int = 12) -> Tensor:
    """Random ones, ``(count, side^2)``."""
    generator = torch.Generator().manual_seed(0)
    every = image.unfold(0, side, 1).unfold(1, side, 1)
    rows, columns = (
        torch.randint(n, (count,), generator=generator) for n in every.shape[:2]
    )
    return every[rows, columns].flatten(1)


def _digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(images, dtype=torch.float32) / 16
    return x[order], torch.tensor(labels)[order]


TASKS: dict[str, Callable[[], Task]] = {
    "digits": Digits,
    "picture": Picture,
    "poisson": Poisson,
    "classes": Classes,
    "patches": Patches,
    "fashion": Fashion,
}
