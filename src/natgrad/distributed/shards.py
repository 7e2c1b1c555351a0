"""What a sharded model's parameters say of how they are cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from natgrad.capture.peers import Peers
from natgrad.distributed.communicator import tell
from natgrad.layers import Block
from natgrad.math.shards import is_shard, local
from natgrad.plan.shards import Box, box_of, joined

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Sharding:
    """How ranks share a model.

    Attributes:
        peers: those that see the same examples as this one.
    """

    peers: Peers


def find_shards(
    model: nn.Module, blocks: Sequence[Block], group: Any
) -> Sharding | None:
    """Whether ranks have the parameters in pieces; notes in each block in which.

    Collective then. Raises, by name, of what cannot be trained so.
    """
    if not any(is_shard(p) for p in model.parameters()):
        return None
    _refuse_offload(model)
    ranks = tuple(dist.get_process_group_ranks(group))
    data = _data_ranks(model)
    ours = [b for b in blocks if not b.is_foreign]
    names = {id(p): name for name, p in model.named_parameters()}
    named = [(names[id(p)], p) for b in ours for p in b.parameters]
    parallel = any(_is_parallel(p, data) for _, p in named)
    for name, p in named:
        _require_placed(name, p, data, ranks, parallel=parallel)
    for block in ours:
        block.is_parallel = any(_is_parallel(p, data) for p in block.parameters)
    boxes = [_box_here(name, p) for name, p in named]
    mine = next(iter(data.values())) if data else (dist.get_rank(),)
    told = tell("shards", (mine, boxes), group)
    shapes = [tuple(p.shape) for _, p in named]
    pairs = zip(shapes, zip(*(each for _, each in told), strict=True), strict=True)
    cuts = iter([joined(shape, enumerate(held)) for shape, held in pairs])
    for block in ours:
        found = tuple(next(cuts) for _ in block.parameters)
        block.spec = replace(block.spec, cuts=found)
    groups = list(dict.fromkeys(ranks for ranks, _ in told))
    return Sharding(Peers(count=len(groups), number=groups.index(mine)))


def _data_ranks(model: nn.Module) -> dict[int, Ranks]:
    """Of each parameter that `fully_shard` has, by id: who averages its gradient."""
    return {
        id(p.sharded_param): _ranks_of(group.mesh_info.mesh)
        for module in model.modules()
        for group in _groups(module)
        for p in group.fsdp_params
    }


def _ranks_of(mesh: Any) -> Ranks:
    return tuple(sorted(int(rank) for rank in mesh.mesh.flatten().tolist()))


def _is_parallel(p: Any, data: dict[int, Ranks]) -> bool:
    """Whether ranks that see the same examples share a parameter."""
    return is_shard(p) and len(data.get(id(p), ())) < len(_ranks_of(p.device_mesh))


def _require_placed(
    name: str, p: Any, data: dict[int, Ranks], ranks: Ranks, *, parallel: bool
) -> None:
    """Raise unless all copies of what ranks have of it get the same gradient."""
    if id(p) not in data and (data or (not is_shard(p) and not parallel)):
        raise TypeError(
            f"{name} is whole on every rank, while other parameters of the model are "
            "sharded: nobody averages its gradient. Must be sharded as well: call "
            "fully_shard on the whole model last, or leave the parameter to another "
            "optimizer."
        )
    if data and len(set(data.values())) > 1:
        sizes = sorted({len(x) for x in data.values()})
        raise TypeError(
            f"{name} and others are averaged over {sizes} ranks. Must be the same "
            "ranks for all: call fully_shard with the same mesh everywhere."
        )
    held = _ranks_of(p.device_mesh) if is_shard(p) else ranks
    if held != tuple(sorted(ranks)) and not (parallel and id(p) in data):
        raise TypeError(
            f"{name} is on a mesh of ranks {list(held)}. Must be one of all ranks that "
            f"train together, {list(ranks)}: a mesh of a part of them is for "
            "fully_shard beside tensor parallelism."
        )


def _box_here(name: str, p: Any) -> Box:
    """What this rank has of a parameter."""
    shape = tuple(p.shape)
    if not is_shard(p):
        return (0,) * len(shape), shape
    dims = [_dim(name, placement) for placement in p.placements]
    # fully_shard cuts what tensor parallelism has cut already, and says so
    later = [i for i, x in enumerate(p.placements) if "Strided" in type(x).__name__]
    order = [i for i in range(len(dims)) if i not in later] + later
    mesh = p.device_mesh
    box = box_of(shape, tuple(mesh.mesh.shape), mesh.get_coordinate(), dims, order)
    if prod(box[1]) != local(p).numel():
        raise TypeError(
            f"This rank has {local(p).numel()} elements of {name}, of placements "
            f"{p.placements}. Must be {prod(box[1])}, as torch.chunk cuts it."
        )
    return box


def settle_gradients(blocks: Sequence[Block]) -> None:
    """Cut gradients as their parameters are, where tensor parallelism left sums to do.

    Collective among peers. `fully_shard` does so itself.
    """
    for p in (p for b in blocks if b.is_parallel for p in b.parameters):
        grad: Any = p.grad
        at: Any = p
        if grad is not None and is_shard(grad) and grad.placements != at.placements:
            p.grad = grad.redistribute(placements=at.placements)


def as_parameter(x: Tensor, p: Any) -> Tensor:
    """This rank's part of something shaped like a parameter, cut as the parameter is.

    What `torch.distributed.checkpoint` saves of all ranks as one tensor. A parameter
    that is not cut gives the tensor itself, in the parameter's shape.
    """
    x = x.reshape(local(p).shape)
    if not is_shard(p):
        return x
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        x,
        p.device_mesh,
        p.placements,
        run_check=False,
        shape=p.shape,
        stride=p.stride(),
    )


def part_here(x: Tensor, p: Any) -> Tensor:
    """What this rank has of a whole tensor that is cut as a parameter is."""
    offsets, sizes = _box_here("It", p)
    pairs = zip(offsets, sizes, strict=True)
    return x[tuple(slice(start, start + size) for start, size in pairs)]


def _dim(name: str, placement: Any) -> int:
    """The dim that a mesh's axis cuts, -1 for none."""
    if type(placement).__name__ == "Replicate":
        return -1
    if type(placement).__name__ in ("Shard", "_StridedShard"):
        return int(placement.dim)
    raise TypeError(f"{name} is placed as {placement!r}. Must be Shard or Replicate.")


def _refuse_offload(model: nn.Module) -> None:
    for name, module in model.named_modules():
        for group in _groups(module):
            if any(getattr(p, "offload_to_cpu", False) for p in group.fsdp_params):
                raise TypeError(
                    f"{name or 'The model'} is sharded with CPUOffloadPolicy: its "
                    "parameters are on another device than its activations. Must be "
                    "on one: call fully_shard without an offload_policy."
                )


def _groups(module: nn.Module) -> Iterator[Any]:
    """torch's own record of what `fully_shard` was told, if it is there."""
    find = getattr(module, "_get_fsdp_state", None)
    state: Any = find() if find is not None else None
    yield from getattr(state, "_fsdp_param_groups", ())
