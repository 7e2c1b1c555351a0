"""Layers with a side of inputs and one of outputs: linear, convolutions, and others.

A from inputs or patches, G from output gradients (SP-NGD, eq. 9 and 11).
"""

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.layers.block import Block, LayerKind, Layout, Observed, setting
from natgrad.layers.options import LayerOptions
from natgrad.math.conv.moments import (
    ConvGeometry,
    conv_input_parts,
    conv_output_parts,
    positions,
)
from natgrad.math.examples import (
    conv_gradients,
    conv_rows,
    linear_gradients,
    rank_one_squares,
    squares_in_basis,
)
from natgrad.math.shards import first, is_shard, local, width
from natgrad.math.statistics import gram, input_moment, widen


def fold_all(blocks: Sequence[Block], tensors: Sequence[list[Tensor]]) -> list[Tensor]:
    """`Block.fold` for each. Vectors without a layer become parts of one tensor: a
    network has two for each normalisation."""
    alone = [i for i, b in enumerate(blocks) if _is_vector(b, *tensors[i])]
    if len({(tensors[i][0].dtype, tensors[i][0].device) for i in alone}) != 1:
        alone = []
    found = dict[int, Tensor]()
    if alone:
        xs = [tensors[i][0] for i in alone]
        whole = widen(torch.cat(xs)).view(1, 1, -1)
        found |= zip(alone, whole.split([len(x) for x in xs], dim=2), strict=True)
    pairs = enumerate(zip(blocks, tensors, strict=True))
    return [found[i] if i in found else b.fold(x) for i, (b, x) in pairs]


def unfold_all(blocks: Sequence[Block], stacks: Sequence[Tensor]) -> list[list[Tensor]]:
    """`Block.unfold` for each, of vectors as in `fold_all`."""
    alone = [i for i, b in enumerate(blocks) if _is_vector(b, *b.parameters)]
    if len({(stacks[i].dtype, stacks[i].device) for i in alone}) != 1:
        alone = []
    found = dict[int, Tensor]()
    if alone:
        xs = [stacks[i] for i in alone]
        whole = torch.cat(xs, dim=2).view(-1)
        found |= zip(alone, whole.split([x.numel() for x in xs]), strict=True)
    pairs = enumerate(zip(blocks, stacks, strict=True))
    return [[found[i]] if i in found else b.unfold(x) for i, (b, x) in pairs]


def _is_vector(block: Block, x: Tensor, *_: Tensor) -> bool:
    plain = block.kind is None and not block.is_foreign
    return plain and x.dim() == 1 and not (x.is_sparse or is_shard(x))


class Kronecker(LayerKind):
    """A layer whose Fisher is ``G kron A``: outputs left, inputs right.

    A kind has `input_moment` and `output_moment`, or `observe` and `gradient_moments`
    if it must see more than they are given.
    """

    rescaled = True

    def input_moment(self, module: nn.Module, x: Tensor) -> tuple[Tensor, int]:
        """The sum that A is the mean of, from a layer's input, and its terms."""
        raise NotImplementedError

    def output_moment(self, module: nn.Module, g: Tensor) -> Tensor:
        """The sum that G is the mean of, from the gradient at a layer's output."""
        raise NotImplementedError

    def observe(
        self, module: nn.Module, x: Tensor, y: Tensor, want: Collection[str]
    ) -> Observed:
        if "A" not in want:
            return Observed()
        moment, positions = self.input_moment(module, x)
        return Observed(moments={"A": moment}, positions=positions)

    def gradient_moments(
        self,
        module: nn.Module,
        g: Tensor,
        kept: tuple[Tensor, ...],
        want: Collection[str],
    ) -> dict[str, Tensor]:
        return {"G": self.output_moment(module, g)} if "G" in want else {}

    def fold(self, module: nn.Module, weight: Tensor, bias: Tensor | None) -> Tensor:
        layout = self.layout(module)
        stack = weight.reshape(layout.stack, layout.rows, -1)
        if bias is None:
            return stack
        return torch.cat((stack, bias.reshape(layout.stack, layout.rows, 1)), dim=2)

    def unfold(self, module: nn.Module, stack: Tensor) -> tuple[Tensor, Tensor | None]:
        weight = self.weight(module)
        # not by whether there is a bias now: it may have been frozen since
        if stack.numel() == weight.numel():
            return stack.reshape(weight.shape), None
        bias: Tensor = getattr(module, self.bias_name)
        return stack[:, :, :-1].reshape(weight.shape), stack[:, :, -1].reshape(
            bias.shape
        )


