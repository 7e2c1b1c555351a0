"""Which kind of block a module gets: one row a module type, open to users."""

import torch
from torch import nn

from natgrad.layers.conv import Conv
from natgrad.layers.embedding import Embedding
from natgrad.layers.kind import LayerKind, LayerOptions
from natgrad.layers.linear import Linear, TransposedLinear
from natgrad.layers.norm import (
    BatchNorm,
    GroupNorm,
    LayerNorm,
    Norm,
    RMSNorm,
    SyncBatchNorm,
)

# A name stands for a type of a package that is not imported here. None: left out.
TABLE: dict[type[nn.Module] | str, type[LayerKind] | None] = {
    nn.Linear: Linear,
    nn.Conv1d: Conv,
    nn.Conv2d: Conv,
    nn.Conv3d: Conv,
    nn.Embedding: Embedding,
    nn.BatchNorm1d: BatchNorm,
    nn.BatchNorm2d: BatchNorm,
    nn.BatchNorm3d: BatchNorm,
    nn.SyncBatchNorm: SyncBatchNorm,
    nn.LayerNorm: LayerNorm,
    nn.GroupNorm: GroupNorm,
    torch.nn.RMSNorm: RMSNorm,
    "transformers.pytorch_utils.Conv1D": TransposedLinear,
}


def register_layer(
    module: type[nn.Module] | str, kind: type[LayerKind] | str | None
) -> None:
    """Give modules of a type (or of a type's full name) a kind of block.

    Args:
        module: the module's class, or its name as ``"package.module.Class"``.
        kind: a `LayerKind` subclass, the name of one in the table (``"linear"``,
            ``"conv"``, ``"embedding"``, ``"batch_norm"``, ``"layer_norm"``, ...),
            or None to leave such modules out.

    The row also holds for subclasses that have none of their own. It is used by every
    `KFAC` and `SPNGD` constructed afterwards.
    """
    if isinstance(kind, str):
        kinds = {row.name: row for row in TABLE.values() if row is not None}
        if kind not in kinds:
            raise ValueError(
                f"Invalid kind={kind!r}. Must be one of {', '.join(kinds)}, "
                "or a LayerKind subclass."
            )
        kind = kinds[kind]
    if kind is None:
        TABLE[module] = None
    elif isinstance(kind, type) and issubclass(kind, LayerKind):
        TABLE[module] = kind
    else:
        raise TypeError(f"Invalid kind={kind!r}. Must be a LayerKind subclass.")


def kind_of(module: nn.Module, options: LayerOptions) -> LayerKind | None:
    """The kind of a module, by its nearest type in the table."""
    for base in type(module).__mro__:
        for key in (base, f"{base.__module__}.{base.__qualname__}"):
            if key in TABLE:
                row = TABLE[key]
                return None if row is None else row(options)
    return None


def is_norm(kind: LayerKind | None) -> bool:
    """Whether blocks of this kind take the norm damping ratio."""
    return isinstance(kind, Norm)
