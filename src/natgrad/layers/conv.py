"""Convolutions: A from patches, G from output gradients (SP-NGD, eq. 11)."""

import math
from collections.abc import Collection
from typing import Any

from torch import Tensor, nn

from natgrad.layers.kind import Kronecker, Layout, Observed
from natgrad.math.conv.moments import (
    ConvGeometry,
    conv_input_parts,
    conv_output_parts,
    positions,
)
from natgrad.math.examples import (
    conv_gradients,
    conv_rows,
    rank_one_squares,
    squares_in_basis,
)


class Conv(Kronecker):
    """Conv1d, Conv2d and Conv3d; each group of channels is one member of the stack."""

    name = "conv"
    channel_dim = 1

    def examples(self, module: nn.Module, y: Tensor) -> int:
        return len(y) if y.dim() == self.weight(module).dim() else 0

    def layout(self, module: nn.Module) -> Layout:
        weight: Any = self.weight(module)
        groups = _setting(module, "groups")
        bias = self.bias(module) is not None
        return Layout(
            stack=groups,
            rows=weight.shape[0] // groups,
            cols=math.prod(weight.shape[1:]) + bias,
            right="A",
            left="G",
            unit=math.prod(_setting(module, "kernel_size")),
        )

    def vectors(self, module: nn.Module, y: Tensor) -> int:
        return math.prod(y.shape[2:]) if self.examples(module, y) else 0

    def observe(
        self, module: nn.Module, x: Tensor, y: Tensor, want: Collection[str]
    ) -> Observed:
        if "A" not in want:
            return Observed()
        geometry = geometry_of(module, bias=self.bias(module) is not None)
        x = _batched(x, len(geometry.kernel))
        size = self.part_size(module, "right")
        return Observed(
            moments={"A": conv_input_parts(x, geometry, size)},
            positions=positions(x.shape, geometry),
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
        g = _batched(g, self.weight(module).dim() - 2)
        size = self.part_size(module, "left")
        return {"G": conv_output_parts(g, _setting(module, "groups"), size)}

    def scale_moment(
        self, module: nn.Module, x: Tensor, g: Tensor, right: Tensor, left: Tensor
    ) -> Tensor:
        geometry = geometry_of(module, bias=self.bias(module) is not None)
        x, g = (_batched(t, len(geometry.kernel)) for t in (x, g))
        if self.options.loss == "tokens":
            return rank_one_squares(conv_rows(x, g, geometry), right, left)
        return squares_in_basis(conv_gradients(x, g, geometry), right, left)


def geometry_of(module: nn.Module, *, bias: bool) -> ConvGeometry:
    """What a convolution reads where, from its module."""
    kernel: tuple[int, ...] = _setting(module, "kernel_size")
    dilation: tuple[int, ...] = _setting(module, "dilation")
    return ConvGeometry(
        kernel=kernel,
        stride=_setting(module, "stride"),
        padding=_padding(_setting(module, "padding"), kernel, dilation),
        dilation=dilation,
        groups=_setting(module, "groups"),
        padding_mode=_setting(module, "padding_mode"),
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


def _batched(x: Tensor, spatial_dims: int) -> Tensor:
    return x.unsqueeze(0) if x.dim() == spatial_dims + 1 else x


def _setting(module: nn.Module, name: str) -> Any:
    return getattr(module, name)
