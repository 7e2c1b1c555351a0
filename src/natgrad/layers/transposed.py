"""Transposed convolutions: convolutions with inputs and output gradients exchanged.

An input position gives a vector to every output that its kernel covers, and outputs add
up what they are given. So the matrix maps an input's channels to all of these, and the
gradient at them is a patch of that at the output. The bias is added to outputs, not to
what an input gives: it is no part of the matrix.
"""

import math

from torch import Tensor, nn

from natgrad.layers.block import Layout, setting
from natgrad.layers.matrices import Conv, batched, geometry_of
from natgrad.math.conv.moments import conv_input_parts, conv_output_parts
from natgrad.math.examples import (
    conv_gradients,
    conv_rows,
    rank_one_squares,
    squares_in_basis,
)


class ConvTranspose(Conv):
    """ConvTranspose1d, 2d and 3d: rows are outputs times taps, columns inputs."""

    name = "conv_transpose"
    has_bias = False

    def refuse(self, module: nn.Module) -> str:
        pairs = zip(
            setting(module, "output_padding"), setting(module, "stride"), strict=True
        )
        if any(padding >= stride for padding, stride in pairs):
            return "its output_padding is not below its stride"
        return ""

    def layout(self, module: nn.Module) -> Layout:
        inputs, *outputs = self.weight(module).shape
        groups = setting(module, "groups")
        return Layout(
            stack=groups,
            rows=math.prod(outputs),
            cols=inputs // groups,
            right="A",
            left="G",
        )

    def features(self, module: nn.Module) -> int:
        return setting(module, "out_channels")

    def vectors(self, module: nn.Module, y: Tensor) -> int:
        return max(
            1, super().vectors(module, y) // math.prod(setting(module, "stride"))
        )

    def input_moment(self, module: nn.Module, x: Tensor) -> tuple[Tensor, int]:
        x = batched(x, self.weight(module).dim() - 2)
        size = self.part_size(module, "right")
        moment = conv_output_parts(x, setting(module, "groups"), size)
        return moment, x.numel() // x.shape[1]

    def output_moment(self, module: nn.Module, g: Tensor) -> Tensor:
        geometry, size = geometry_of(module, bias=False), self.part_size(module, "left")
        return conv_input_parts(batched(g, len(geometry.kernel)), geometry, size)

    def scale_moment(
        self, module: nn.Module, x: Tensor, g: Tensor, right: Tensor, left: Tensor
    ) -> Tensor:
        geometry = geometry_of(module, bias=False)
        x, g = (batched(t, len(geometry.kernel)) for t in (x, g))
        if self.options.loss == "tokens":
            pairs = ((b, a) for a, b in conv_rows(g, x, geometry))
            return rank_one_squares(pairs, right, left)
        each = (v.mT for v in conv_gradients(g, x, geometry))
        return squares_in_basis(each, right, left)

    def fold(self, module: nn.Module, weight: Tensor, bias: Tensor | None) -> Tensor:
        layout = self.layout(module)
        return weight.reshape(layout.stack, layout.cols, layout.rows).mT

    def unfold(self, module: nn.Module, stack: Tensor) -> tuple[Tensor, Tensor | None]:
        return stack.mT.reshape(self.weight(module).shape), None
