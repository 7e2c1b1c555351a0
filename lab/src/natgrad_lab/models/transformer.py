"""The transformer block that the GPT and the ViT share.

Every weight is in a plain nn.Linear, nn.LayerNorm or nn.Embedding that is called as a
module, so that any library's hooks see it.

Shapes: B batch, T positions, W width, H heads.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Multi-head self-attention, (B, T, W) -> (B, T, W)."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"Invalid {width=}. Must be a multiple of {heads=}.")
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1))  # (B, T, 3, H, W/H)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Two linear layers with GELU, four times as wide inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.gelu(self.up(x)))


class Block(nn.Module):
    """Attention and feed-forward, each behind a LayerNorm and a residual."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal=causal)
        self.norm2 = nn.LayerNorm(width)
        self.feedforward = FeedForward(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feedforward(self.norm2(x))


class Positions(nn.Module):
    """A learned vector for each position, added to the input.

    Positions are looked up once for each example, not once for the batch, so that the
    gradient of every lookup belongs to one example and statistics stay per example.
    """

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(count, width)

    def forward(self, x: Tensor) -> Tensor:
        index = torch.arange(x.shape[1], device=x.device)
        return x + self.table(index.expand(x.shape[0], -1))
