"""The networks of the zoo: shapes of third-party programs, rebuilt small."""

import itertools

import torch
from tests.support.zoo_data import PLACES, WORDS, Batch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm


class Positions(nn.Embedding):
    """Makes its own positions, as those of BART, OPT and Whisper."""

    def __init__(self, places: int, width: int) -> None:
        super().__init__(places + 2, width)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(torch.arange(input.shape[1]) + 2)


class Block(nn.Module):
    """Attention to what came before, then two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            self.qkv(self.first(x)).unflatten(2, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


class LanguageModel(nn.Module):
    """Words to the next words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 24), Positions(PLACES, 24)
        self.block, self.norm = Block(24), nn.LayerNorm(24)
        self.head = nn.Linear(24, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.block(self.words(x) + self.places(x))))


class Normalised(nn.Linear):
    """A linear layer that normalises its input."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(4 * F.normalize(input, dim=-1))


def normalised() -> nn.Module:
    first = nn.Linear(16, 32)
    return nn.Sequential(first, nn.ReLU(), Normalised(32, 32), nn.ReLU(), *head(32))


def head(width: int, outputs: int = 6) -> list[nn.Module]:
    return [nn.Linear(width, outputs)]


class TakesList(nn.Module):
    """Called with a list of vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), *head(32))

    def forward(self, vectors: list[Tensor]) -> Tensor:
        return self.net(torch.stack(vectors))


class TakesDict(nn.Module):
    """Called with a dict whose first entry is no batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(12, 24), nn.Linear(24, 6)
        self.score = nn.Linear(12, 1)

    def forward(self, inputs: Batch) -> Tensor:
        score = self.score(inputs["x"]).squeeze(2) @ inputs["mask"]
        mixed = (score.softmax(1).unsqueeze(2) * inputs["x"]).sum(1)
        return self.head(self.body(mixed).relu())


class Siamese(nn.Module):
    """Called once for each of a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class EncoderDecoder(nn.Module):
    """Reads four times as many words as it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out_words = nn.Embedding(WORDS, 24), nn.Embedding(WORDS, 24)
        self.places, self.out_places = (
            nn.Parameter(0.3 * torch.randn(n, 24)) for n in (4 * PLACES, PLACES)
        )
        self.norm, self.encode = nn.LayerNorm(24), nn.Linear(24, 24)
        self.query, self.keys = nn.Linear(24, 24), nn.Linear(24, 24)
        self.out, self.head = nn.Linear(24, 24), nn.Linear(24, WORDS)

    def forward(self, x: Tensor, before: Tensor) -> Tensor:
        read = self.norm(self.words(x) + self.places)
        read = read + self.encode(read).relu()
        written = self.out_words(before) + self.out_places
        keys, query = self.keys(read), self.query(written)
        mixed = F.scaled_dot_product_attention(query, keys, read)
        return self.head(written + self.out(mixed).relu())


class Vae(nn.Module):
    """A variational autoencoder, its loss a sum as in torch's own example."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(32, 32), nn.Linear(6, 32)
        self.mean, self.spread = nn.Linear(32, 6), nn.Linear(32, 6)
        self.out = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.encode(x).relu()
        mean, spread = self.mean(h), self.spread(h)
        z = mean + (0.5 * spread).exp() * torch.randn_like(mean)
        return self.out(self.decode(z).relu()).sigmoid(), mean, spread


