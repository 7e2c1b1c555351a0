"""What `natgrad plan` and `natgrad simulate` are asked about: a model and a method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import tyro

from natgrad import Adaptive, Every, Refresh
from natgrad.options import Curvature
from natgrad_lab.errors import UserError
from natgrad_lab.simulate.work import Work, work_of

METHODS: dict[str, Curvature] = {
    "kfac": Curvature(refresh=Every(statistics=10, inverses=100)),
    "spngd": Curvature(
        damping_style="factored", decay=0.0, norm="unit", refresh=Adaptive()
    ),
    "polar": Curvature(
        statistics="inputs",
        scale="orthogonal",
        trust="layer",
        rest="adaptive",
        damping_style="relative",
        decay=0.8,
        refresh=Every(statistics=5, inverses=5),
        subsample=None,
    ),
}
"""The defaults of `natgrad.KFAC`, `SPNGD` and `Polar`, as far as costs know them."""
STRATEGIES = {"kfac": "factor_wise", "spngd": "spngd", "polar": "spngd"}
MOST_RANKS = 65_536
"""A plan of ResNet-50 for as many takes seven seconds, and more take more."""
SPLIT = 8
"""The most ranks that --split lets divide one factor."""


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
    sides: Literal["both", "inputs", "outputs"] | None = None
    """Which of A and G there are: the library's statistics=."""
    scale: Literal["kronecker", "corrected", "adaptive", "orthogonal"] | None = None
    """What scales a gradient."""
    rest: Literal["plain", "adaptive"] | None = None
    """The rule of parameters without statistics."""
    decay: float | None = None
    """Weight of the old value in running averages; 0 keeps only the newest."""
    norm: Literal["skip", "unit", "diag", "full"] | None = None
    """Statistic of normalisation layers."""
    inverse: Literal["eigen", "factored"] | None = None
    """Eigendecomposition or Cholesky; with --split Cholesky."""
    refresh: Literal["every", "adaptive"] | None = None
    """At the intervals below, or each statistic at its own."""
    statistics: int | None = None
    """Steps between estimates; with --refresh every."""
    inverses: int | None = None
    """Steps between inversions; with --refresh every."""
    placement: str = "longest_first"
    """longest_first or round_robin."""
    gradients: Literal["own", "ddp"] = "own"
    """Who averages gradients: the library, or DDP."""
    batch_per_rank: int = 32
    """Examples a rank."""
    split: bool = False
    """Divide factors larger than a fair share (planned and simulated, not executed)."""


def require_world(*worlds: int) -> None:
    """Raise if there is no plan for so many ranks, or none that ends soon."""
    for world in worlds:
        if not 1 <= world <= MOST_RANKS:
            raise UserError(
                f"Invalid world={world}. Must be in [1, {MOST_RANKS}]: a plan is made "
                "for each rank."
            )


def curvature_of(asked: Asked) -> Curvature:
    """The method with the options that were given."""
    if asked.batch_per_rank < 1:
        raise UserError(f"Invalid batch_per_rank={asked.batch_per_rank}. Must be >= 1.")
    inverse = asked.inverse or ("factored" if asked.split else None)
    given = {
        "statistics": asked.sides,
        "scale": asked.scale,
        "rest": asked.rest,
        "decay": asked.decay,
        "norm": asked.norm,
        # How damping is added decides what an inverse is.
        "damping_style": inverse if asked.method != "polar" else None,
    }
    start = METHODS[asked.method]
    changes: dict[str, Any] = {k: v for k, v in given.items() if v is not None}
    if _sided(asked, start) and "damping_style" not in changes:
        changes["damping_style"] = "relative"
    try:
        config = replace(start, refresh=_refresh(asked, start), **changes)
    except ValueError as error:
        raise UserError(str(error)) from error
    if inverse not in (None, inverse_of(config)):
        raise UserError(
            f"Invalid inverse={inverse!r}. Must be {inverse_of(config)!r} with "
            f"--method {asked.method}, --scale {config.scale} and --sides "
            f"{config.statistics}"
            + (": --split divides Cholesky's inverse." if asked.split else ".")
        )
    if asked.split and inverse_of(config) != "factored":
        raise UserError(
            "Invalid inverse='eigen' with --split. Must be factored: an "
            "eigendecomposition is not divided by columns."
        )
    return config


def _sided(asked: Asked, start: Curvature) -> bool:
    """Whether two sides are whitened on their own, for which "eigen" is no damping."""
    scale, sides = asked.scale or start.scale, asked.sides or start.statistics
    return scale == "orthogonal" and sides == "both"


def _refresh(asked: Asked, start: Curvature) -> Refresh:
    given = {"statistics": asked.statistics, "inverses": asked.inverses}
    timed = {name: value for name, value in given.items() if value is not None}
    if asked.refresh == "adaptive":
        if timed:
            raise UserError("--refresh adaptive has no --statistics or --inverses.")
        return Adaptive()
    if asked.refresh is None and not timed:
        return start.refresh
    known = start.refresh if isinstance(start.refresh, Every) else Every(10, 10)
    return replace(known, **timed)


def inverse_of(config: Curvature) -> str:
    """What a plan of this method computes and shares, as in the library's engine."""
    return "eigen" if config.form == "eigen" else "factored"


def work_asked(asked: Asked, config: Curvature) -> Work:
    """The model's work under this method."""
    shape = tuple(asked.input) or None
    name = asked.import_ or asked.model
    return work_of(name, shape=shape, **blocks_of(config))


def blocks_of(config: Curvature) -> Mapping[str, Any]:
    """How a method cuts a model into blocks, as `work_of` takes it."""
    return {
        "norm": config.norm,
        "sides": config.statistics,
        "corrected": config.scale == "corrected",
    }
