"""Statistics filed under parameters, as `torch.distributed.checkpoint` needs them.

Note [Two forms of a state]
``optimizer.state_dict()`` has natgrad's state under a key of its own. But
`torch.distributed.checkpoint.state_dict.get_optimizer_state_dict` takes only what is
filed under a parameter, and `torch.distributed.checkpoint.load` fills tensors that are
there already, by name, on whichever rank asks for them. For these two, a block's
statistics are filed under its first parameter, and all tensors exist from the start:
one that has no value yet is NaN. A rank files what it keeps, so that all ranks' are the
whole, and needs no more than that when the state comes back under another plan.
"""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from typing import Any

import torch
from torch import Tensor

from natgrad.checkpoint.state_dict import Kept
from natgrad.distributed.shards import as_parameter, part_here
from natgrad.factors.refresh import Timing
from natgrad.factors.state import StatisticState
from natgrad.factors.statistics import Statistics
from natgrad.layers import Block
from natgrad.math.shards import is_shard, local
from natgrad.plan.cost import kept_shapes
from natgrad.rules.lengths import has_reference
from natgrad.rules.moments import Moment

KEY = "natgrad"
REST = "rest"
MOMENT = "/moment"
START, USUAL = "/start", "/usual"
_ASKING = "torch.distributed.checkpoint.state_dict"
_NUMBERS = ("mean_eigenvalue", "estimated", "failures", "quarantined")
_TIMING = tuple(f.name for f in fields(Timing))


def torch_asks() -> bool:
    """Whether `get_optimizer_state_dict` is who wants a state. It gives no other sign.

    See Note [Two forms of a state].
    """
    frame = sys._getframe()  # pyright: ignore[reportPrivateUsage]
    for _ in range(8):
        if frame.f_globals.get("__name__") == _ASKING:
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


