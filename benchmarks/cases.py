"""The models that are measured, with random data of the right shape."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from natgrad_lab import models

Batch = tuple[Tensor, Tensor]
BATCHES = 4
"""Different batches that a contender goes round in."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and its batch.

    Attributes:
        label: for people.
        make: builds the model.
        shape: of one example.
        classes: number of classes.
        tokens: the examples are sequences of token numbers.
        slow: only the contenders that finish in minutes take part.
        seconds: share of the time budget, by number of threads.
    """

    label: str
    make: Callable[[], nn.Module]
    batch: int
    shape: tuple[int, ...]
    classes: int = 10
    tokens: bool = False
    slow: bool = False
    seconds: dict[int, float] = field(default_factory=lambda: {1: 60.0, 2: 30.0})

    @property
    def loss(self) -> str:
        """What natgrad is told about the loss."""
        return "tokens" if self.tokens else "mean"

    def model(self, layout: str = "contiguous") -> nn.Module:
        """A model; all contenders get the same initial weights."""
        torch.manual_seed(0)
        model = self.make()
        return model.to(memory_format=_FORMATS[layout]) if self.images else model

    @property
    def images(self) -> bool:
        """Whether memory layout is a question."""
        return len(self.shape) == 3

    def batches(self, layout: str = "contiguous", seed: int = 0) -> list[Batch]:
        """A few random batches."""
        generator = torch.Generator().manual_seed(seed)
        pairs = [self._batch(generator) for _ in range(BATCHES)]
        if not self.images:
            return pairs
        return [(x.to(memory_format=_FORMATS[layout]), y) for x, y in pairs]

    def _batch(self, generator: torch.Generator) -> Batch:
        size = (self.batch, *self.shape)
        if self.tokens:
            x = torch.randint(0, self.classes, size, generator=generator)
            return x, x.roll(-1, dims=1)
        x = torch.randn(size, generator=generator)
        y = torch.randint(0, self.classes, (self.batch,), generator=generator)
        return x, y


_FORMATS: dict[str, Any] = {
    "contiguous": torch.contiguous_format,
    "channels_last": torch.channels_last,
}


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean over examples, or over examples and positions."""
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def perceptron(hidden: tuple[int, ...] = (512, 512)) -> nn.Module:
    """The perceptron of the tables: 784 inputs."""
    return models.mlp(in_features=784, hidden=hidden)


CASES: dict[str, Case] = {
    "resnet20": Case(
        label="CIFAR ResNet-20",
        make=models.resnet20,
        batch=128,
        shape=(3, 32, 32),
        seconds={1: 75.0, 2: 40.0},
    ),
    "resnet32": Case(
        label="CIFAR ResNet-32",
        make=models.resnet32,
        batch=128,
        shape=(3, 32, 32),
        seconds={1: 100.0},
    ),
    "digits": Case(
        label="digits ResNet-8",
        make=lambda: models.resnet8(in_channels=1),
        batch=128,
        shape=(1, 8, 8),
        seconds={1: 15.0},
    ),
    "mlp": Case(
        label="MLP 784-512-512-10",
        make=perceptron,
        batch=512,
        shape=(784,),
        seconds={1: 30.0, 2: 20.0},
    ),
    "gpt": Case(
        label="GPT, 4 layers of 128",
        make=models.gpt,
        batch=16,
        shape=(128,),
        classes=128,
        tokens=True,
        seconds={1: 40.0, 2: 25.0},
    ),
    "resnet50": Case(
        label="ResNet-50 at 224",
        make=models.resnet50,
        batch=8,
        shape=(3, 224, 224),
        classes=1000,
        slow=True,
        seconds={2: 60.0},
    ),
    "resnet50-32": Case(
        label="ResNet-50 at 224, the papers' batch of a rank",
        make=models.resnet50,
        batch=32,
        shape=(3, 224, 224),
        classes=1000,
        slow=True,
        seconds={2: 420.0},
    ),
}

QUICK_CASES: dict[str, Case] = {
    "resnet8": Case(
        label="CIFAR ResNet-8 at 16",
        make=models.resnet8,
        batch=8,
        shape=(3, 16, 16),
        seconds={1: 1.0, 2: 1.0},
    ),
    "small mlp": Case(
        label="MLP 784-32-10",
        make=lambda: perceptron((32,)),
        batch=16,
        shape=(784,),
        seconds={1: 1.0, 2: 1.0},
    ),
}
