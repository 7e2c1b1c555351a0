"""P2: a small language model on the sources of Python's standard library.

Four layers of 128 with rotary positions, normalised queries and keys, squared ReLU and
no biases, on bytes, context 128. The rate is flat, then falls linearly to zero over the
last 70% of the steps. Embedding and head follow Adam. The value is the mean loss on
held-out text at the end, in nats a byte.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, LAYERS, HEADS, CONTEXT = 128, 4, 4, 128
HELD_OUT = 64  # sequences
BYTES = 6_000_000


class Attention(nn.Module):
    """Causal self-attention with rotary positions and normalised queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)
        self.value = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        half = WIDTH // HEADS // 2
        angles = torch.arange(CONTEXT)[:, None] * 10_000.0 ** (
            -torch.arange(half) / half
        )
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """``(b, t, WIDTH)`` to the same."""
        q, k, v = (
            layer(x).unflatten(2, (HEADS, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        q, k = (self._turned(F.rms_norm(y, y.shape[-1:])) for y in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))

    def _turned(self, y: Tensor) -> Tensor:
        a, b = y.chunk(2, -1)
        cos, sin = self.get_buffer("cos"), self.get_buffer("sin")
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Layer(nn.Module):
    """Attention and a squared-ReLU network, each on normalised inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``(b, t, WIDTH)`` to the same."""
        x = x + self.attention(F.rms_norm(x, x.shape[-1:]))
        return x + self.down(self.up(F.rms_norm(x, x.shape[-1:])).relu().square())


class Language(nn.Module):
    """Bytes to the logits of the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, 256, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.zeros_(self.head.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        """``(b, t)`` to ``(b, t, 256)``."""
        x = F.rms_norm(self.embedding(tokens), (WIDTH,))
        x = self.layers(x)
        return self.head(F.rms_norm(x, (WIDTH,)))

    def is_hidden(self, name: str) -> bool:
        """Whether a parameter is one of the hidden matrices."""
        return name.startswith("layers.")


def text() -> tuple[Tensor, Tensor]:
    """Training and held-out bytes: the library's own modules, in the order of names."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(p for p in folder.glob("*.py") if os.access(p, os.R_OK))
    data = b"\n".join(p.read_bytes() for p in files)[:BYTES]
    whole = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
    cut = len(whole) - 200_000
    return whole[:cut], whole[cut:]


def batches(data: Tensor, sequences: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Random windows, forever."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(
            len(data) - CONTEXT - 1, (sequences,), generator=generator
        )
        rows = data[starts[:, None] + torch.arange(CONTEXT + 1)]
        yield rows[:, :-1], rows[:, 1:]


def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Mean nats a byte."""
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


@torch.no_grad()
def value(model: nn.Module, held_out: Tensor) -> float:
    """The loss on fixed windows of the held-out text."""
    model.eval()
    found = []
    for i, (x, y) in enumerate(batches(held_out, 16, 12345)):
        if i == HELD_OUT // 16:
            break
        found.append(loss(model, x, y).item())
    model.train()
    return sum(found) / len(found)
