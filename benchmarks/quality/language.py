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

from natgrad_lab.models.rotary import RotaryGPT

CONTEXT = 128
HELD_OUT = 64  # sequences
BYTES = 6_000_000


class Language(RotaryGPT):
    """Bytes to the logits of the next byte."""

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