def autoencoder() -> nn.Module:
    """Deep and narrow in the middle."""
    widths = (32, 24, 16, 8, 5, 8, 16, 24, 32)
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(itertools.pairwise(widths)):
        layers += [nn.Linear(a, b), *([nn.Tanh()] if i not in (3, 7) else [])]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Noise from noisy pictures and a time, as in diffusion models."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 16))
        self.enter = nn.Conv2d(1, 8, 3, padding=1)
        self.down = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.norm, self.middle = nn.GroupNorm(4, 16), nn.Conv2d(16, 16, 3, padding=1)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.leave_norm = nn.GroupNorm(4, 16)
        self.leave = nn.Conv2d(16, 1, 3, padding=1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        waves = time[:, None] * torch.logspace(0, 2, 4)
        told = self.time(torch.cat([waves.sin(), waves.cos()], 1))
        wide = self.enter(x)
        deep = self.down(F.silu(wide)) + told[:, :, None, None]
        deep = deep + self.middle(F.silu(self.norm(deep)))
        joined = torch.cat([wide, self.up(F.silu(deep))], 1)
        return self.leave(F.silu(self.leave_norm(joined)))


def mobile_net() -> nn.Module:
    """Depthwise and pointwise convolutions with batch norms."""

    def block(a: int, b: int, stride: int) -> list[nn.Module]:
        depthwise = nn.Conv2d(a, a, 3, stride, 1, groups=a, bias=False)
        pointwise = nn.Conv2d(a, b, 1, bias=False)
        return [
            *(depthwise, nn.BatchNorm2d(a), nn.ReLU6()),
            *(pointwise, nn.BatchNorm2d(b), nn.ReLU6()),
        ]

    enter = [nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU6()]
    body = [*block(8, 16, 2), *block(16, 24, 2)]
    return nn.Sequential(
        *enter, *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), *head(24, 8)
    )


class Gru(nn.Module):
    """A recurrent language model."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 16), nn.Linear(24, WORDS)
        self.gru = nn.GRU(16, 24, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(self.words(x))[0])


class Cell(nn.Module):
    """A cell that is called place by place, and so is the layer after it."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTMCell(1, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(len(x), 16)
        found: list[Tensor] = []
        for place in x.unbind(1):
            h, c = self.cell(place.unsqueeze(1), (h, c))
            found.append(self.out(h))
        return torch.cat(found, 1)


class Attention(nn.Module):
    """torch's own attention, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm = nn.Linear(12, 16), nn.LayerNorm(16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.up, self.head = nn.Linear(16, 32), nn.Linear(32, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.enter(x))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(self.up(x).relu().amax(1))


class GraphConv(nn.Module):
    """A layer that nobody knows."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5)

    def forward(self, x: Tensor, links: Tensor) -> Tensor:
        return links @ (x @ self.kernel)


class Graph(nn.Module):
    """Two of them, and a linear layer to read the groups."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GraphConv(16, 16), GraphConv(16, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor, links: Tensor) -> Tensor:
        x = self.second(self.first(x, links).relu(), links)
        return self.head(x.relu())


class Experts(nn.Module):
    """Expert tensors ``(experts, outputs, inputs)`` behind a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.head = nn.Linear(16, 4), nn.Linear(24, 6)
        self.up = nn.Parameter(torch.randn(4, 24, 16) / 4)
        self.down = nn.Parameter(torch.randn(4, 24, 24) / 24**0.5)

    def forward(self, x: Tensor) -> Tensor:
        share, chosen = self.gate(x).softmax(1).topk(2, 1)
        hidden = torch.einsum("bi,bkoi->bko", x, self.up[chosen]).relu()
        mixed = torch.einsum("bko,bkpo->bkp", hidden, self.down[chosen])
        return self.head((share.unsqueeze(2) * mixed).sum(1).relu())


class LoRA(nn.Module):
    """A frozen layer and what is learnt beside it."""

    def __init__(self, inputs: int, outputs: int, rank: int = 4) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.a = nn.Linear(inputs, rank, bias=False)
        self.b = nn.Linear(rank, outputs, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2 * self.b(self.a(x))


def adapters() -> nn.Module:
    return nn.Sequential(LoRA(16, 32), nn.ReLU(), LoRA(32, 32), nn.ReLU(), LoRA(32, 6))


def parametrised() -> nn.Module:
    """Weights that are computed from a length and a direction."""
    first, second = weight_norm(nn.Linear(16, 32)), weight_norm(nn.Linear(32, 32))
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), *head(32))


def enlarging() -> nn.Module:
    """Pictures of twice the size, as for super-resolution."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 4, 3, padding=1),
        nn.PixelShuffle(2),
    )
