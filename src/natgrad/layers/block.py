"""A block: one layer (or several that share a weight) and its part of the Fisher."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from natgrad.layers.kind import LayerKind, LayerOptions, trainable
from natgrad.layers.matrix import Matrix
from natgrad.layers.reasons import MHA, why_plain
from natgrad.layers.table import is_norm, kind_of
from natgrad.math.parts import diagonal_parts
from natgrad.math.shards import local
from natgrad.math.statistics import widen
from natgrad.plan.spec import BlockSpec
from natgrad.rules.fallbacks import Plain
from natgrad.rules.rule import Rule

_NO_MODULE = nn.Identity()
FOREIGN = "not the optimizer's"


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
        is_asked: whether its group asks for a rule without factors: it is no fallback.
        rule: what turns its gradient into an update.
    """

    spec: BlockSpec
    kind: LayerKind | None
    modules: list[nn.Module] = field(default_factory=lambda: [])
    parameters: tuple[nn.Parameter, ...]
    reason: str = ""
    note: str = ""
    is_foreign: bool = False
    is_table: bool = False
    is_factored: bool = False
    is_asked: bool = False
    rule: Rule = field(default_factory=Plain)

    @property
    def name(self) -> str:
        """The layer's name in the model; a plain parameter's own name."""
        return self.spec.name

    @property
    def is_norm(self) -> bool:
        """Whether the norm damping ratio applies."""
        return is_norm(self.kind)

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
        found = dict(self.modules[0].named_parameters(recurse=False))
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
        return self.modules[0] if self.modules else _NO_MODULE

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
        bias = tensors[1] if len(tensors) > 1 else None
        return self.kind.fold(self._module, tensors[0], bias)

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


def find_blocks(
    model: nn.Module,
    options: LayerOptions | Mapping[int, LayerOptions] | None = None,
    *,
    skip: Collection[str] = (),
) -> list[Block]:
    """All trainable parameters of a model as blocks, in the order of its modules.

    Layers of a known kind come with statistics; every other parameter is a plain block
    that says why. Nothing is computed, so the model may be on the meta device.
    ``options`` are by the ids of the parameters that the optimizer has, or the same
    for all. A bias with others than its weight's is no part of the layer's matrix.
    """
    known = options if isinstance(options, Mapping) else _all_alike(model, options)
    _require_known(model, skip)
    found: dict[int, Block] = {}
    reasons: dict[int, str] = {}
    for name, module, kind, reason in _layers(model, known, skip):
        weight = trainable(module, kind.weight_name)
        if weight is None:
            continue
        reason = reason or kind.options.plain
        if reason or id(weight) not in known:
            _note(reasons, module, reason or FOREIGN)
        elif id(weight) not in found:
            found[id(weight)] = _block(name, module, kind)
            if not kind.options.bias:
                own = kind.options.any_matrix
                why = "a bias is no part of the matrix under its rule"
                _note(reasons, module, why if own else "its weight is in another group")
        else:
            _tie(found[id(weight)], name, module, kind)
    _note_other_uses(model, found)
    blocks = _with_plain(model, found, reasons, known)
    for block in blocks:
        block.is_foreign = id(block.parameters[0]) not in known
        block.reason = FOREIGN if block.is_foreign else block.reason
    return blocks


def _all_alike(
    model: nn.Module, options: LayerOptions | None
) -> Mapping[int, LayerOptions]:
    options = options or LayerOptions()
    return {id(p): options for p in model.parameters()}


def _options_of(module: nn.Module, known: Mapping[int, LayerOptions]) -> LayerOptions:
    """Those of a layer's weight; the bias is left out where it has others.

    And where factors do not come from activations, in which it is an input that is
    always 1: there it is a parameter of its own.
    """
    kind = kind_of(module, LayerOptions())
    if kind is None:
        return LayerOptions()
    weight, bias = (trainable(module, x) for x in (kind.weight_name, kind.bias_name))
    options = known.get(id(weight), LayerOptions())
    alike = bias is None or known.get(id(bias)) == options
    alone = options.any_matrix and not is_norm(kind)
    return replace(options, bias=False) if alone or not alike else options


