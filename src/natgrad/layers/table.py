"""Which kind of block a module gets: a row per module type, and users may add rows."""

from dataclasses import dataclass

import torch
from torch import nn

from natgrad.layers.block import LayerKind
from natgrad.layers.embedding import Embedding
from natgrad.layers.experts import Experts
from natgrad.layers.matrices import Conv, InProjection, Linear, TransposedLinear
from natgrad.layers.norm import BatchNorm, GroupNorm, LayerNorm, RMSNorm, SyncBatchNorm
from natgrad.layers.options import LayerOptions
from natgrad.layers.transposed import ConvTranspose

COMPUTING = ("forward", "__call__", "_conv_forward")
"""Methods with which a subclass may compute something else than its parent."""


@dataclass(frozen=True)
class Row:
    """A kind, and what modules of the type call their weight and bias."""

    kind: type[LayerKind]
    weight: str = "weight"
    bias: str = "bias"


Key = type[nn.Module] | str

# A name stands for a type of a package that is not imported here. None: left out.
TABLE: dict[Key, Row | None] = {
    nn.Linear: Row(Linear),
    nn.Conv1d: Row(Conv),
    nn.Conv2d: Row(Conv),
    nn.Conv3d: Row(Conv),
    nn.ConvTranspose1d: Row(ConvTranspose),
    nn.ConvTranspose2d: Row(ConvTranspose),
    nn.ConvTranspose3d: Row(ConvTranspose),
    nn.Embedding: Row(Embedding),
    nn.BatchNorm1d: Row(BatchNorm),
    nn.BatchNorm2d: Row(BatchNorm),
    nn.BatchNorm3d: Row(BatchNorm),
    nn.SyncBatchNorm: Row(SyncBatchNorm),
    nn.LayerNorm: Row(LayerNorm),
    nn.GroupNorm: Row(GroupNorm),
    torch.nn.RMSNorm: Row(RMSNorm),
    nn.MultiheadAttention: Row(InProjection, "in_proj_weight", "in_proj_bias"),
    "transformers.pytorch_utils.Conv1D": Row(TransposedLinear),
}


def register_layer(
    module: type[nn.Module] | str,
    kind: type[LayerKind] | str | None,
    *,
    weight: str = "weight",
    bias: str = "bias",
) -> None:
    """Give modules of a type (or of a type's full name) a kind of block.

    Args:
        module: the module's class, or its name as ``"package.module.Class"``.
        kind: a `LayerKind` subclass, the name of one in the table (``"linear"``,
            ``"conv"``, ``"embedding"``, ``"batch_norm"``, ``"layer_norm"``, ...) or
            ``"experts"``, or None to leave such modules out.
        weight: the name of the parameter that is the weight.
        bias: the name of the bias; modules need not have one.

    The row also holds for subclasses that have none of their own and do not override
    ``forward``. It is used by every optimizer that is made afterwards.
    """
    if isinstance(kind, str):
        known = (Experts, *(row.kind for row in TABLE.values() if row is not None))
        kinds = {kind.name: kind for kind in known}
        if kind not in kinds:
            raise ValueError(
                f"Invalid kind={kind!r}. Must be one of {', '.join(kinds)}, "
                "or a LayerKind subclass."
            )
        kind = kinds[kind]
    if kind is None:
        TABLE[module] = None
    elif isinstance(kind, type) and issubclass(kind, LayerKind):
        TABLE[module] = Row(kind, weight, bias)
    else:
        raise TypeError(f"Invalid kind={kind!r}. Must be a LayerKind subclass.")


def kind_of(module: nn.Module, options: LayerOptions) -> LayerKind | None:
    """The kind of a module, by its nearest type in the table."""
    found = _nearest(module)
    if found is None or found[1] is None or _overridden(module, found[0]):
        return None
    row = found[1]
    kind = row.kind(options)
    kind.weight_name, kind.bias_name = row.weight, row.bias
    return kind


def why_unknown(module: nn.Module) -> str:
    """Why a module has no kind, for the report."""
    found, name = _nearest(module), type_name(type(module))
    if found is None:
        return f"{name} is not a known layer"
    base, row = found
    if row is None:
        return f"{type_name(base)} is registered as None"
    method = _overridden(module, base)
    return (
        f"{name} overrides {base.__name__}.{method}: register_layer it if it computes "
        "the same"
    )


def type_name(kind: type) -> str:
    """The name of a class, with its module if torch has another one of that name."""
    short, home = kind.__name__, kind.__module__
    is_clear = home.partition(".")[0] == "torch" or not hasattr(nn, short)
    return short if is_clear else f"{home}.{short}"


def _nearest(module: nn.Module) -> tuple[type, Row | None] | None:
    """The module's nearest type in the table, and its row."""
    for base in type(module).__mro__:
        for key in (base, f"{base.__module__}.{base.__qualname__}"):
            if key in TABLE:
                return base, TABLE[key]
    return None


def _overridden(module: nn.Module, base: type) -> str:
    """The method by which a module computes something else than its base may.

    A subclass (or one module whose forward was replaced) may change the input, the
    output or the weight on the way, so that the base's statistics would be wrong.
    """
    for name in COMPUTING:
        if name in vars(module):
            return name
        for kind in type(module).__mro__:
            if kind is base:
                break
            if name in vars(kind):
                return name
    return ""