class Linear(Kronecker):
    """``y = x W^T + b`` on the last dim, with any leading dims.

    Positions between the batch and the features share the weight. ``"expand"`` counts
    each as a term of A and of G; ``"reduce"`` first averages the inputs and sums the
    gradients over an example's positions. A weight that is several ``matrices`` has
    one A, of the inputs that all of them have, and a G for each.
    """

    name = "linear"
    matrices = 1

    def layout(self, module: nn.Module) -> Layout:
        weight = self.weight(module)
        whole = self.options.gather_inputs or self.options.source == "gradients"
        (rows, cols), apart = weight.shape, 0 if whole else width(weight, 1)
        return self._layout(module, rows, cols, apart)

    def _layout(
        self, module: nn.Module, rows: int, cols: int, apart: int = 0
    ) -> Layout:
        stack = self.options.matrices or self.matrices
        return Layout(
            stack=stack,
            rows=divided(rows, stack),
            cols=cols + (self.bias(module) is not None),
            right="A",
            left="G",
            shared=True,
            apart=apart,
        )

    def vectors(self, module: nn.Module, y: Tensor) -> int:
        if y.dim() < 2:
            return 0  # one example, without a dim for it
        return 1 if self.options.sharing == "reduce" else math.prod(y.shape[1:-1])

    def input_moment(self, module: nn.Module, x: Tensor) -> tuple[Tensor, int]:
        rows = self._rows(local(x), mean=True)
        if is_shard(x):
            return self._own_part(module, rows, first(x, -1)), len(rows)
        bias, size = self.bias(module) is not None, self.part_size(module, "right")
        return input_moment(rows, bias=bias, size=size), len(rows)

    def _own_part(self, module: nn.Module, rows: Tensor, start: int) -> Tensor:
        """A of the features that this rank has; the rank of the last has the bias."""
        layout = self.layout(module)
        parts, size = layout.cut("right", None)
        rows, features = widen(rows), layout.cols - (self.bias(module) is not None)
        if features < layout.cols and start + rows.shape[1] == features:
            rows = torch.cat((rows, torch.ones_like(rows[:, :1])), 1)
        moment = rows.new_zeros(parts, size, size)
        for part in rows.split(size, 1):
            at = start // size
            moment[at, : part.shape[1], : part.shape[1]] = gram(part)[0]
            start += size
        return moment

    def output_moment(self, module: nn.Module, g: Tensor) -> Tensor:
        rows, size = self._rows(g, mean=False), self.part_size(module, "left")
        each = rows.chunk(self.layout(module).stack, 1)
        return joined([gram(part, size) for part in each])

    def scale_moment(
        self, module: nn.Module, x: Tensor, g: Tensor, right: Tensor, left: Tensor
    ) -> Tensor:
        x, g = widen(x), widen(g)
        if self.bias(module) is not None:
            x = torch.cat((x, torch.ones_like(x[..., :1])), -1)
        each = g.chunk(stack := self.layout(module).stack, -1)
        bases = left.chunk(stack) if left.numel() else (left,) * stack
        pairs = zip(each, bases, strict=True)
        return joined([self._squares(x, part, right, q) for part, q in pairs])

    def _squares(self, x: Tensor, g: Tensor, right: Tensor, left: Tensor) -> Tensor:
        if x.dim() == 2 or self.options.loss == "tokens":
            rows = x.flatten(0, -2)[None, None], g.flatten(0, -2)[None, None]
            return rank_one_squares([rows], right, left)
        gradients = linear_gradients(x.flatten(1, -2), g.flatten(1, -2))
        return squares_in_basis(gradients, right, left)

    def _rows(self, x: Tensor, *, mean: bool) -> Tensor:
        if self.options.sharing == "reduce" and x.dim() > 2:
            dims = tuple(range(1, x.dim() - 1))
            x = widen(x)
            x = x.mean(dims) if mean else x.sum(dims)
        return x.reshape(-1, x.shape[-1])


class InProjection(Linear):
    """The weight of `nn.MultiheadAttention` that makes Q, K and V of the inputs.

    They share one A. Where queries and keys are of different inputs, it is that of all
    of them together. See Note [Projections of attention].
    """

    name = "in_projection"
    matrices = 3


