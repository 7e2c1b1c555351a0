"""How much a model computes a step: flops by layer, from one forward on no device.

Letters: b examples, t positions of a layer's output, (s, m, n) the block's gradient.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import nn

import natgrad
from natgrad import SPNGD, Free, Options, Rule
from natgrad.diagnostics import blocks_by_group
from natgrad.layers import Block, LayerOptions, find_blocks
from natgrad.math.statistics import enough_stride
from natgrad.plan import BlockSpec, StatisticSpec
from natgrad_lab.errors import UserError
from natgrad_lab.models import MODELS, build

Shape = tuple[int, ...]
_IMAGENET = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One block's work: its spec, its positions an example, whether it convolves."""

    spec: BlockSpec
    positions: int
    convolves: bool

    @property
    def forward_flops(self) -> float:
        """Of one example. A backward is twice that."""
        kinds = {spec.kind for spec in self.spec.statistics}
        products = not kinds.isdisjoint(("A", "G")) or self.spec.rows > 1
        return 2.0 * self.positions * self.spec.elements if products else 0.0

    def looked_at(self, batch: int, world: int, subsample: int | None) -> float:
        """Of a rank's examples, how many statistics are estimated from.

        ``subsample`` is the library's: every k-th, or None for as many as are enough.
        """
        embeds = any(s.kind == "A" and s.diagonal for s in self.spec.statistics)
        if embeds or not self.forward_flops:  # or a norm
            return batch
        enough = enough_stride(self.spec.largest, batch * world, self.positions)
        return max(1.0, batch / (subsample or enough))

    def statistic_flops(self, spec: StatisticSpec) -> float:
        """Of one example: a symmetric product has half the flops of a product.

        Normalisation layers sum over positions first, so they have one product. An S
        is made of the example's gradient in the eigenbases; with one position the
        gradient has rank one, and its two vectors are taken there.
        """
        if spec.kind == "S":
            s, m, n = self.spec.stack, self.spec.rows, self.spec.cols
            if self.positions == 1:
                return 2.0 * s * (m * m + n * n + m * n)
            return 2.0 * s * m * n * (self.positions + m + n)
        positions = self.positions if spec.kind in ("A", "G") else 1
        width = 1 if spec.diagonal else spec.size
        return 1.0 * positions * spec.stack * spec.size * width


@dataclass(frozen=True, kw_only=True)
class Work:
    """A model as the simulation sees it.

    ``elements`` is one example's sum of all layers' outputs: activations to keep.
    ``left_out`` are parameters in no block with statistics. ``ruled`` are blocks with
    the names of their parameter groups, if these have rules of their own.
    """

    name: str
    layers: tuple[Layer, ...]
    elements: int
    left_out: tuple[str, ...]
    ruled: tuple[tuple[str, Block], ...] = ()

    @property
    def specs(self) -> tuple[BlockSpec, ...]:
        return tuple(layer.spec for layer in self.layers)

    @property
    def parameters(self) -> int:
        return sum(layer.spec.elements for layer in self.layers)


@lru_cache(maxsize=16)
def work_of(
    name: str,
    *,
    norm: str = "skip",
    sides: str = "both",
    corrected: bool = False,
    largest_factor: int | None = None,
    shape: Shape | None = None,
    tokens: bool = False,
) -> Work:
    """The work of a lab model, or of ``package.module:function`` (with ``shape``)."""
    model, example = _on_no_device(name, shape, tokens)
    options = LayerOptions(
        norm=norm, sides=sides, corrected=corrected, largest_factor=largest_factor
    )
    return _measure(name, model, example, find_blocks(model, options))