def spread(kept: Kept, state: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """By ``id`` of a block's first parameter: what this rank keeps of its statistics.

    The first block also has the rest of a ``state_dict``: the step, and what is not of
    one statistic.
    """
    saved: dict[int, dict[str, Any]] = {}
    for block in kept.statistics.block.values():
        names = [s.name for s in block.spec.statistics]
        filed = {name: _file(kept, name) for name in names}
        filed |= _file_moment(kept, block)
        filed |= _file_reference(kept, block)
        if filed or not saved:
            saved[id(block.parameters[0])] = filed
    own = ("statistics", "moments", "references")
    rest = {k: v for k, v in state.items() if k not in own}
    next(iter(saved.values()))[REST] = {**rest, "part": None}
    return saved


def collect(
    statistics: Statistics, filed: Iterable[Mapping[str, Any]]
) -> dict[str, Any]:
    """The inverse of `spread`: a state that `Engine.load_state_dict` takes."""
    states: dict[str, Any] = {}
    moments: dict[str, Any] = {}
    references: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for entry in filed:
        rest |= entry.get(REST, {})
        for name in entry.keys() - {REST}:
            if name in statistics.states:
                states[name] = _unfile(statistics, name, entry[name])
            elif name.endswith(MOMENT) and not entry[name]["steps"].isnan():
                steps = int(entry[name]["steps"])
                block = statistics.block[name.removesuffix(MOMENT)]
                square = _unfile_square(block, entry[name]["square"])
                mean = entry[name].get("mean")
                if mean is not None and bool(mean.isnan().all()):
                    mean = None
                moments[block.name] = {"square": square, "steps": steps, "mean": mean}
            elif name.endswith(START) and not entry[name].isnan():
                usual = entry.get(name.removesuffix(START) + USUAL)
                reference = _unfile_reference(entry[name], usual)
                references[name.removesuffix(START)] = reference
    known = {"statistics": states, "moments": moments, "references": references}
    return rest | known


def _file(kept: Kept, name: str) -> dict[str, Any]:
    statistics, s = kept.statistics, kept.statistics.states[name]
    here = statistics.plan.parts_kept(name, statistics.comm.rank)
    if kept.gathered:
        here = ("average", "inverse", "history")
    filed: dict[str, Any] = {"numbers": _numbers(s)}
    for part, shapes in _shapes(statistics, s).items():
        if part in here:
            filed[part] = _filled(statistics.like, _held(s, part), shapes)
    return filed


def _works(kept: Kept, block: Block) -> bool:
    """Whether this rank has what only workers keep of a block."""
    statistics = kept.statistics
    return kept.gathered or statistics.comm.rank in statistics.plan.workers[block.name]


def _file_moment(kept: Kept, block: Block) -> dict[str, Any]:
    """A block's second moment, on the ranks that keep it, if its rule has one."""
    shape = block.rule.moment_shape(block.shape)
    if shape is None or not _works(kept, block):
        return {}
    state, like = kept.moments.states.get(block.name), kept.statistics.like
    unknown = like.new_full(shape, float("nan"))
    if state is None:
        state, steps = Moment(square=unknown), float("nan")
    else:
        steps = float(state.steps)
    square = state.square
    if block.kind is None:  # of a sharded model each rank has its part of it
        square = as_parameter(square, block.parameters[0])
    filed = {"square": square, "steps": torch.tensor(steps)}
    if block.rule.projects and kept.statistics.parts[block.name].average.has_newest:
        filed["mean"] = unknown if state.mean is None else state.mean
    return {f"{block.name}{MOMENT}": filed}


def _unfile_square(block: Block, square: Tensor) -> Tensor:
    """In the shape in which it is kept, if it is of this block at all."""
    mine = local(square)
    fits = block.kind is None and mine.numel() == block.spec.elements
    if block.is_cut and not is_shard(square) and fits:
        mine = part_here(square.reshape(block.parameters[0].shape), block.parameters[0])
    fits = block.kind is None and mine.numel() == block.shape[2]
    return mine.reshape(block.shape) if fits else mine


def _file_reference(kept: Kept, block: Block) -> dict[str, Any]:
    """The norm that a weight began with; and, on workers, how large gradients are."""
    if not has_reference(block):
        return {}
    state = kept.references.states.get(block.name)
    unknown = kept.statistics.like.new_full((), float("nan"))
    start = unknown if state is None else state.start
    filed: dict[str, Any] = {f"{block.name}{START}": start}
    if _works(kept, block):
        # a load fills both: they must not be one tensor
        size, steps = unknown.clone(), torch.tensor(float("nan"))
        if state is not None and state.usual is not None:
            size, steps = state.usual, torch.tensor(float(state.steps))
        filed[f"{block.name}{USUAL}"] = {"size": size, "steps": steps}
    return filed


def _unfile_reference(start: Tensor, usual: Mapping[str, Tensor] | None) -> Any:
    found: dict[str, Any] = {"start": start, "usual": None, "steps": 0}
    if usual is not None and not usual["steps"].isnan():
        found |= {"usual": usual["size"], "steps": int(usual["steps"])}
    return found


def _shapes(
    statistics: Statistics, s: StatisticState
) -> dict[str, list[tuple[int, ...]]]:
    """Of every tensor that may ever be kept of a statistic."""
    watched = statistics.parts[s.spec.block].refresh.tolerance is not None
    return {
        "average": [(s.spec.packed,)],
        "inverse": kept_shapes(s.spec, statistics.is_eigen(s)),
        "history": [(s.spec.packed,)] * (2 if watched else 0),
    }


def _held(s: StatisticState, part: str) -> list[Tensor]:
    if part == "average":
        return [] if s.average is None else [s.average]
    return list(s.inverse or ()) if part == "inverse" else list(s.history)


def _filled(like: Tensor, held: list[Tensor], shapes: list[Any]) -> list[Tensor]:
    missing = [like.new_full(shape, float("nan")) for shape in shapes[len(held) :]]
    return held + missing


def _numbers(s: StatisticState) -> Tensor:
    timing = asdict(s.timing)
    values = [float(getattr(s, name)) for name in _NUMBERS]
    values += [float(timing[name]) for name in _TIMING]
    return torch.tensor(values, dtype=torch.float64)


def _unfile(
    statistics: Statistics, name: str, filed: Mapping[str, Any]
) -> dict[str, Any]:
    spec, rank = statistics.states[name].spec, statistics.comm.rank
    missing = set(statistics.plan.parts_kept(name, rank)) - filed.keys()
    if missing:
        raise ValueError(
            f"The saved state has no {' and '.join(sorted(missing))} of {name!r}, "
            f"which rank {rank} needs: it is another rank's part. Must be "
            "whole: call gather() on every rank before it is saved."
        )
    values: list[float] = filed["numbers"].tolist()
    entry: dict[str, Any] = dict(zip(_NUMBERS, values, strict=False))
    timing = values[len(_NUMBERS) :]
    entry["timing"] = {k: int(v) for k, v in zip(_TIMING, timing, strict=True)}
    average = _known(filed.get("average", []))
    return entry | {
        "stack": spec.stack,
        "size": spec.size,
        "average": average[0] if average else None,
        "inverse": _known(filed.get("inverse", [])) or None,
        "history": _known(filed.get("history", [])),
    }


def _known(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Those with a value: what is kept is never NaN. An empty one is known."""
    return [x for x in tensors if not (x.numel() and x.flatten()[0].isnan())]
