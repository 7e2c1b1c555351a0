"""A model's parameters as blocks, and what is said about those that fall silent."""

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from natgrad.layers import Block, LayerOptions, find_blocks
from natgrad.options import Options
from natgrad.rules.fallbacks import Plain
from natgrad.rules.kronecker import Kronecker
from natgrad.rules.parts import Parts
from natgrad.rules.rule import Rule

Groups = Mapping[int, Parts]


def register(
    model: nn.Module, options: Options, groups: Groups | None = None
) -> list[Block]:
    """A model's blocks; raises if there is nothing to precondition.

    ``groups`` has the parts of the update by the ids of the optimizer's parameters;
    None if it has all, with the same parts.
    """
    trained = None if groups is None else frozenset(groups)
    _require_whole(model)
    blocks = find_blocks(
        model,
        LayerOptions(
            norm=options.norm,
            sharing=options.sharing,
            loss=options.loss,
            sides=options.rule.sides,
            source=options.rule.source,
            corrected=options.rule.corrects,
        ),
        skip=options.skip,
        trained=trained,
    )
    if not any(True for _ in model.parameters()):
        raise ValueError(f"{type(model).__name__} has no parameters to train.")
    if blocks and all(b.is_foreign for b in blocks):
        raise ValueError(
            f"The optimizer has no parameter of this {type(model).__name__}. Must be "
            "one that was made of the model's parameters."
        )
    if not any(b.kind is not None for b in blocks):
        kinds = sorted({type(m).__name__ for m in model.modules()})
        raise ValueError(
            f"{type(model).__name__} has no trainable layer of a known kind among "
            f"{', '.join(kinds)}. natgrad.register_layer(type, kind) adds one."
        )
    for block in blocks:
        block.rule = rule_for(block, parts_for(block, options, groups))
    return blocks


def parts_for(block: Block, options: Options, groups: Groups | None) -> Parts:
    """What the update of a block is made of."""
    if groups is None or block.is_foreign:
        return options.parts()
    return groups[id(block.parameters[0])]


def rule_for(block: Block, parts: Parts) -> Rule:
    """The rule of a block: by whether it has two-sided factors, others, or none."""
    if block.is_foreign:
        return Plain()
    if block.kind is None:
        return parts.fallback
    if block.is_factored:
        return parts.rule
    # A normalisation layer's one statistic is inverted as it is.
    style = "relative" if parts.rule.style == "relative" else "factored"
    return Kronecker(style=style)


def statistics_like(blocks: list[Block]) -> Tensor:
    """An empty tensor of the dtype and device that statistics are kept in."""
    first = blocks[0].parameters[0]
    wide = any(p.dtype == torch.float64 for b in blocks for p in b.parameters)
    return first.new_empty(0, dtype=torch.float64 if wide else torch.float32).detach()


def shape_of(block: Block) -> tuple[int, int, int]:
    """``(s, m, n)`` of a block's gradient."""
    return block.spec.stack, block.spec.rows, block.spec.cols


def warn_silent(blocks: list[Block], fired: set[str], options: Options) -> None:
    """Warn of layers whose hooks have not fired by the end of the first step."""
    silent = [
        b.name
        for b in blocks
        if (seen := [s.name for s in b.spec.statistics if not s.is_local])
        and fired.isdisjoint(seen)
    ]
    if not silent:
        return
    remedy = "Was the model called in training mode"
    if options.fisher == "sampled":
        remedy += ", and sampled_backward(outputs) before loss.backward()"
    warnings.warn(
        f"natgrad saw no forward and backward of {', '.join(silent)}: gradients are "
        f"used without their statistics until it does. {remedy}?",
        stacklevel=5,
    )


def require_known(model: nn.Module, blocks: list[Block]) -> None:
    """Raise if a parameter has a gradient that a step would not use."""
    used = {id(p) for b in blocks if b.is_trained for p in b.parameters}
    for name, p in model.named_parameters():
        if p.requires_grad and p.grad is not None and id(p) not in used:
            raise RuntimeError(
                f"{name} was added, frozen or unfrozen after registration. Must be "
                "done before KFAC or SPNGD is made."
            )


def _require_whole(model: nn.Module) -> None:
    """Raise if FSDP or tensor parallelism has cut a parameter into parts."""
    for name, p in model.named_parameters():
        # DTensor is of torch.distributed, which only comm imports
        if type(p.data).__name__ == "DTensor" or type(p).__name__ == "DTensor":
            raise TypeError(
                f"{name} is a DTensor, of which each rank has a part. Must be whole on "
                "every rank, as under DistributedDataParallel: FSDP and tensor "
                "parallelism are not supported."
            )
