"""The zoo: shapes of third-party programs, rebuilt small, each with data to learn.

A member is a network, examples (a dict of tensors, examples first), and a loss. Sizes
are such that a step takes milliseconds. What a name of natgrad must cover of it, and
what its statistics must be, is in `tests/library/test_zoo.py`; how far each optimizer
gets in 300 steps in `benchmarks/zoo.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tests.support import zoo_data as data
from tests.support import zoo_networks as net
from tests.support.zoo_data import PLACES, Batch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, kw_only=True)
class Member:
    """One shape.

    Attributes:
        build: the network.
        data: all examples, by a generator.
        loss: of a batch.
        reduction: natgrad's ``loss=``.
        terms: how many terms of the loss an example has.
        batch: examples in a step; None: all.
        others: parameters without a block under `KFAC`, by the beginning of their name.
    """

    build: Callable[[], nn.Module]
    data: Callable[[torch.Generator], Batch]
    loss: Callable[[Any, Batch], Tensor]
    reduction: Any = "mean"
    terms: int = 1
    batch: int | None = 32
    others: tuple[str, ...] = ()


Make = Callable[[nn.Module, Member], Any]
"""An optimizer for a network."""


def drawn(data: Batch, count: int | None, source: torch.Generator) -> Batch:
    """A random batch of ``count`` examples; None: all."""
    if count is None:
        return data
    total = len(next(iter(data.values())))
    index = torch.randint(total, (count,), generator=source)
    return {name: x[index] for name, x in data.items()}


def train(member: Member, make: Make, seed: int, steps: int) -> float:
    """The loss of all examples in the end; NaN if it went wrong."""
    source = torch.Generator().manual_seed(100 + seed)
    data = member.data(source)
    torch.manual_seed(seed)
    model = member.build()
    optimizer = make(model, member)
    for _ in range(steps):
        optimizer.zero_grad()
        try:
            loss = member.loss(model, drawn(data, member.batch, source))
        except RuntimeError:  # a binary cross-entropy refuses NaN
            return math.nan
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        torch.manual_seed(0)
        loss = member.loss(model, data).item()
    return loss / (len(data["x"]) if member.reduction == "sum" else 1)


def vae_loss(model: nn.Module, batch: Batch) -> Tensor:
    y, mean, spread = model(batch["x"])
    divergence = -0.5 * (1 + spread - mean.square() - spread.exp()).sum()
    return F.binary_cross_entropy(y, batch["x"], reduction="sum") + divergence


def diffusion_loss(model: nn.Module, batch: Batch) -> Tensor:
    time = batch["time"]
    keep = (0.5 * math.pi * time).cos().view(-1, 1, 1, 1)
    noisy = keep * batch["x"] + (1 - keep.square()).sqrt() * batch["noise"]
    return F.mse_loss(model(noisy, time), batch["noise"])


def words_loss(model: nn.Module, batch: Batch) -> Tensor:
    inputs = [x for name, x in batch.items() if name != "y"]
    return F.cross_entropy(model(*inputs).flatten(0, 1), batch["y"].flatten())


def class_loss(model: nn.Module, batch: Batch) -> Tensor:
    inputs = [x for name, x in batch.items() if name != "y"]
    return F.cross_entropy(model(*inputs), batch["y"])


def list_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(list(batch["x"])), batch["y"])


def dict_loss(model: nn.Module, batch: Batch) -> Tensor:
    inputs = {"mask": torch.eye(PLACES).to(batch["x"]), "x": batch["x"]}
    return F.cross_entropy(model(inputs), batch["y"])


def pair_loss(model: nn.Module, batch: Batch) -> Tensor:
    closeness = 3 - (model(batch["a"]) - model(batch["b"])).square().sum(1)
    return F.binary_cross_entropy_with_logits(closeness, batch["y"])


def squared(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch["x"]), batch.get("y", batch["x"]))


def enlarged(model: nn.Module, batch: Batch) -> Tensor:
    small = F.avg_pool2d(batch["x"], 2)
    return F.mse_loss(model(small), batch["x"])


ZOO: dict[str, Member] = {
    "positions": Member(
        build=net.LanguageModel,
        data=data.chains,
        loss=words_loss,
        reduction="tokens",
        terms=PLACES,
        others=("places", "block.first", "block.second", "norm"),
    ),
    "normalised linear": Member(
        build=net.normalised, data=data.classes, loss=class_loss, others=("2.",)
    ),
    "list of inputs": Member(build=net.TakesList, data=data.classes, loss=list_loss),
    "dict of inputs": Member(build=net.TakesDict, data=data.bags, loss=dict_loss),
    "several forwards": Member(
        build=net.Siamese, data=data.pairs_of_vectors, loss=pair_loss
    ),
    "encoder-decoder": Member(
        build=net.EncoderDecoder,
        data=data.copies,
        loss=words_loss,
        reduction="tokens",
        terms=PLACES,
        others=("places", "out_places", "norm"),
    ),
    "VAE": Member(build=net.Vae, data=data.bent, loss=vae_loss, reduction="sum"),
    "autoencoder": Member(build=net.autoencoder, data=data.bent, loss=squared),
    "image regression": Member(build=net.enlarging, data=data.pictures, loss=enlarged),
    "diffusion U-Net": Member(
        build=net.UNet,
        data=data.noisy_pictures,
        loss=diffusion_loss,
        others=("norm", "up.bias", "leave_norm"),
    ),
    "MobileNet": Member(
        build=net.mobile_net,
        data=lambda source: data.pictures(source, channels=3),
        loss=class_loss,
        others=("1.", "4.", "7.", "10.", "13."),
    ),
    "GRU": Member(
        build=net.Gru,
        data=data.chains,
        loss=words_loss,
        reduction="tokens",
        terms=PLACES,
        others=("gru",),
    ),
    "LSTM cell": Member(
        build=net.Cell, data=data.waves, loss=squared, others=("cell",)
    ),
    "attention of torch": Member(
        build=net.Attention,
        data=data.bags,
        loss=class_loss,
        others=("norm",),
    ),
    "GCN": Member(
        build=net.Graph,
        data=data.graph,
        loss=class_loss,
        batch=None,
        others=("first", "second"),
    ),
    "mixture of experts": Member(
        build=net.Experts, data=data.classes, loss=class_loss, others=("up", "down")
    ),
    "LoRA": Member(build=net.adapters, data=data.classes, loss=class_loss),
    "weight_norm": Member(
        build=net.parametrised, data=data.classes, loss=class_loss, others=("0.", "2.")
    ),
}
