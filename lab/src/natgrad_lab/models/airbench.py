"""The network of the CIFAR-10 speedrun airbench (Jordan 2024).

A frozen 2 x 2 whitening convolution, three groups of two 3 x 3 convolutions with batch
norm and GELU, and a head whose output is divided by its width. The whitening follows
from images: `Airbench.fit`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTHS = (1, 4, 4)
"""Of the groups, over that of the first; the published one has 64."""
PATCH, EPS = 2, 5e-4


class Whitening(nn.Module):
    """A frozen convolution to the eigenvectors of patches and their negatives."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        outputs = 2 * channels * PATCH**2
        self.register_buffer("weight", torch.zeros(outputs, channels, PATCH, PATCH))
        self.bias = nn.Parameter(torch.zeros(outputs))

    @torch.no_grad()
    def fit(self, images: Tensor) -> None:
        """From normalised images, (N, C, H, W)."""
        patches = F.unfold(images, PATCH).transpose(1, 2).flatten(0, 1)
        values, vectors = torch.linalg.eigh(patches.mT @ patches / len(patches))
        weight = self.get_buffer("weight")
        rows = (vectors / (values + EPS).sqrt()).mT.reshape(-1, *weight.shape[1:])
        weight.copy_(torch.cat((rows, -rows)))

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.get_buffer("weight"), self.bias)


def _convolution(inputs: int, outputs: int) -> nn.Conv2d:
    conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    with torch.no_grad():
        nn.init.dirac_(conv.weight[:inputs])
    return conv


def _norm(channels: int) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(channels, eps=1e-12, momentum=0.4)
    norm.weight.requires_grad_(False)
    return norm


class Airbench(nn.Module):
    """Images of 32 x 32, (N, in_channels, 32, 32) -> (N, num_classes) logits.

    Args:
        in_channels: channels of the images.
        num_classes: size of the output.
        width: channels of the first group; the others have four times as many.
    """

    def __init__(
        self, *, in_channels: int = 3, num_classes: int = 10, width: int = 64
    ) -> None:
        super().__init__()
        self.whitening = Whitening(in_channels)
        layers: list[nn.Module] = [nn.GELU()]
        n = len(self.whitening.bias)
        for m in (width * factor for factor in WIDTHS):
            layers += [_convolution(n, m), nn.MaxPool2d(2), _norm(m), nn.GELU()]
            layers += [_convolution(m, m), _norm(m), nn.GELU()]
            n = m
        self.layers = nn.Sequential(*layers, nn.MaxPool2d(3), nn.Flatten())
        self.head = nn.Linear(n, num_classes, bias=False)
        with torch.no_grad():
            self.head.weight.div_(self.head.weight.std())

    def fit(self, images: Tensor) -> None:
        """Set the whitening by normalised images, before training."""
        self.whitening.fit(images)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.whitening(x))) / self.head.in_features
