"""What a layer kind must say: its shape, its moments, and how its weights fold."""

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from natgrad.plan.spec import StatisticSpec, cut


@dataclass(frozen=True, kw_only=True)
class LayerOptions:
    """The options that change what a layer computes.

    Attributes:
        norm, sharing, loss: as in `natgrad.Options`.
        sides, source, corrected: which statistics the rule needs; see `natgrad.Rule`.
        plain: why layers have no statistics, if the rule is one without.
        group: tells parameters of different groups apart.
        bias: whether a layer's bias is part of its matrix.
    """

    norm: str = "unit"
    sharing: str = "expand"
    loss: str = "mean"
    sides: str = "both"
    source: str = "activations"
    corrected: bool = False
    largest_factor: int | None = None
    plain: str = ""
    group: int = 0
    bias: bool = True

    @property
    def any_matrix(self) -> bool:
        """Whether the rule can do without a layer: a parameter is enough."""
        own = self.source == "gradients" or self.sides == "none"
        return own and not self.plain


# The sides of a matrix whose factors each choice has.
SIDES = {
    "both": ("right", "left"),
    "inputs": ("right",),
    "outputs": ("left",),
    "none": (),
}
# The names of the factors of the weight's own gradient, by side.
OWN = {"right": "R", "left": "L"}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A block's gradient ``(stack, rows, cols)`` and which statistics act on it.

    ``unit`` columns stay together where a large factor is cut: a channel's kernel.
    """

    stack: int
    rows: int
    cols: int
    right: str
    left: str = ""
    right_diagonal: bool = False
    unit: int = 1

    def statistics(
        self, block: str, options: LayerOptions | None = None
    ) -> tuple[StatisticSpec, ...]:
        """The specs of the chosen statistics: right, left, and S if ``corrected``."""
        options = options or LayerOptions()
        specs = self._all(block, options.largest_factor)
        if not self.left:
            return specs
        specs = tuple(s for s in specs if s.side in SIDES[options.sides])
        if options.source == "gradients":
            return tuple(
                replace(s, kind=OWN[s.side], name=f"{block}/{OWN[s.side]}")
                for s in specs
            )
        if not options.corrected:
            return specs
        scale = StatisticSpec(
            name=f"{block}/S",
            block=block,
            kind="S",
            side="both",
            stack=self.stack,
            size=self.rows * self.cols,
            diagonal=True,
        )
        return (*specs, scale)

    def part_size(self, side: str, largest: int | None) -> int:
        """Rows of each part of the factor on one side: all, if it is not cut."""
        return self._cut(side, largest)[1]

    def _cut(self, side: str, largest: int | None) -> tuple[int, int]:
        if side == "left":
            return cut(self.rows, largest)
        return cut(self.cols, None if self.right_diagonal else largest, self.unit)

    def _all(self, block: str, largest: int | None) -> tuple[StatisticSpec, ...]:
        sides = [("right", self.right, self.cols)]
        if self.left:
            sides.append(("left", self.left, self.rows))
        specs: list[StatisticSpec] = []
        for side, kind, rows in sides:
            parts, size = self._cut(side, largest)
            spec = StatisticSpec(
                name=f"{block}/{kind}",
                block=block,
                kind=kind,
                side=side,
                stack=self.stack * parts,
                size=size,
                diagonal=side == "right" and self.right_diagonal,
                parts=parts,
                padding=parts * size - rows,
            )
            specs.append(spec)
        return tuple(specs)


@dataclass(kw_only=True)
class Observed:
    """What a forward yields: moments known already, and what backward still needs.

    Attributes:
        moments: sums by statistic kind.
        positions: how many terms the sum of ``"A"`` has.
        kept: tensors for `LayerKind.gradient_moments`. Only what autograd keeps for
            this layer anyway may go here, so that no activation lives longer.
    """

    moments: dict[str, Tensor] = field(default_factory=lambda: {})
    positions: int = 0
    kept: tuple[Tensor, ...] = ()

    def stand_for(self, scale: float) -> None:
        """Each example that was looked at counts for so many; their sum is whole."""
        if scale != 1.0:
            for moment in self.moments.values():
                moment.mul_(scale)
            self.positions = round(scale * self.positions)


class LayerKind(ABC):
    """One kind of layer. Moments are sums; scaling by counts is done elsewhere."""

    name: str
    rescaled: bool = False
    """Whether SP-NGD's weight rescaling (eq. 24) applies."""
    weight_name: str = "weight"
    bias_name: str = "bias"
    """What the module calls them; `register_layer` may say otherwise."""
    channel_dim: int = -1
    """The dim of a batched output that has the features."""

    def __init__(self, options: LayerOptions) -> None:
        self.options = options

    def weight(self, module: nn.Module) -> nn.Parameter:
        """The module's weight; of `torch.func.functional_call`, what stands for it."""
        return getattr(module, self.weight_name)

    def bias(self, module: nn.Module) -> nn.Parameter | None:
        """The bias in the module's matrix; None without one, or if it is frozen."""
        return trainable(module, self.bias_name) if self.options.bias else None

    def refuse(self, module: nn.Module) -> str:
        """Why this module can have no block; empty if it can."""
        return ""

    def examples(self, module: nn.Module, y: Tensor) -> int:
        """The size of the batch, by the layer's output; 0 if it has no dim for it."""
        return len(y) if y.dim() > 1 else 0

    @abstractmethod
    def layout(self, module: nn.Module) -> Layout:
        """The shape of the module's block."""

    def vectors(self, module: nn.Module, y: Tensor) -> int:
        """How many vectors each example gives to the factors, by the layer's output y.

        With it, part of the examples (of the first dim) may be looked at; 0: always all
        of them.
        """
        return 0

    @abstractmethod
    def observe(
        self, module: nn.Module, x: Tensor, y: Tensor, want: Collection[str]
    ) -> Observed:
        """From a layer's input x and output y, the moments that need no gradient."""

    @abstractmethod
    def gradient_moments(
        self,
        module: nn.Module,
        g: Tensor,
        kept: tuple[Tensor, ...],
        want: Collection[str],
    ) -> dict[str, Tensor]:
        """From the gradient at the output, the other wanted moments.

        ``g`` is the gradient of the loss as it is: the caller scales the result.
        """

    def scale_moment(
        self, module: nn.Module, x: Tensor, g: Tensor, right: Tensor, left: Tensor
    ) -> Tensor:
        """The moment S of ``scale="corrected"`` ``(s, m * n)``.

        The sum over examples of the squares of each one's gradient, from the layer's
        input x and the gradient g at its output, in the bases ``right`` and ``left``
        (empty: the identity).
        """
        raise NotImplementedError(
            f"Layers of kind {self.name!r} cannot have scale='corrected': their kind "
            "has no scale_moment."
        )

    def part_size(self, module: nn.Module, side: str) -> int:
        """Rows of each part of the factor on one side: all, if it is not cut.

        A kind may return a moment of whole matrices ``(s, n, n)`` or, where that would
        be too much work, of their parts: see Note [Parts of a large factor].
        """
        return self.layout(module).part_size(side, self.options.largest_factor)

    @abstractmethod
    def fold(self, module: nn.Module, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Tensors shaped like weight and bias as one stack ``(s, m, n)``."""

    @abstractmethod
    def unfold(self, module: nn.Module, stack: Tensor) -> tuple[Tensor, Tensor | None]:
        """The inverse of `fold`: views or copies shaped like weight and bias."""


class Kronecker(LayerKind):
    """A layer whose Fisher is ``G kron A``: outputs left, inputs right."""

    rescaled = True

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
        return stack[:, :, :-1].reshape(weight.shape), stack[:, :, -1].reshape(-1)


def trainable(module: nn.Module, name: str) -> nn.Parameter | None:
    """A trainable parameter, or None if it is absent or frozen."""
    found = dict(module.named_parameters(recurse=False)).get(name)
    return found if found is not None and found.requires_grad else None
