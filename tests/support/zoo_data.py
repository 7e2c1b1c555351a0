"""What members of the zoo learn: dicts of tensors, examples first."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

Batch = dict[str, Tensor]
WORDS, PLACES = 12, 8


def classes(source: torch.Generator, width: int = 16, count: int = 256) -> Batch:
    """Vectors, labelled by a random network and some noise."""
    x = torch.randn(count, width, generator=source)
    hidden = (x @ torch.randn(width, 12, generator=source)).tanh()
    scores = hidden @ torch.randn(12, 6, generator=source)
    scores += 0.5 * torch.randn(count, 6, generator=source)
    return {"x": x, "y": scores.argmax(1)}


def chains(source: torch.Generator, length: int = PLACES, count: int = 256) -> Batch:
    """Words that follow from the two before them, but for one in ten."""
    words = torch.randint(WORDS, (count, length + 1), generator=source)
    strange = torch.rand(count, length + 1, generator=source) < 0.1
    for i in range(2, length + 1):
        known = (2 * words[:, i - 1] + words[:, i - 2] + 1) % WORDS
        words[:, i] = torch.where(strange[:, i], words[:, i], known)
    return {"x": words[:, :-1], "y": words[:, 1:]}


def pairs_of_vectors(source: torch.Generator) -> Batch:
    """Two vectors, and whether they are of one class."""
    one, two = classes(source), classes(source)
    centres = torch.randn(4, 16, generator=source)
    a, b = (torch.randint(4, (256,), generator=source) for _ in range(2))
    b = torch.where(torch.arange(256) % 2 == 0, a, b)
    return {
        "a": centres[a] + 0.7 * one["x"],
        "b": centres[b] + 0.7 * two["x"],
        "y": (a == b).float(),
    }


def copies(source: torch.Generator) -> Batch:
    """Of 4 x PLACES words, every fourth."""
    words = torch.randint(WORDS, (256, 4 * PLACES), generator=source)
    y = words[:, ::4]
    begin = torch.cat([torch.zeros_like(y[:, :1]), y[:, :-1]], 1)
    return {"x": words, "before": begin, "y": y}


def bent(source: torch.Generator, width: int = 32, count: int = 256) -> Batch:
    """Vectors in (0, 1) with five degrees of freedom."""
    mixed = 1.5 * torch.randn(5, width, generator=source)
    return {"x": (torch.randn(count, 5, generator=source) @ mixed).sigmoid()}


def pictures(source: torch.Generator, channels: int = 1, count: int = 128) -> Batch:
    """Smooth pictures of 8 x 8, labelled by which of 8 stripes they are made of."""
    y = torch.randint(8, (count,), generator=source)
    grid = torch.arange(8.0)
    phase = 0.3 * torch.randn(count, 1, 1, generator=source)
    angle = y.view(-1, 1, 1) * math.pi / 8
    line = angle.cos() * grid.view(1, 8, 1) + angle.sin() * grid.view(1, 1, 8)
    x = (line + phase).sin().unsqueeze(1).repeat(1, channels, 1, 1)
    return {"x": x + 0.3 * torch.randn(x.shape, generator=source), "y": y}


def noisy_pictures(source: torch.Generator) -> Batch:
    """Pictures, a time in (0, 1) each, and the noise to add."""
    x = pictures(source)["x"]
    time = torch.rand(len(x), generator=source)
    return {"x": x, "time": time, "noise": torch.randn(x.shape, generator=source)}


def waves(source: torch.Generator) -> Batch:
    """Sines of random period and phase, and the same a place later."""
    at = torch.arange(17.0)
    period = 6 + 6 * torch.rand(128, 1, generator=source)
    phase = 6 * torch.rand(128, 1, generator=source)
    wave = (2 * math.pi * at / period + phase).sin()
    return {"x": wave[:, :-1], "y": wave[:, 1:]}


def bags(source: torch.Generator) -> Batch:
    """PLACES vectors, labelled by the one with the largest first entry."""
    x = torch.randn(256, PLACES, 12, generator=source)
    chosen = x[torch.arange(256), x[:, :, 0].argmax(1)]
    return {"x": x, "y": chosen[:, 1:7].argmax(1)}


def graph(source: torch.Generator) -> Batch:
    """96 nodes of 4 groups, linked within more than across."""
    y = torch.arange(96) % 4
    near = (y[:, None] == y[None, :]).float() * 0.25 + 0.03
    links = (torch.rand(96, 96, generator=source) < near).float()
    links = ((links + links.T + torch.eye(96)) > 0).float()
    root = links.sum(1).rsqrt()
    x = torch.randn(96, 16, generator=source)
    x[:, :4] += 0.7 * F.one_hot(y, 4)
    return {"x": x, "links": root[:, None] * links * root[None, :], "y": y}
