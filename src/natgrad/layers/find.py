"""Cuts a model into blocks, and says why a parameter is in none."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from torch import Tensor, nn
from torch.nn.utils import parametrize

from natgrad.layers.block import NO_MODULE, Block, LayerKind, trainable
from natgrad.layers.matrices import Matrix
from natgrad.layers.options import LayerOptions
from natgrad.layers.specs import spec_of
from natgrad.layers.table import kind_of, type_name, why_unknown
from natgrad.plan.spec import BlockSpec

FOREIGN = "not the optimizer's"


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
                _note(reasons, module, _why_no_bias(kind))
        else:
            _tie(found[id(weight)], name, module, kind)
    _note_other_uses(model, found)
    blocks = _with_plain(model, found, reasons, known)
    for block in blocks:
        block.is_foreign = id(block.parameters[0]) not in known
        block.reason = FOREIGN if block.is_foreign else block.reason
    return blocks


def _why_no_bias(kind: LayerKind) -> str:
    """Why a bias is not in the matrix of its layer."""
    if not kind.has_bias:
        return "a bias is no part of the matrix of its layer"
    own = kind.options.any_matrix
    why = "a bias is no part of the matrix under its rule"
    return why if own else "its weight is in another group"


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
    alone = (options.any_matrix and not kind.is_norm) or not kind.has_bias
    return replace(options, bias=False) if alone or not alike else options


def _layers(
    model: nn.Module, known: Mapping[int, LayerOptions], skip: Collection[str]
) -> Iterator[tuple[str, nn.Module, LayerKind, str]]:
    """Modules of a known kind, each with the reason to leave it out, if any."""
    inert = {
        child
        for parent in model.modules()
        if isinstance(parent, nn.MultiheadAttention)
        and kind_of(parent, LayerOptions()) is None
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
    if kind.options.matrices and not (kind.matrices or kind.is_norm):
        raise ValueError(
            f"Invalid matrices={kind.options.matrices} of {name}, a "
            f"{type(module).__name__}. Must be of linear layers: put others into a "
            "parameter group without it."
        )
    layout = kind.layout(module)
    owned = kind.weight(module), kind.bias(module)
    return Block(
        spec=spec_of(layout, name, kind.options),
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
    spec = spec_of(kind.layout(NO_MODULE), name, options)
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


MHA = "MultiheadAttention does not call it as a layer"


def why_plain(model: nn.Module, parameter_name: str) -> str:
    """Why a parameter of the model is not the weight or bias of a block."""
    path, _, own = parameter_name.rpartition(".")
    owner = model.get_submodule(path)
    if isinstance(owner, parametrize.ParametrizationList):
        layer, _, tensor = path.rpartition("parametrizations.")
        owner = model.get_submodule(layer.removesuffix("."))
        return f"{_computed(owner, tensor)} from it"
    kind = kind_of(owner, LayerOptions())
    if kind is None:
        return why_unknown(owner)
    name, weight = type_name(type(owner)), kind.weight_name
    if weight in dict(owner.named_parameters(recurse=False)):
        return f"the {weight} of its {name} is frozen"
    if not isinstance(getattr(owner, weight, None), Tensor):
        return f"its {name} has no parameter {weight!r}: register_layer can name it"
    source = " from it" if own.startswith(f"{weight}_") else ""
    return f"{_computed(owner, weight)}{source}"


def _names(hook: object) -> tuple[str, str]:
    """What torch's weight_norm and spectral_norm, and its pruning, call the tensor."""
    return getattr(hook, "name", ""), getattr(hook, "_tensor_name", "")


def _computed(owner: nn.Module, tensor: str) -> str:
    """What torch's parametrisations, new or old, do to a tensor of a layer."""
    if parametrize.is_parametrized(owner):
        # torch derives a class "ParametrizedLinear" of Linear
        name = type_name(type(owner).__mro__[1])
        makers = owner.get_submodule(f"parametrizations.{tensor}").children()
    else:
        name = type_name(type(owner))
        hooks = owner._forward_pre_hooks.values()  # pyright: ignore[reportPrivateUsage]
        makers = (h for h in hooks if tensor in _names(h))
    how = ", ".join(type(maker).__name__.strip("_") for maker in makers)
    return f"the {tensor} of its {name} is computed ({how or 'by hand'})"
