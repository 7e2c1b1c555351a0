"""Layers as the references see them: a matrix, its inputs, its output gradients.

Letters: N examples, T positions (1 in a linear layer), n inputs, the bias being one
more that is always 1, m outputs.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Watched:
    """A linear or convolution layer as one matrix ``(m, n)``.

    Attributes:
        a: ``(N T, n)``: what the weight multiplied in the last forward.
        g: ``(N T, m)``: N times the gradients at its outputs in the last backward: each
            example's own, as the loss is a mean over N.
    """

    def __init__(self, layer: nn.Module, *, bias: bool = True) -> None:
        self.layer: Any = layer
        self.has_bias = bias and layer.bias is not None
        self.a = self.g = torch.empty(0)
        layer.register_forward_hook(self._forward)

    def _forward(self, _: nn.Module, args: tuple[Tensor], y: Tensor) -> None:
        x, layer = args[0].detach(), self.layer
        self.examples = len(x)
        if isinstance(layer, nn.Conv2d):
            size: Any = layer.kernel_size
            columns = F.unfold(
                x, size, stride=layer.stride, padding=tuple(map(int, layer.padding))
            )
            x = columns.mT.flatten(0, 1)
        ones = x.new_ones(len(x), int(self.has_bias))
        self.a = torch.cat([x, ones], 1)
        y.register_hook(self._backward)

    def _backward(self, g: Tensor) -> None:
        self.g = self.examples * g.movedim(1, -1).flatten(0, -2)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The weight, and the bias if it is part of the matrix."""
        return list(self.layer.parameters())[: 1 + self.has_bias]

    def matrix(self) -> Tensor:
        """The weight ``(m, n)``, with the bias as its last column."""
        return torch.cat([p.detach().reshape(len(p), -1) for p in self.parameters], 1)

    def gradient(self) -> Tensor:
        """Its gradient, likewise."""
        grads = [p.grad for p in self.parameters]
        return torch.cat([g.reshape(len(g), -1) for g in grads if g is not None], 1)

    def parts(self, matrix: Tensor) -> list[tuple[nn.Parameter, Tensor]]:
        """Each parameter with its part of a matrix ``(m, n)``."""
        sizes = [p[0].numel() for p in self.parameters]
        columns = matrix.split(sizes, 1)
        return [
            (p, x.reshape(p.shape))
            for p, x in zip(self.parameters, columns, strict=True)
        ]


def watch(
    model: nn.Module, *, biases: bool = True
) -> tuple[dict[str, Watched], dict[str, nn.Parameter]]:
    """Linear and convolution layers of a model by name, and all other parameters."""
    kinds = nn.Linear, nn.Conv2d
    layers = {
        n: Watched(x, bias=biases)
        for n, x in model.named_modules()
        if isinstance(x, kinds)
    }
    known = {id(p) for layer in layers.values() for p in layer.parameters}
    rest = {n: p for n, p in model.named_parameters() if id(p) not in known}
    return layers, rest
