"""From a config to `natgrad.Options`: what was given, and the optimizer's defaults."""

from dataclasses import replace
from typing import Any

import torch

from natgrad import KFAC, SPNGD, Adam, CommOptions, EigenAdam, Options, Polar, Rule
from natgrad_lab.named import (
    AVERAGES,
    DECAYS,
    FALLBACKS,
    LENGTHS,
    RULES,
    changed,
    given,
)
from natgrad_lab.train.config import TrainConfig
from natgrad_lab.train.schedules import make_damping, make_refresh


def defaults_of(config: TrainConfig) -> Options:
    """Those of the class that a config asks for; of KFAC for a plain optimizer."""
    if config.optimizer.auto:
        return SPNGD.auto
    kinds = {"spngd": SPNGD, "polar": Polar}
    return kinds.get(config.optimizer.name, KFAC).defaults


def options_of(config: TrainConfig, examples: int) -> Options:
    """What a config says about curvature, on a training set of ``examples``."""
    start, c = defaults_of(config), config.curvature
    rule = rule_of(config)
    fields = given(
        rule=rule,
        fallback=_fallback(start, config),
        factor_decay=c.factor_decay,
        factor_precision=_dtype(c.factor_precision),
        fisher=c.fisher,
        norm=c.norm,
        norm_damping_ratio=c.norm_damping_ratio,
        strategy=c.strategy,
        placement=c.placement,
        loss="tokens" if config.data.name == "text" else None,
    )
    if c.length is not None or c.kappa is not None:
        usual = replace(start, rule=rule).the_length
        fields["length"] = changed(usual, LENGTHS, c.length, kappa=c.kappa)
    for name in ("subsample", "largest_factor"):  # of which None is a value
        value = getattr(c, name)
        if value is not None:
            fields[name] = value if isinstance(value, int) else None
    if config.optimizer.alone:
        fields |= _update(start, config)
    if isinstance(start.damping, float):  # and not found
        fields["damping"] = make_damping(config, examples, start.damping)
    return replace(
        start,
        refresh=make_refresh(config, examples, start.refresh),
        skip=c.skip,
        comm=_comm(config),
        **fields,
    )


def _comm(config: TrainConfig) -> CommOptions:
    """How processes exchange what the plan lists."""
    c = config.curvature
    known = {"auto": "auto", "yes": True, "no": False}
    return CommOptions(
        timeout=config.timeout,
        hierarchical=known[c.hierarchical],
        **given(
            precision=_dtype(c.wire),
            half=c.half or None,
            bucket_bytes=None if c.bucket_mib is None else int(c.bucket_mib * 2**20),
        ),
    )


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)


def rule_of(config: TrainConfig) -> Rule:
    """How factors turn a gradient into an update."""
    start, c = defaults_of(config), config.curvature
    rule = changed(
        start.rule,
        RULES,
        c.rule,
        sides=c.sides,
        source=c.source,
        power=c.power,
        style=c.style,
        whitening=c.whitening,
        basis=c.basis,
        moments=c.moments,
    )
    has = isinstance(rule, EigenAdam)
    return replace(rule, **given(beta2=c.beta2)) if has else rule


def _fallback(start: Options, config: TrainConfig) -> Any:
    c = config.curvature
    rule = changed(start.fallback, FALLBACKS, c.fallback, rate=c.fallback_rate)
    return replace(rule, **given(beta2=c.beta2)) if isinstance(rule, Adam) else rule


def _update(start: Options, config: TrainConfig) -> dict[str, Any]:
    """What only an optimizer of its own has: momentum, decay, learning rate."""
    c = config.optimizer
    return given(
        lr=None if c.auto else c.lr,
        momentum=c.momentum,
        weight_decay=c.weight_decay,
        average=changed(start.average, AVERAGES, c.average, nesterov=c.nesterov),
        decay=changed(start.decay, DECAYS, c.decay),
    )
