"""Every model by name: `build("resnet20", num_classes=10)`."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from natgrad_lab.models.airbench import Airbench
from natgrad_lab.models.cifar import CifarResNet
from natgrad_lab.models.gpt import GPT
from natgrad_lab.models.mlp import MLP
from natgrad_lab.models.resnet import BasicBlock, Bottleneck, ResNet
from natgrad_lab.models.rotary import RotaryGPT
from natgrad_lab.models.values import Autoencoder, Field, Sines
from natgrad_lab.models.vit import ViT

Shape = tuple[int, ...]

resnet8 = partial(CifarResNet, 8)
resnet20 = partial(CifarResNet, 20)
resnet32 = partial(CifarResNet, 32)
resnet44 = partial(CifarResNet, 44)
resnet56 = partial(CifarResNet, 56)
resnet110 = partial(CifarResNet, 110)
resnet18 = partial(ResNet, BasicBlock, (2, 2, 2, 2))
resnet34 = partial(ResNet, BasicBlock, (3, 4, 6, 3))
resnet50 = partial(ResNet, Bottleneck, (3, 4, 6, 3))
resnet101 = partial(ResNet, Bottleneck, (3, 4, 23, 3))
resnet152 = partial(ResNet, Bottleneck, (3, 8, 36, 3))
mlp, gpt, vit = MLP, GPT, ViT


def _image(shape: Shape, classes: int) -> dict[str, int]:
    return {"in_channels": shape[0], "num_classes": classes}


def _flat(shape: Shape, classes: int) -> dict[str, int]:
    return {"in_features": math.prod(shape), "num_classes": classes}


def _patches(shape: Shape, classes: int) -> dict[str, int]:
    size = shape[-1]
    # at least 3 patches a side, or attention has nothing to attend to
    patch = next((p for p in (4, 7, 2) if size % p == 0 and size >= 3 * p), 1)
    return {**_image(shape, classes), "image_size": size, "patch": patch}


def _sequence(shape: Shape, classes: int) -> dict[str, int]:
    return {"context": shape[0], "vocabulary": classes}


def _same(shape: Shape, outputs: int) -> dict[str, int]:
    return {"features": math.prod(shape)}


def _values(shape: Shape, outputs: int) -> dict[str, int]:
    return {"features": math.prod(shape), "outputs": outputs}


def _none(shape: Shape, outputs: int) -> dict[str, int]:
    return {}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """How to make a model, and which settings follow from the data."""

    make: Callable[..., nn.Module]
    fit: Callable[[Shape, int], dict[str, int]]


_CIFAR = {f"resnet{d}": partial(CifarResNet, d) for d in (8, 20, 32, 44, 56, 110)}
_IMAGENET = {
    "resnet18": resnet18,
    "resnet34": resnet34,
    "resnet50": resnet50,
    "resnet101": resnet101,
    "resnet152": resnet152,
}
MODELS: dict[str, Entry] = {
    **{k: Entry(make=v, fit=_image) for k, v in (_CIFAR | _IMAGENET).items()},
    "mlp": Entry(make=MLP, fit=_flat),
    "vit": Entry(make=ViT, fit=_patches),
    "gpt": Entry(make=GPT, fit=_sequence),
    "gpt_rotary": Entry(make=RotaryGPT, fit=_sequence),
    "airbench": Entry(make=Airbench, fit=_image),
    "autoencoder": Entry(make=Autoencoder, fit=_same),
    "sines": Entry(make=Sines, fit=_values),
    "field": Entry(make=Field, fit=_none),
}


def names() -> tuple[str, ...]:
    """The names that `build` takes."""
    return tuple(MODELS)


def build(
    name: str, *, device: torch.device | str | None = None, **settings: Any
) -> nn.Module:
    """Make a model by name.

    Args:
        name: one of `names()`.
        device: where its parameters live; "meta" makes shapes without memory.
        **settings: the model's own arguments, such as `num_classes`.
    """
    entry = _entry(name)
    with torch.device(device or torch.get_default_device()):
        return entry.make(**settings)


def build_for(name: str, shape: Shape, classes: int, **settings: Any) -> nn.Module:
    """Make a model whose input and output fit a dataset.

    Args:
        name: one of `names()`.
        shape: one example's: (C, H, W) for images, (T,) for text.
        classes: number of classes, of different characters, or of values.
        **settings: the model's own arguments; they win over what the data implies.
    """
    fitted: dict[str, Any] = {**_entry(name).fit(shape, classes), **settings}
    return build(name, **fitted)


def _entry(name: str) -> Entry:
    if name not in MODELS:
        raise ValueError(f"Invalid model {name=}. Must be one of {', '.join(MODELS)}.")
    return MODELS[name]