def ruled_work(
    name: str,
    options: Options,
    rules: Mapping[str, Rule] | None,
    *,
    shape: Shape | None = None,
) -> Work:
    """The work if the groups of `natgrad.groups` have these rules, others the options'.

    ``rules`` None: if they are the groups of `natgrad.Polar`. Made by the optimizer
    itself, on no device.
    """
    model, example = _on_no_device(name, shape, tokens=False)
    chosen = replace(options, lr=options.lr or 1.0, length=Free())
    groups = None if rules is None else natgrad.groups(model, chosen.rule)
    for group in groups or ():
        # of rest, length and average nothing depends: a plan is of rules
        group.pop("average", None)
        group["rule"] = (rules or {}).get(group["name"], group["rule"])
    kind = natgrad.Polar if groups is None else SPNGD
    with kind(model, groups, options=chosen) as optimizer:
        blocks = optimizer.engine.blocks
        ruled = blocks_by_group(blocks, optimizer.param_groups)
    return replace(_measure(name, model, example, blocks), ruled=tuple(ruled))


def _on_no_device(
    name: str, shape: Shape | None, tokens: bool
) -> tuple[nn.Module, torch.Tensor]:
    """A model and one example of it, without data."""
    if ":" in name:
        make = _imported(name)
        if shape is None:
            raise UserError(
                f"{name} needs --input, one example's shape: --input 3 32 32."
            )
    else:
        make, default = _lab(name)
        shape, tokens = shape or default, tokens or name == "gpt"
    with torch.device("meta"):
        model = make()
        dtype = torch.long if tokens else torch.float32
        example = torch.zeros((1, *shape), dtype=dtype)
    if not isinstance(model, nn.Module):
        raise UserError(
            f"{name} returned {type(model).__name__}. Must be an nn.Module."
        )
    return model, example


def _lab(name: str) -> tuple[Callable[[], nn.Module], Shape]:
    settings, shape = lab_settings(name)
    return lambda: build(name, device="meta", **settings), shape


def lab_settings(name: str) -> tuple[dict[str, Any], Shape]:
    """A lab model's arguments and one example's shape, as the simulation uses it."""
    if name not in MODELS:
        legal = f"{', '.join(MODELS)}, or package.module:function"
        raise UserError(f"Unknown model {name!r}. Must be one of {legal}.")
    if name == "mlp":
        return {"in_features": 784, "num_classes": 10}, (784,)
    if name == "gpt":
        return {"context": 128, "vocabulary": 65}, (128,)
    return {}, (3, 224, 224) if name in _IMAGENET else (3, 32, 32)


def _imported(target: str) -> Callable[[], nn.Module]:
    module, _, function = target.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise UserError(f"Cannot import {target!r}: {error}.") from error


def _measure(
    name: str, model: nn.Module, example: torch.Tensor, blocks: Iterable[Block]
) -> Work:
    positions: dict[str, int] = {}
    elements = 0

    def see(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, _: Any, output: Any) -> None:
            nonlocal elements
            if not isinstance(output, torch.Tensor):
                return
            elements += output.numel()
            positions[path] = _positions(module, output)

        return hook

    handles = [
        module.register_forward_hook(see(path))
        for path, module in model.named_modules()
        if not any(True for _ in module.children())
    ]
    model(example)
    for handle in handles:
        handle.remove()
    modules = dict(model.named_modules())
    specs = [block.spec for block in blocks]
    layers = [
        Layer(
            spec=spec,
            positions=positions.get(spec.name, 0),
            convolves=_convolves(modules.get(spec.name)),
        )
        for spec in specs
    ]
    plain = tuple(spec.name for spec in specs if not spec.statistics)
    return Work(name=name, layers=tuple(layers), elements=elements, left_out=plain)


def _positions(module: nn.Module, output: torch.Tensor) -> int:
    channels = getattr(module, "out_channels", None)
    features = channels or getattr(module, "out_features", None) or output.shape[-1]
    if isinstance(module, nn.modules.batchnorm._NormBase):
        features = module.num_features
    return max(1, math.prod(output.shape[1:]) // int(features))


def _convolves(module: nn.Module | None) -> bool:
    return isinstance(module, nn.modules.conv._ConvNd)
