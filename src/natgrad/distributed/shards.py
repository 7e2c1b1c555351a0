"""What a sharded model's parameters say of how they are cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from natgrad.layers import Block
from natgrad.math.shards import is_shard, local
from natgrad.plan.shards import Cut, cut_up
from natgrad.plan.strategies import Ranks


def find_shards(model: nn.Module, blocks: Sequence[Block], group: Any) -> bool:
    """Whether ranks have the parameters in pieces; notes in each block in which.

    Raises, by name, of what cannot be trained so.
    """
    if not any(is_shard(p) for p in model.parameters()):
        return False
    _refuse_offload(model)
    names = {id(p): name for name, p in model.named_parameters()}
    groups = (group for module in model.modules() for group in _groups(module))
    fully = {id(p.sharded_param) for group in groups for p in group.fsdp_params}
    ranks = tuple(dist.get_process_group_ranks(group))
    for block in blocks:
        if block.is_foreign:
            continue
        for p in block.parameters:
            if not is_shard(p):
                raise TypeError(
                    f"{names[id(p)]} is whole on every rank, while other parameters of "
                    "the model are sharded: nobody averages its gradient. Must be "
                    "sharded as well: call fully_shard on the whole model last, or "
                    "leave the parameter to another optimizer."
                )
            at: Any = p
            if id(p) not in fully or not _is_data_parallel(p):
                raise TypeError(
                    f"{names[id(p)]} is placed as {at.placements} on a mesh of shape "
                    f"{tuple(at.device_mesh.mesh.shape)}. Must be as fully_shard "
                    "places a whole parameter: tensor parallelism is not supported."
                )
        cuts = tuple(read_cut(names[id(p)], p, ranks) for p in block.parameters)
        block.spec = replace(block.spec, cuts=cuts)
    copies = {b.spec.copies for b in blocks if b.spec.cuts}
    if len(copies) > 1:
        raise TypeError(
            f"Parameters are held by {sorted(copies)} ranks each. Must be one number "
            "for all: call fully_shard with the same mesh everywhere."
        )
    return True


def _is_data_parallel(p: Any) -> bool:
    """Whether one axis of the mesh cuts a parameter; another may have copies of it."""
    *copied, cut = [type(placement).__name__ for placement in p.placements]
    return cut == "Shard" and all(name == "Replicate" for name in copied)


def read_cut(name: str, p: Any, ranks: Ranks) -> Cut:
    """How a `DTensor` is cut among these ranks of the job, numbered as in the group."""
    mesh, number = p.device_mesh, {rank: i for i, rank in enumerate(ranks)}
    held = [int(rank) for rank in mesh.mesh.flatten().tolist()]
    if sorted(held) != sorted(ranks):
        raise TypeError(
            f"{name} is on a mesh of ranks {held}. Must be one of all ranks that train "
            f"together, {list(ranks)}: tensor parallelism, and meshes of a part of "
            "them, are not supported."
        )
    dims = [_dim(name, placement) for placement in p.placements]
    sizes = tuple(mesh.mesh.shape)
    cut = cut_up(tuple(p.shape), sizes, [number[r] for r in held], dims)
    here = cut.on(number[dist.get_rank()])
    if here != local(p).numel():
        raise TypeError(
            f"This rank has {local(p).numel()} elements of {name}, of placements "
            f"{p.placements}. Must be {here}, as torch.chunk cuts it."
        )
    return cut


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
    ranks = tuple(int(rank) for rank in p.device_mesh.mesh.flatten().tolist())
    number = ranks.index(dist.get_rank())
    pieces = read_cut("It", p, ranks).pieces
    mine = [x[piece.box] for piece in pieces if number in piece.ranks]
    return mine[0] if mine else x.new_empty(local(p).shape)


def _dim(name: str, placement: Any) -> int:
    """The dim that a mesh's axis cuts, -1 for none."""
    if type(placement).__name__ == "Replicate":
        return -1
    if type(placement).__name__ == "Shard":
        return int(placement.dim)
    raise TypeError(
        f"{name} is placed as {placement!r}. Must be Shard or Replicate, as under "
        "fully_shard."
    )


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
