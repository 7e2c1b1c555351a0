"""Transformers as large ones are built today, of any size; also without memory."""

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, kw_only=True)
class Size:
    """Widths: of the stream, of keys and values, between the MLP's layers."""

    width: int
    keys: int
    inner: int
    layers: int
    heads: int
    words: int


SIZES = {
    "tiny": Size(width=32, keys=16, inner=64, layers=2, heads=4, words=40),
    "small": Size(width=256, keys=128, inner=1024, layers=4, heads=8, words=512),
    "1B": Size(width=2048, keys=512, inner=8192, layers=16, heads=32, words=128256),
    "8B": Size(width=4096, keys=1024, inner=14336, layers=32, heads=32, words=128256),
}


class Layer(nn.Module):
    """Attention with fewer keys than queries, and a gated MLP."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.before, self.between = nn.RMSNorm(size.width), nn.RMSNorm(size.width)
        self.query = nn.Linear(size.width, size.width, bias=False)
        self.key = nn.Linear(size.width, size.keys, bias=False)
        self.value = nn.Linear(size.width, size.keys, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)
        self.gate = nn.Linear(size.width, size.inner, bias=False)
        self.up = nn.Linear(size.width, size.inner, bias=False)
        self.down = nn.Linear(size.inner, size.width, bias=False)
        self.head_width = size.width // size.heads

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)
        q, k, v = (
            layer(h).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        h = self.between(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Transformer(nn.Module):
    """Words in, scores of the next word out."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.table = nn.Embedding(size.words, size.width)
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width)
        self.head = nn.Linear(size.width, size.words, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.table(words.long())
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def tiny() -> Transformer:
    """For `natgrad plan --import benchmarks.sharded.models:tiny --input 8`."""
    return Transformer(SIZES["tiny"])


def small() -> Transformer:
    """4 million parameters: what a step is timed and measured with."""
    return Transformer(SIZES["small"])


def one_billion() -> Transformer:
    """1.5 billion parameters, the head and the table counted apart."""
    return Transformer(SIZES["1B"])


def eight_billion() -> Transformer:
    """8.0 billion parameters."""
    return Transformer(SIZES["8B"])
