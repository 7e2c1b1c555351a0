"""A block, which is one layer or several that share a weight, and `LayerKind`."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.layers.options import LayerOptions
from natgrad.math.parts import cut as parts_of
from natgrad.math.parts import diagonal_parts
from natgrad.math.shards import local, width
from natgrad.math.statistics import Rows, enough_stride, every_kth, widen
from natgrad.plan.spec import BlockSpec
from natgrad.rules.fallbacks import Plain
from natgrad.rules.rule import Rule

NO_MODULE = nn.Identity()
"""Of a matrix that no layer uses."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A block's gradient ``(stack, rows, cols)`` and which statistics act on it.

    ``unit`` columns stay together where a large factor is cut: a channel's kernel.
    ``shared``: all matrices of the stack have the same inputs, and so one factor.
    ``counted``: each has inputs of its own, of which a batch may have none. ``apart``
    columns, if any, are what each rank has of the inputs: the factor is cut so.
    """

    stack: int
    rows: int
    cols: int
    right: str
    left: str = ""
    right_diagonal: bool = False
    unit: int = 1
    shared: bool = False
    counted: bool = False
    apart: int = 0

    def cut(self, side: str, largest: int | None) -> tuple[int, int]:
        """How many parts the factor on one side is cut into, and the rows of each."""
        if side == "right" and self.apart:
            return parts_of(self.cols, self.apart, self.apart)
        if side == "left":
            return parts_of(self.rows, largest)
        return parts_of(self.cols, None if self.right_diagonal else largest, self.unit)


@dataclass(kw_only=True)
class Observed:
    """What a forward yields: moments known already, and what backward still needs.

    Attributes:
        moments: sums by statistic kind.
        positions: how many terms the sum of ``"A"`` has.
        kept: tensors for `LayerKind.gradient_moments`. Only what autograd keeps for
            this layer anyway may go here, so that no activation lives longer.
        members: of a layout that is ``counted``, how many inputs each matrix had.
    """

    moments: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    positions: int = 0
    kept: tuple[Tensor, ...] = ()
    members: Tensor | None = None

    def stand_for(self, scale: float) -> None:
        """Scale the sums of some of the examples to those of all."""
        if scale != 1.0:
            for moment in self.moments.values():
                moment.mul_(scale)
            self.positions = round(scale * self.positions)


class LayerKind(ABC):
    """One kind of layer. Moments are sums; scaling by counts is done elsewhere."""

    name: str
    rescaled: bool = False
    """Whether SP-NGD's weight rescaling (eq. 24) applies."""
    is_norm: bool = False
    """Whether the norm damping ratio applies."""
    matrices: int = 0
    """How many matrices its weight is unless a group says so; 0: that is fixed."""
    has_bias: bool = True
    """Whether a bias can be part of the matrix."""
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

    def features(self, module: nn.Module) -> int:
        """How many numbers the layer puts out at each position."""
        layout = self.layout(module)
        return layout.stack * layout.rows

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

    def observe_call(
        self,
        module: nn.Module,
        given: tuple[Tensor, ...],
        y: Tensor,
        want: Collection[str],
    ) -> Observed:
        """As `observe`, with all tensors that the layer was called with."""
        return self.observe(module, given[0], y, want)

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
        """The moment S of a rule that corrects (`natgrad.EKFAC`), ``(s, m * n)``.

        The sum over examples of the squares of each one's gradient, from the layer's
        input x and the gradient g at its output, in the bases ``right`` and ``left``
        (empty: the identity).
        """
        raise NotImplementedError(
            f"Layers of kind {self.name!r} cannot have rule=EKFAC(): their kind "
            "has no scale_moment."
        )

    def part_size(self, module: nn.Module, side: str) -> int:
        """Rows of each part of the factor on one side: all, if it is not cut.

        A kind may return a moment of whole matrices ``(s, n, n)`` or, where that would
        be too much work, of their parts: see Note [Parts of a large factor].
        """
        return self.layout(module).cut(side, self.options.largest_factor)[1]

    @abstractmethod
    def fold(self, module: nn.Module, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Tensors shaped like weight and bias as one stack ``(s, m, n)``."""

    @abstractmethod
    def unfold(self, module: nn.Module, stack: Tensor) -> tuple[Tensor, Tensor | None]:
        """The inverse of `fold`: views or copies shaped like weight and bias."""


def setting(module: nn.Module, name: str) -> Any:
    """An option that a layer was made with."""
    return getattr(module, name)


def trainable(module: nn.Module, name: str) -> nn.Parameter | None:
    """A trainable parameter, or None if it is absent or frozen."""
    # asked in each step: no generator
    found = module._parameters.get(name)  # pyright: ignore[reportPrivateUsage]
    return found if found is not None and found.requires_grad else None


@dataclass(kw_only=True)
class Block:
    """Every trainable parameter belongs to exactly one block.

    Attributes:
        spec: name and shapes, as the plan sees them.
        kind: None for a parameter that keeps its plain gradient.
        modules: the layers that use the weight; several when it is tied.
        parameters: the weight and, if there is one, the bias; or the plain parameter.
        reason: why there is no kind; empty if there is one.
        note: what a user should know of this block, for the report.
        is_foreign: whether another optimizer has it, so that no rule may change it.
        is_table: whether an input chooses a column of the weight (an embedding).
        is_factored: whether it is a matrix with a side of inputs and one of outputs.
        is_parallel: whether ranks may have parts of what it takes and gives.
        is_asked: whether its group asks for a rule without factors: it is no fallback.
        rule: what turns its gradient into an update.
    """

    spec: BlockSpec
    kind: LayerKind | None
    modules: list[nn.Module] = field(default_factory=list[nn.Module])
    parameters: tuple[nn.Parameter, ...]
    reason: str = ""
    note: str = ""
    is_foreign: bool = False
    is_table: bool = False
    is_factored: bool = False
    is_parallel: bool = False
    is_asked: bool = False
    rule: Rule = field(default_factory=Plain)

    @cached_property
    def name(self) -> str:
        """The layer's name in the model; a plain parameter's own name."""
        return self.spec.name

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(s, m, n)`` of its gradient, as its workers have it."""
        if self.is_cut:
            return 1, 1, local(self.parameters[0]).numel()
        return self.spec.stack, self.spec.rows, self.spec.cols

    @property
    def is_norm(self) -> bool:
        """Whether the norm damping ratio applies."""
        return self.kind is not None and self.kind.is_norm

    @property
    def is_trained(self) -> bool:
        """Whether the weight still takes gradients."""
        return self.parameters[0].requires_grad

    @property
    def has_gradient(self) -> bool:
        """Whether the block takes part in this step."""
        return self.is_trained and self.parameters[0].grad is not None

    @property
    def is_cut(self) -> bool:
        """Whether each rank works on its own piece of a sharded parameter."""
        return self.kind is None and bool(self.spec.cuts)

    def require_same(self) -> None:
        """Raise if the layer has other parameters since."""
        if self.kind is None or not self.modules:
            return
        found = self.modules[0]._parameters  # pyright: ignore[reportPrivateUsage]
        if found.get(self.kind.weight_name) is not self.parameters[0]:
            raise RuntimeError(
                f"The {self.kind.weight_name} of {self.name} is another tensor than "
                "when the optimizer was made: fully_shard, a parametrization or an "
                "assignment has replaced it. Must be done first: make the optimizer "
                "after it."
            )
        self.require_bias()

    @property
    def _module(self) -> nn.Module:
        """Whose weight it is; any module for a matrix that no layer uses."""
        return self.modules[0] if self.modules else NO_MODULE

    @property
    def bias_has_changed(self) -> bool:
        """Whether the bias was frozen or unfrozen since, and the weight trains."""
        if self.kind is None or not self.modules or not self.is_trained:
            return False
        trains = self.kind.bias(self.modules[0]) is not None
        return trains != (len(self.parameters) > 1)

    def require_bias(self) -> None:
        """Raise if `bias_has_changed`."""
        if self.bias_has_changed:
            raise RuntimeError(
                f"The bias of {self.name} was frozen or unfrozen after its layer was "
                "registered. Must be done before KFAC or SPNGD is made."
            )

    def gradient(self) -> Tensor | None:
        """The gradient as ``(s, m, n)`` in float32 or better; None if there is none."""
        if not self.has_gradient:
            return None
        return self.fold([_or_zeros(p) for p in self.parameters])

    def fold(self, tensors: list[Tensor]) -> Tensor:
        """Tensors shaped like the parameters as one stack ``(s, m, n)``."""
        tensors = [widen(x.to_dense() if x.is_sparse else x) for x in tensors]
        if self.kind is None:
            return tensors[0].reshape(1, 1, -1)
        return self.kind.fold(self._module, tensors[0], *(tensors[1:] or [None]))

    def unfold(self, stack: Tensor) -> list[Tensor]:
        """The inverse of `fold`."""
        if self.kind is None:
            return [stack.reshape(local(self.parameters[0]).shape)]
        weight, bias = self.kind.unfold(self._module, stack)
        return [weight] if bias is None else [weight, bias]

    def in_parts(self, kind: str, moment: Tensor) -> Tensor:
        """A moment as its statistic is kept, also if the layer's kind has it whole."""
        spec = next(s for s in self.spec.statistics if s.kind == kind)
        if spec.parts == 1 or len(moment) == spec.stack:
            return moment
        return diagonal_parts(moment, spec.parts, spec.size)

    def write_gradient(self, stack: Tensor, scale: Tensor | None = None) -> None:
        """Put ``(s, m, n)``, times ``scale``, into the parameters' ``.grad``."""
        self.put_gradients(self.unfold(stack), scale)

    def is_apart(self, module: nn.Module, x: Tensor) -> bool:
        """Whether this rank makes the factor of the features that it has of x."""
        assert self.kind is not None
        kept = self.kind.layout(module).apart
        return kept > 0 and width(x, -1) == kept

    def some_rows(
        self,
        module: nn.Module,
        x: Tensor,
        output: Tensor,
        subsample: int | None,
        world: int,
        seed: str,
    ) -> tuple[Rows, float]:
        """Every k-th example from a random start; ``world`` ranks see other ones."""
        assert self.kind is not None
        alike = x.dim() > 0 and output.dim() > 0 and len(x) == len(output) > 0
        vectors = self.kind.vectors(module, output) if alike else 0
        if not vectors:
            return ..., 1.0
        all_, largest = len(x) * world, self.spec.largest
        stride = subsample or enough_stride(largest, all_, vectors)
        return every_kth(len(x), stride, seed)

    def put_gradients(
        self, tensors: Sequence[Tensor], scale: Tensor | None = None
    ) -> None:
        """Put tensors, times ``scale``, into what this rank has of each ``.grad``."""
        for p, x in zip(self.parameters, tensors, strict=True):
            if p.grad is None or p.grad.is_sparse:
                p.grad = torch.empty_like(p)
            grad = local(p.grad)
            if scale is None or grad.dtype != x.dtype:
                grad.copy_(x if scale is None else x * scale)
            else:
                torch.mul(x, scale, out=grad)

    def local_gradients(self) -> list[Tensor] | None:
        """What this rank has of the gradients, in float32 or better; None of none."""
        if not self.has_gradient:
            return None
        return [widen(local(_or_zeros(p))) for p in self.parameters]


def _or_zeros(p: nn.Parameter) -> Tensor:
    return torch.zeros_like(p) if p.grad is None else p.grad


def statistics_like(blocks: list[Block]) -> Tensor:
    """An empty tensor of the dtype and device that statistics are kept in."""
    first = local(blocks[0].parameters[0])
    wide = any(p.dtype == torch.float64 for b in blocks for p in b.parameters)
    return first.new_empty(0, dtype=torch.float64 if wide else torch.float32).detach()
