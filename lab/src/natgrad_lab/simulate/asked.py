"""What `natgrad plan` and `natgrad simulate` are asked about: a model and a method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import tyro

from natgrad import (
    KFAC,
    SPNGD,
    Adaptive,
    Every,
    Free,
    GroupList,
    Kronecker,
    Options,
    Polar,
    Refresh,
    Rule,
)
from natgrad_lab.errors import UserError
from natgrad_lab.named import (
    FALLBACKS,
    PRESETS,
    RULES,
    adaptive,
    changed,
    given,
    timed,
)
from natgrad_lab.simulate.work import Work, ruled_work, work_of

METHODS: dict[str, Options] = {
    "kfac": KFAC.defaults,
    "spngd": SPNGD.defaults,
    "polar": Polar.defaults,
    **PRESETS,
}
WORDS: Mapping[str, Rule] = {
    **{name: kind() for name, kind in {**RULES, **FALLBACKS}.items()},
    **{name: options.rule for name, options in PRESETS.items()},
}
"""Rules that a group may have, by name."""
MOST_RANKS = 65_536
"""A plan of ResNet-50 for as many takes seven seconds, and more take more."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Options that both commands have. None: what the method has by default."""

    model: str = "resnet50"
    """A lab model."""
    import_: Annotated[str | None, tyro.conf.arg(name="import")] = None
    """package.module:function that returns a model, in place of --model."""
    input: tuple[int, ...] = ()
    """One example's shape; needed with --import."""
    method: Literal["kfac", "spngd", "polar"] = "kfac"
    """Whose options are the defaults: natgrad.KFAC, SPNGD or Polar."""
    rule: Literal["kronecker", "ekfac", "eigen_adam", "orthogonal"] | None = None
    """How factors turn a gradient into an update."""
    sides: Literal["both", "inputs", "outputs"] | None = None
    """Which of A and G there are."""
    fallback: Literal["plain", "adam"] | None = None
    """The rule of parameters without statistics."""
    factor_decay: float | None = None
    """Weight of the old value in running averages; 0 keeps only the newest."""
    norm: Literal["skip", "unit", "diag", "full"] | None = None
    """Statistic of normalisation layers."""
    inverse: Literal["eigen", "factored"] | None = None
    """Eigendecomposition or Cholesky."""
    refresh: Literal["every", "adaptive"] | None = None
    """At the intervals below, or each statistic at its own."""
    statistics: int | None = None
    """Steps between estimates; with --refresh every."""
    inverses: int | None = None
    """Steps between inversions; with --refresh every."""
    placement: str = "longest_first"
    """longest_first or round_robin."""
    gradients: Literal["own", "ddp", "sharded"] = "own"
    """Who averages gradients: the library, DDP, or fully_shard, which also cuts the
    model."""
    batch_per_rank: int = 32
    """Examples per rank."""


def require_world(*worlds: int) -> None:
    """Raise if there is no plan for so many ranks, or none that ends soon."""
    for world in worlds:
        if not 1 <= world <= MOST_RANKS:
            raise UserError(
                f"Invalid world={world}. Must be in [1, {MOST_RANKS}]: a plan is made "
                "for each rank."
            )


def options_asked(asked: Asked) -> Options:
    """The method with the options that were given."""
    if asked.batch_per_rank < 1:
        raise UserError(f"Invalid batch_per_rank={asked.batch_per_rank}. Must be >= 1.")
    inverse = asked.inverse
    try:
        found = _changed(asked, METHODS[asked.method], inverse)
    except ValueError as error:
        raise UserError(str(error)) from error
    rule = found.rule
    if inverse not in (None, inverse_of(found)):
        raise UserError(
            f"Invalid inverse={inverse!r}. Must be {inverse_of(found)!r} with "
            f"--method {asked.method}, --rule {rule.name} and --sides {rule.sides}."
        )
    return found


def _changed(asked: Asked, start: Options, inverse: Any) -> Options:
    rule = changed(start.rule, RULES, asked.rule, sides=asked.sides)
    # How damping is added decides what K-FAC's inverse is.
    if isinstance(rule, Kronecker) and inverse is not None:
        rule = replace(rule, style=inverse)
    fields = given(factor_decay=asked.factor_decay, norm=asked.norm)
    # Costs do not depend on the length, which has to go with the rule.
    length = start.length if asked.rule is None else Free()
    return replace(
        start,
        rule=rule,
        length=length,
        fallback=changed(start.fallback, FALLBACKS, asked.fallback),
        refresh=_refresh(asked, start),
        **fields,
    )


def _refresh(asked: Asked, start: Options) -> Refresh:
    times = (asked.statistics, asked.inverses)
    if asked.refresh == "adaptive":
        if times != (None, None):
            raise UserError("--refresh adaptive has no --statistics or --inverses.")
        return adaptive(start.refresh, None)
    if asked.refresh is None and times == (None, None):
        return start.refresh
    timeless = isinstance(start.refresh, Adaptive)
    return timed(Every(10, 10) if timeless else start.refresh, *times)


def inverse_of(options: Options) -> str:
    """What a plan of this method computes and shares, as in the library's engine."""
    return "eigen" if options.rule.form == "eigen" else "factored"


def work_asked(
    asked: Asked, options: Options, rules: Mapping[str, Rule] | None = None
) -> Work:
    """The model's work under this method, with rules of groups if there are any."""
    shape = tuple(asked.input) or None
    name = asked.import_ or asked.model
    if rules is None and asked.method != "polar":
        return work_of(name, shape=shape, **blocks_of(options))
    return ruled_work(name, options, rules, shape=shape)


def rules_asked(asked: Asked, pairs: Sequence[str]) -> dict[str, Rule] | None:
    """Rules by the group of `natgrad.groups`; None if all follow the method's."""
    found: dict[str, Rule] = {}
    for pair in pairs:
        group, _, word = pair.partition("=")
        if group not in GroupList.kinds or word not in WORDS:
            raise UserError(
                f"Invalid rules={pair!r}. Must be group=rule: a group is one of "
                f"{', '.join(GroupList.kinds)}, a rule one of {', '.join(WORDS)}."
            )
        found[group] = WORDS[word]
    return found if found or asked.method in PRESETS else None


def blocks_of(options: Options) -> Mapping[str, Any]:
    """How a method cuts a model into blocks, as `work_of` takes it."""
    return {
        "norm": options.norm,
        "sides": options.rule.sides,
        "corrected": options.rule.corrects,
        "largest_factor": options.largest_factor,
    }
