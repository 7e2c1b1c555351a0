"""Poisson's equation on a square: ``u_xx + u_yy = -f`` inside, ``u = 0`` at the edge.

An example is ``(x, y, edge)``. Where ``edge`` is 0 a model is asked for its Laplacian,
elsewhere for its value times `EDGE`, so that squared error is the sum of both residuals
with their weights. The solution is ``sin(pi x) sin(pi y)``; the test asks for its
values all over the square.
"""

import math
from pathlib import Path

import torch
from torch import Tensor

from natgrad_lab.data.dataset import Dataset, TensorSplit

INSIDE, BORDER = 400, 100
EDGE = math.sqrt(10 * INSIDE / BORDER)
"""The mean square at the edge counts ten times that inside."""


def load(root: Path) -> Dataset:
    """400 random places inside and 100 at the edge; a grid of 41 x 41 for testing."""
    generator = torch.Generator().manual_seed(0)
    inside = torch.rand(INSIDE, 2, generator=generator)
    border = torch.rand(BORDER, 2, generator=generator)
    i = torch.arange(BORDER)
    border[i, i % 2] = (i % 4 > 1).float()
    grid = torch.cartesian_prod(*[torch.linspace(0, 1, 41)] * 2)
    laplacian = -2 * math.pi**2 * _solution(inside)
    train = torch.cat([_asked(inside, 0.0), _asked(border, 1.0)])
    return Dataset(
        name="poisson",
        train=TensorSplit(train, torch.cat([laplacian, torch.zeros(BORDER, 1)])),
        test=TensorSplit(_asked(grid, 1.0), EDGE * _solution(grid)),
        classes=(),
        shape=(3,),
        values=1,
        note="Poisson's equation",
    )


def _asked(places: Tensor, edge: float) -> Tensor:
    return torch.cat([places, torch.full((len(places), 1), edge)], dim=1)


def _solution(places: Tensor) -> Tensor:
    return torch.sin(math.pi * places).prod(1, keepdim=True)
