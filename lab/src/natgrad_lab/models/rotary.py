"""A small GPT as speedruns have it: rotary positions, no biases, squared ReLU."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Causal self-attention with rotary positions and normalised queries and keys."""

    def __init__(self, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        half = width // heads // 2
        rates = 10_000.0 ** (-torch.arange(half) / half)
        angles = torch.arange(context)[:, None] * rates
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        q, k = (self._turned(F.rms_norm(y, y.shape[-1:])) for y in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))

    def _turned(self, y: Tensor) -> Tensor:
        a, b = y.chunk(2, -1)
        cos, sin = (self.get_buffer(n)[: y.shape[-2]] for n in ("cos", "sin"))
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Layer(nn.Module):
    """Attention and a squared-ReLU network, each on normalised inputs."""

    def __init__(self, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads, context)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(F.rms_norm(x, x.shape[-1:]))
        return x + self.down(self.up(F.rms_norm(x, x.shape[-1:])).relu().square())


class RotaryGPT(nn.Module):
    """A decoder-only transformer, (B, T) token numbers -> (B, T, vocabulary) logits.

    Args:
        vocabulary: number of different tokens.
        context: longest sequence it takes.
        width: size of a token's vector.
        depth: number of layers.
        heads: attention heads; must divide `width`.
    """

    def __init__(
        self,
        *,
        vocabulary: int = 256,
        context: int = 128,
        width: int = 128,
        depth: int = 4,
        heads: int = 4,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.Sequential(
            *(Layer(width, heads, context) for _ in range(depth))
        )
        self.head = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.zeros_(self.head.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = self.layers(F.rms_norm(x, x.shape[-1:]))
        return self.head(F.rms_norm(x, x.shape[-1:]))
