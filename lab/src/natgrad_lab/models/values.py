"""Networks that learn values: an autoencoder, a picture, a solution of an equation."""

from itertools import pairwise

import torch
from torch import Tensor, nn

from natgrad_lab.data.poisson import EDGE


class Autoencoder(nn.Module):
    """Tanh layers down to a sixteenth of the width and up again (N, features).

    Args:
        features: values in and out.
        width: of the first hidden layer.
    """

    def __init__(self, *, features: int = 64, width: int = 128) -> None:
        super().__init__()
        down = [width, width // 2, width // 4]
        middle = max(1, width // 16)
        pairs = pairwise((features, *down, middle, *down[::-1], features))
        self.layers = nn.ModuleList(nn.Linear(n, m) for n, m in pairs)

    def forward(self, x: Tensor) -> Tensor:
        for layer in list(self.layers)[:-1]:
            x = torch.tanh(layer(x))
        return self.layers[-1](x)


class Sines(nn.Module):
    """Sine layers whose first weights are large: details of a picture.

    Args:
        features: values in.
        outputs: values out.
        width: of the two hidden layers.
    """

    FREQUENCY = 15.0

    def __init__(
        self, *, features: int = 2, outputs: int = 3, width: int = 128
    ) -> None:
        super().__init__()
        pairs = pairwise((features, width, width, outputs))
        self.layers = nn.ModuleList(nn.Linear(n, m) for n, m in pairs)
        first = self.layers[0]
        assert isinstance(first, nn.Linear)
        nn.init.uniform_(first.weight, -self.FREQUENCY, self.FREQUENCY)

    def forward(self, x: Tensor) -> Tensor:
        for layer in list(self.layers)[:-1]:
            x = torch.sin(layer(x))
        return self.layers[-1](x)


class Field(nn.Module):
    """u and its Laplacian at places, carried from layer to layer.

    Inputs are `natgrad_lab.data.poisson`'s ``(x, y, edge)``. In each layer an example
    has four rows: value, two slopes, Laplacian.

    Args:
        width: of the two hidden tanh layers.
    """

    def __init__(self, *, width: int = 48) -> None:
        super().__init__()
        pairs = pairwise((2, width, width, 1))
        self.layers = nn.ModuleList(nn.Linear(n, m) for n, m in pairs)

    def forward(self, x: Tensor) -> Tensor:
        places, edge = x[:, :2], x[:, 2]
        slopes = torch.eye(2).to(x).expand(len(x), 2, 2)
        rows = torch.cat(
            [places.unsqueeze(1), slopes, torch.zeros_like(slopes[:, :1])], dim=1
        )
        derived = torch.tensor([[0.0], [1.0], [1.0], [1.0]]).to(x)
        z = rows
        for layer in self.layers:
            assert isinstance(layer, nn.Linear)
            z = layer(rows) - layer.bias * derived
            t = torch.tanh(z[:, :1])
            first = 1 - t.square()
            bend = -2 * t * first * z[:, 1:3].square().sum(1, keepdim=True)
            rows = torch.cat([t, first * z[:, 1:3], first * z[:, 3:] + bend], dim=1)
        return torch.where(edge > 0, EDGE * z[:, 0, 0], z[:, 3, 0]).unsqueeze(1)