class TransposedLinear(Linear):
    """A linear layer that keeps its weight as (inputs, outputs), as GPT-2's does."""

    name = "transposed_linear"

    def layout(self, module: nn.Module) -> Layout:
        cols, rows = self.weight(module).shape
        return self._layout(module, rows, cols)

    def fold(self, module: nn.Module, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super().fold(module, weight.T, bias)

    def unfold(self, module: nn.Module, stack: Tensor) -> tuple[Tensor, Tensor | None]:
        whole = stack.flatten(0, 1)
        if self.bias(module) is None:
            return whole.T, None
        return whole[:, :-1].T, whole[:, -1]


class Conv(Kronecker):
    """Conv1d, Conv2d and Conv3d; each group of channels is one member of the stack."""

    name = "conv"
    channel_dim = 1

    def examples(self, module: nn.Module, y: Tensor) -> int:
        return len(y) if y.dim() == self.weight(module).dim() else 0

    def layout(self, module: nn.Module) -> Layout:
        weight: Any = self.weight(module)
        groups = setting(module, "groups")
        bias = self.bias(module) is not None
        return Layout(
            stack=groups,
            rows=weight.shape[0] // groups,
            cols=math.prod(weight.shape[1:]) + bias,
            right="A",
            left="G",
            unit=math.prod(setting(module, "kernel_size")),
        )

    def vectors(self, module: nn.Module, y: Tensor) -> int:
        return math.prod(y.shape[2:]) if self.examples(module, y) else 0

    def input_moment(self, module: nn.Module, x: Tensor) -> tuple[Tensor, int]:
        geometry = geometry_of(module, bias=self.bias(module) is not None)
        x, size = batched(x, len(geometry.kernel)), self.part_size(module, "right")
        return conv_input_parts(x, geometry, size), positions(x.shape, geometry)

    def output_moment(self, module: nn.Module, g: Tensor) -> Tensor:
        g = batched(g, self.weight(module).dim() - 2)
        size = self.part_size(module, "left")
        return conv_output_parts(g, setting(module, "groups"), size)

    def scale_moment(
        self, module: nn.Module, x: Tensor, g: Tensor, right: Tensor, left: Tensor
    ) -> Tensor:
        geometry = geometry_of(module, bias=self.bias(module) is not None)
        x, g = (batched(t, len(geometry.kernel)) for t in (x, g))
        if self.options.loss == "tokens":
            return rank_one_squares(conv_rows(x, g, geometry), right, left)
        return squares_in_basis(conv_gradients(x, g, geometry), right, left)


def divided(rows: int, matrices: int) -> int:
    """The rows of each of so many equal matrices."""
    if rows % matrices:
        raise ValueError(
            f"Invalid matrices={matrices} of a weight of {rows} rows. Must divide them."
        )
    return rows // matrices


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Stacks one after another."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def geometry_of(module: nn.Module, *, bias: bool) -> ConvGeometry:
    """What a convolution reads where, from its module."""
    kernel: tuple[int, ...] = setting(module, "kernel_size")
    dilation: tuple[int, ...] = setting(module, "dilation")
    return ConvGeometry(
        kernel=kernel,
        stride=setting(module, "stride"),
        padding=_padding(setting(module, "padding"), kernel, dilation),
        dilation=dilation,
        groups=setting(module, "groups"),
        padding_mode=setting(module, "padding_mode"),
        bias=bias,
    )


def _padding(
    padding: str | tuple[int, ...], kernel: tuple[int, ...], dilation: tuple[int, ...]
) -> tuple[tuple[int, int], ...]:
    """(before, after) for each dim; as in torch, "same" puts the odd one after."""
    if padding == "valid":
        return ((0, 0),) * len(kernel)
    if padding == "same":
        reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        return tuple((r // 2, r - r // 2) for r in reach)
    return tuple((int(p), int(p)) for p in padding)


def batched(x: Tensor, spatial_dims: int) -> Tensor:
    """With a first dim for the batch, if it has none."""
    return x.unsqueeze(0) if x.dim() == spatial_dims + 1 else x


class Matrix(LayerKind):
    """A parameter of two or more dims, known by its own gradient alone.

    Two dims are one matrix. Of three dims the first counts matrices, as the experts of
    ``[E, out, in]``. Of more, the first is the outputs, as a convolution's.
    """

    name = "matrix"
    rescaled = True
    matrices = 1

    def __init__(self, options: LayerOptions, shape: tuple[int, ...]) -> None:
        super().__init__(options)
        self._shape = shape

    @staticmethod
    def fits(p: Tensor) -> bool:
        """Whether a parameter has at least two dims that are no ones."""
        return p.dim() >= 2 and sum(size > 1 for size in p.shape) >= 2

    def layout(self, module: nn.Module) -> Layout:
        """From the parameter's shape."""
        shape = self._shape
        stack, rows = shape[:2] if len(shape) == 3 else (1, shape[0])
        parts = self.options.matrices or self.matrices
        stack, rows = stack * parts, divided(rows, parts)
        cols = math.prod(shape) // (stack * rows)
        return Layout(stack=stack, rows=rows, cols=cols, right="A", left="G")

    def observe(
        self, module: nn.Module, x: Tensor, y: Tensor, want: Collection[str]
    ) -> Observed:
        """Nothing: no layer is known."""
        return Observed()

    def gradient_moments(
        self,
        module: nn.Module,
        g: Tensor,
        kept: tuple[Tensor, ...],
        want: Collection[str],
    ) -> dict[str, Tensor]:
        """Nothing: no layer is known."""
        return {}

    def fold(self, module: nn.Module, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The parameter as ``(s, m, n)``."""
        layout = self.layout(module)
        return weight.reshape(layout.stack, layout.rows, layout.cols)

    def unfold(self, module: nn.Module, stack: Tensor) -> tuple[Tensor, Tensor | None]:
        """The inverse of `fold`."""
        return stack.reshape(self._shape), None
