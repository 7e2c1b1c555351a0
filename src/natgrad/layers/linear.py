"""Linear layers: A from inputs, G from output gradients (SP-NGD, eq. 9)."""

import math
from collections.abc import Collection

import torch
from torch import Tensor, nn

from natgrad.layers.kind import Kronecker, Layout, Observed
from natgrad.math.examples import linear_gradients, rank_one_squares, squares_in_basis
from natgrad.math.statistics import gram, input_moment, widen


class Linear(Kronecker):
    """``y = x W^T + b`` on the last dim, with any leading dims.

    Positions between the batch and the features share the weight. ``"expand"`` counts
    each as a term of A and of G; ``"reduce"`` first averages the inputs and sums the
    gradients over an example's positions.
    """

    name = "linear"

    def layout(self, module: nn.Module) -> Layout:
        rows, cols = self.weight(module).shape
        bias = self.bias(module) is not None
        return Layout(stack=1, rows=rows, cols=cols + bias, right="A", left="G")

    def vectors(self, module: nn.Module, y: Tensor) -> int:
        if y.dim() < 2:
            return 0  # one example, without a dim for it
        return 1 if self.options.sharing == "reduce" else math.prod(y.shape[1:-1])

    def observe(
        self, module: nn.Module, x: Tensor, y: Tensor, want: Collection[str]
    ) -> Observed:
        if "A" not in want:
            return Observed()
        rows = self._rows(x, mean=True)
        bias = self.bias(module) is not None
        size = self.part_size(module, "right")
        return Observed(
            moments={"A": input_moment(rows, bias=bias, size=size)}, positions=len(rows)
        )

    def gradient_moments(
        self,
        module: nn.Module,
        g: Tensor,
        kept: tuple[Tensor, ...],
        want: Collection[str],
    ) -> dict[str, Tensor]:
        if "G" not in want:
            return {}
        return {"G": gram(self._rows(g, mean=False), self.part_size(module, "left"))}

    def scale_moment(
        self, module: nn.Module, x: Tensor, g: Tensor, right: Tensor, left: Tensor
    ) -> Tensor:
        x, g = widen(x), widen(g)
        if self.bias(module) is not None:
            x = torch.cat((x, torch.ones_like(x[..., :1])), -1)
        if x.dim() == 2 or self.options.loss == "tokens":
            rows = x.flatten(0, -2)[None, None], g.flatten(0, -2)[None, None]
            return rank_one_squares([rows], right, left)
        gradients = linear_gradients(x.flatten(1, -2), g.flatten(1, -2))
        return squares_in_basis(gradients, right, left)

    def _rows(self, x: Tensor, *, mean: bool) -> Tensor:
        if self.options.sharing == "reduce" and x.dim() > 2:
            dims = tuple(range(1, x.dim() - 1))
            x = x.mean(dims) if mean else x.sum(dims)
        return x.reshape(-1, x.shape[-1])


class TransposedLinear(Linear):
    """A linear layer that keeps its weight as (inputs, outputs), as GPT-2's does."""

    name = "transposed_linear"

    def layout(self, module: nn.Module) -> Layout:
        cols, rows = self.weight(module).shape
        bias = self.bias(module) is not None
        return Layout(stack=1, rows=rows, cols=cols + bias, right="A", left="G")

    def fold(self, module: nn.Module, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super().fold(module, weight.T, bias)

    def unfold(self, module: nn.Module, stack: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.bias(module) is None:
            return stack[0].T, None
        return stack[0, :, :-1].T, stack[0, :, -1]
