"""Gives the blocks of a model their rules; warns of layers that are never called."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from natgrad.layers import Block, LayerOptions, find_blocks
from natgrad.plan.spec import BlockSpec
from natgrad.rules.fallbacks import Plain, is_fallback
from natgrad.rules.kronecker import Kronecker
from natgrad.rules.parts import Parts
from natgrad.rules.rule import Rule

if TYPE_CHECKING:
    from natgrad.options import Options

Groups = Mapping[int, Parts]


def register(
    model: nn.Module, options: "Options", groups: Groups | None = None
) -> list[Block]:
    """A model's blocks; raises if there is nothing to precondition.

    ``groups`` has the parts of the update by the ids of the optimizer's parameters;
    None if it has all, with the same parts.
    """
    known = groups or {id(p): options.parts() for p in model.parameters()}
    distinct = list(dict.fromkeys(known.values()))
    layer = [_layer_options(options, parts, i) for i, parts in enumerate(distinct)]
    number = {parts: i for i, parts in enumerate(distinct)}
    blocks = find_blocks(
        model,
        {p: layer[number[parts]] for p, parts in known.items()},
        skip=options.skip,
    )
    if not any(True for _ in model.parameters()):
        raise ValueError(f"{type(model).__name__} has no parameters to train.")
    if blocks and all(b.is_foreign for b in blocks):
        raise ValueError(
            f"The optimizer has no parameter of this {type(model).__name__}. Must be "
            "one that was made of the model's parameters."
        )
    for block in blocks:
        parts = parts_for(block, options, groups)
        block.rule = rule_for(block, parts)
        block.is_asked = is_fallback(parts.rule) and not block.is_foreign
        block.spec = _with_forms(block.spec, block.rule)
    asked = any(not is_fallback(parts.rule) for parts in distinct)
    if asked and not any(b.kind is not None for b in blocks):
        _without_layers(model, all(isinstance(b.rule, Plain) for b in blocks))
    return blocks


def _with_forms(spec: BlockSpec, rule: Rule) -> BlockSpec:
    """The plan must know in what form factors are kept and sent."""
    kept = tuple(
        replace(s, eigen=rule.form == "eigen") if s.is_factor else s
        for s in spec.statistics
    )
    return replace(spec, statistics=kept)


def _layer_options(options: "Options", parts: Parts, group: int) -> LayerOptions:
    """What layers of a parameter group must know."""
    rule = parts.rule
    return LayerOptions(
        norm=options.norm,
        sharing=options.sharing,
        loss=options.loss,
        sides=rule.sides,
        source=rule.source,
        corrected=rule.corrects,
        largest_factor=options.largest_factor,
        plain=f"its group follows {rule.name}" if is_fallback(rule) else "",
        group=group,
        matrices=parts.matrices,
        gather_inputs=options.gather_inputs,
    )


def parts_for(block: Block, options: "Options", groups: Groups | None) -> Parts:
    """What the update of a block is made of."""
    if groups is None or block.is_foreign:
        return options.parts()
    return groups[id(block.parameters[0])]


def rule_for(block: Block, parts: Parts) -> Rule:
    """The rule of a block: by whether it has two-sided factors, others, or none."""
    if block.is_foreign:
        return Plain()
    if block.kind is None:
        return parts.rule if is_fallback(parts.rule) else parts.fallback
    if block.is_factored:
        return parts.rule
    # A normalisation layer's one statistic is inverted as it is.
    style = "relative" if parts.rule.style == "relative" else "factored"
    return Kronecker(style=style)


def _without_layers(model: nn.Module, is_idle: bool) -> None:
    """Say so if a fallback trains all of a model; raise if there is nothing to do."""
    kinds = sorted({type(m).__name__ for m in model.modules()})
    found = (
        f"{type(model).__name__} has no trainable layer of a known kind among "
        f"{', '.join(kinds)}"
    )
    how = 'natgrad.register_layer(type, "linear", weight="kernel") adds one'
    if is_idle:
        raise ValueError(f"{found}. {how}.")
    warnings.warn(f"{found}: all follow Adam's rule. {how}.", stacklevel=4)


def warn_silent(blocks: list[Block], fired: set[str], options: "Options") -> None:
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
        f"natgrad saw no forward and backward of {', '.join(silent)}: their gradients "
        "are used without statistics until it sees one. Layers must be called as "
        f"modules. {remedy}?",
        stacklevel=5,
    )


def require_inside(model: nn.Module, groups: Iterable[Mapping[str, Any]]) -> None:
    """Raise if a group has a parameter that is not one of the model's.

    It would belong to no block, so that no step would ever change it.
    """
    known = {id(p) for p in model.parameters()}
    for number, group in enumerate(groups):
        params: Sequence[Tensor] = group["params"]
        names = group.get("param_names", [f"number {i}" for i in range(len(params))])
        for name, p in zip(names, params, strict=True):
            if id(p) not in known:
                raise ValueError(
                    f"Parameter {name} of group {number}, of shape {tuple(p.shape)}, "
                    f"is not one of this {type(model).__name__}'s. Must be: make it "
                    "part of the model, or give it to an optimizer of its own."
                )
