"""Gathers on all ranks what owners and workers keep, for a checkpoint or a new plan."""

import hashlib
import json
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from natgrad.checkpoint.state_dict import Kept
from natgrad.distributed.communicator import Communicator
from natgrad.factors.state import StatisticState
from natgrad.factors.statistics import Statistics
from natgrad.layers import Block
from natgrad.math.inverse import Inverse
from natgrad.plan import Plan
from natgrad.plan.cost import kept_shapes
from natgrad.rules.lengths import References
from natgrad.rules.moments import Moment, Moments, moment_shape

Share = Callable[[Tensor | None, int], Tensor]


def gather(kept: Kept) -> None:
    """Collective: give every rank what only owners and workers keep."""
    if kept.statistics.comm.world > 1:
        _gather_statistics(kept.statistics)
        _gather_moments(kept.moments, kept.statistics)
        _gather_references(kept.references, kept.statistics)


def release(kept: Kept) -> None:
    """Forget what a gather brought that this rank has no part in."""
    plan, rank = kept.statistics.plan, kept.statistics.comm.rank
    for s in kept.statistics.states.values():
        parts = plan.parts_kept(s.spec.name, rank)
        if "average" not in parts:
            s.average, s.history = None, []
        if "inverse" not in parts:
            s.inverse = None
    idle = [n for n in kept.moments.states if rank not in plan.workers[n]]
    kept.moments.forget(idle)
    for name, s in kept.references.states.items():
        if rank not in plan.workers[name]:
            s.usual, s.steps = None, 0


def _gather_statistics(statistics: Statistics) -> None:
    states, plan = list(statistics.states.values()), statistics.plan
    comm, like = statistics.comm, statistics.like
    held = _held(states, plan, comm, like)
    for s, (average, inverse, history) in zip(states, held, strict=True):
        owner = plan.owners[s.spec.name]

        def share(x: Tensor | None, size: int, owner: int = owner) -> Tensor:
            mine = x.flatten() if comm.rank == owner and x is not None else None
            return comm.broadcast(like.new_empty(size) if mine is None else mine, owner)

        if average:
            s.average = share(s.average, s.spec.packed)
        if inverse:
            s.inverse = _share_inverse(s, share, statistics.is_eigen(s))
        s.history = [
            share(s.history[i] if i < len(s.history) else None, s.spec.packed)
            for i in range(history)
        ]


def _gather_moments(moments: Moments, statistics: Statistics) -> None:
    """One that is cut as its parameter is stays so: torch gathers it as a parameter."""
    states, comm, like = moments.states, statistics.comm, statistics.like
    blocks = [b for b in statistics.block.values() if not b.is_cut]
    first = {b.name: statistics.plan.workers[b.name][0] for b in blocks}
    none = Moment(square=like.new_empty(0))
    mine = [states.get(b.name, none) for b in blocks]
    held = [
        [s.steps, s.mean is not None] if first[b.name] == comm.rank else [0, 0]
        for b, s in zip(blocks, mine, strict=True)
    ]
    known = comm.agree(like.new_tensor(held, dtype=torch.float64).flatten()).tolist()
    numbers: list[int] = [round(x) for x in known]
    for block, state, steps, has_mean in zip(
        blocks, mine, numbers[::2], numbers[1::2], strict=True
    ):
        if not steps:
            continue

        def share(x: Tensor | None, block: Block = block) -> Tensor:
            empty = like.new_empty(moment_shape(block))
            kept = x.contiguous() if x is not None and x.numel() else empty
            return comm.broadcast(kept, first[block.name])

        states[block.name] = Moment(
            square=share(state.square),
            steps=steps,
            mean=share(state.mean) if has_mean else None,
        )


def _gather_references(references: References, statistics: Statistics) -> None:
    states, comm, like = references.states, statistics.comm, statistics.like
    if not states:
        return
    mine = [statistics.plan.workers[name][0] == comm.rank for name in states]
    held = [
        [0.0 if s.usual is None else float(s.usual), float(s.steps)]
        if here
        else [0.0, 0.0]
        for s, here in zip(states.values(), mine, strict=True)
    ]
    known = comm.agree(like.new_tensor(held, dtype=torch.float64).flatten())
    usual, steps = known[::2].to(like), known[1::2].tolist()
    for s, x, count in zip(states.values(), usual.unbind(), steps, strict=True):
        s.usual, s.steps = (x if count else None), round(count)


def part_of(plan: Plan, comm: Communicator) -> list[Any]:
    """Whose part of the state a rank has: its number, the world, owners and workers.

    Nothing else of the plan: who averages gradients may be known only later.
    """
    text = json.dumps([dict(plan.owners), dict(plan.workers)], sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return [comm.rank, comm.world, digest]


def warn_partial(comm: Communicator) -> bool:
    """Tell the rank that most often saves alone that this is not the whole state."""
    if comm.rank == 0:
        warnings.warn(
            f"This state_dict has rank 0's part of the natgrad state of {comm.world} "
            "ranks, which only rank 0 of the same number of ranks can load. Unless "
            "every rank saves its own part, call gather() on every rank before saving.",
            stacklevel=4,
        )
    return True


def _held(
    states: list[StatisticState], plan: Plan, comm: Communicator, like: Tensor
) -> list[tuple[int, int, int]]:
    """Of each owner: whether it has an average and an inverse, and its history."""
    said: list[float] = []
    for s in states:
        mine = plan.owners[s.spec.name] == comm.rank
        has = (s.average is not None, s.inverse is not None, len(s.history))
        said += has if mine else (0, 0, 0)
    agreed: list[float] = comm.agree(like.new_tensor(said)).tolist()
    numbers = [round(x) for x in agreed]
    return list(zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True))


def _share_inverse(s: StatisticState, share: Share, eigen: bool) -> Inverse:
    shapes = kept_shapes(s.spec, eigen)
    old = s.inverse or (None,) * len(shapes)
    return tuple(
        share(x, torch.Size(shape).numel()).reshape(shape)
        for x, shape in zip(old, shapes, strict=True)
    )
