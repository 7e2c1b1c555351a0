"""A GPT with fused Q, K and V under `fully_shard`: as one process trains it."""

from contextlib import closing
from typing import Any

import pytest
import torch
from tests.library.distributed.test_sharded import moved_as_planned, whole
from tests.support.world import run_world
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import natgrad

WORDS, WIDTH, HEADS, LENGTH, BATCH, STEPS = 11, 6, 2, 5, 12, 20
HOW = {"polar": 3, "spngd": 3, "kfac": 0, "muon": 3 * HEADS}
"""How many matrices the fused weight is; KFAC has the groups of its optimizer."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        # without a bias: that of keys has no gradient but rounding, which AdamW scales
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        fused = self.qkv(self.before(x)).unflatten(-1, (3, HEADS, -1))
        q, k, v = fused.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.between(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(6, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.last, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # for each example: what a rank adds up over its own is no gradient of one
        places = torch.arange(x.shape[1]).expand_as(x)
        h = self.words(x) + self.places(places)
        for layer in self.layers:
            h = layer(h)
        return self.head(self.last(h))


def build() -> GPT:
    torch.manual_seed(0)
    return GPT().double()


def make(name: str, model: GPT) -> tuple[Any, Any]:
    """What steps, and what is natgrad's in it."""
    if name == "kfac":
        host = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return host, natgrad.KFAC(model, host, damping=1e-2, loss="tokens")
    kinds: dict[str, Any] = {
        "polar": natgrad.Polar,
        "spngd": natgrad.SPNGD,
        "muon": natgrad.Muon,
    }
    groups = natgrad.groups(model, matrices={"qkv": HOW[name]})
    more = {} if name == "muon" else {"loss": "tokens"}
    optimizer = kinds[name](model, groups, lr=1e-2, **more)
    return optimizer, optimizer


def train(model: GPT, stepper: Any, rank: int = 0, world: int = 1) -> None:
    draw = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        words = torch.randint(WORDS, (BATCH, LENGTH + 1), generator=draw)
        mine = words.chunk(world)[rank]
        stepper.zero_grad()
        scores = model(mine[:, :-1]).flatten(0, 1)
        F.cross_entropy(scores, mine[:, 1:].flatten()).backward()
        stepper.step()


def sharded(rank: int, world: int) -> Any:
    found: dict[str, Any] = {}
    for name in HOW:
        model = build()
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        stepper, own = make(name, model)
        with closing(own):
            train(model, stepper, rank, world)
            own.engine.plan.check()
            moved_as_planned(own)
            states = own.engine.statistics.states
            kept = [n for n, s in states.items() if s.average is not None]
            found[name] = whole(model), kept
    return found


@pytest.mark.parametrize(
    "world", [3, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 4))]
)
def test_a_gpt_trains_as_on_one_process(world: int) -> None:
    results = run_world(world, sharded, world, timeout=200)
    for name in HOW:
        model = build()
        stepper, own = make(name, model)
        with closing(own):
            train(model, stepper)
        for found in results:
            for key, x in whole(model).items():
                away = float((found[name][0][key] - x).abs().max())
                assert away < 1e-10, (name, key, away)
        held = [s for found in results for s in found[name][1]]
        assert len(held) == len(set(held)), f"{name}: an average is kept twice"