def _layers(
    model: nn.Module, known: Mapping[int, LayerOptions], skip: Collection[str]
) -> Iterator[tuple[str, nn.Module, LayerKind, str]]:
    """Modules of a known kind, each with the reason to leave it out, if any."""
    inert = {
        child
        for parent in model.modules()
        if isinstance(parent, nn.MultiheadAttention)
        for child in parent.modules()
    }
    for name, module in model.named_modules():
        kind = kind_of(module, _options_of(module, known))
        if kind is None:
            continue
        if _within(name, skip):
            yield name, module, kind, "named in skip"
        elif module in inert:
            yield name, module, kind, MHA
        else:
            yield name, module, kind, kind.refuse(module)


def _block(name: str, module: nn.Module, kind: LayerKind) -> Block:
    name = name or "model"
    layout = kind.layout(module)
    owned = kind.weight(module), kind.bias(module)
    return Block(
        spec=BlockSpec(
            name=name,
            stack=layout.stack,
            rows=layout.rows,
            cols=layout.cols,
            statistics=layout.statistics(name, kind.options),
        ),
        kind=kind,
        modules=[module],
        parameters=tuple(p for p in owned if p is not None),
        is_table=layout.right_diagonal,
        is_factored=bool(layout.left),
    )


def _tie(block: Block, name: str, module: nn.Module, kind: LayerKind) -> None:
    """Let a second module with the same weight add to the block, if it can.

    A module of another kind (an output layer tied to an embedding) cannot: its uses of
    the weight are then not part of the statistics, though they are of the gradient.
    """
    bias = kind.bias(module)
    same_bias = (bias is None) == (len(block.parameters) == 1) and (
        bias is None or bias is block.parameters[1]
    )
    if type(kind) is type(block.kind) and same_bias:
        block.modules.append(module)
        block.note = f"shared with {name}"
    else:
        block.note = _left_out(name)


def _note_other_uses(model: nn.Module, found: dict[int, Block]) -> None:
    """Say which modules without a block have the weight of one."""
    for name, module in model.named_modules():
        for p in module.parameters(recurse=False):
            block = found.get(id(p))
            if block is not None and module not in block.modules and not block.note:
                block.note = _left_out(name)


def _left_out(name: str) -> str:
    return f"statistics leave out its use as {name}"


def _with_plain(
    model: nn.Module,
    found: dict[int, Block],
    reasons: dict[int, str],
    known: Mapping[int, LayerOptions],
) -> list[Block]:
    """Blocks and plain parameters in the order of `model.named_parameters`."""
    block_of = {id(p): block for block in found.values() for p in block.parameters}
    ordered: dict[str, Block] = {}
    for name, p in model.named_parameters():
        block = block_of.get(id(p))
        if block is None and p.requires_grad:
            options = known.get(id(p), LayerOptions())
            reason = options.plain or reasons.get(id(p)) or why_plain(model, name)
            alone = options.any_matrix and Matrix.fits(p)
            block = _matrix(name, p, options) if alone else _plain(name, p, reason)
        if block is not None:
            ordered.setdefault(block.name, block)
    return list(ordered.values())


def _matrix(name: str, p: nn.Parameter, options: LayerOptions) -> Block:
    kind = Matrix(options, tuple(p.shape))
    layout = kind.layout(_NO_MODULE)
    spec = BlockSpec(
        name=name,
        stack=layout.stack,
        rows=layout.rows,
        cols=layout.cols,
        statistics=layout.statistics(name, options),
    )
    return Block(spec=spec, kind=kind, parameters=(p,), is_factored=True)


def _plain(name: str, p: nn.Parameter, reason: str) -> Block:
    spec = BlockSpec(name=name, stack=1, rows=1, cols=p.numel(), elementwise=True)
    return Block(spec=spec, kind=None, parameters=(p,), reason=reason)


def _within(name: str, skip: Collection[str]) -> bool:
    """Whether a layer, or a module that contains it, is named in ``skip``."""
    return any(name == s or name.startswith(f"{s}.") for s in skip)


def _note(reasons: dict[int, str], module: nn.Module, reason: str) -> None:
    for p in module.parameters(recurse=False):
        reasons[id(p)] = reason


def _require_known(model: nn.Module, skip: Collection[str]) -> None:
    names = {name for name, _ in model.named_modules()}
    unknown = sorted(set(skip) - names)
    if unknown:
        legal = ", ".join(sorted(n for n in names if n)[:20])
        raise ValueError(f"Invalid skip={unknown}. Must be layer names, as {legal}.")


def _or_zeros(p: nn.Parameter) -> Tensor:
    return torch.zeros_like(p) if p.grad is None else p.grad
