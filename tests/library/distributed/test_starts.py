"""Whose collective starts when: natgrad's among torch's own, the same on all ranks."""

import random
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace

import pytest
from tests.library.distributed.test_tensor_parallel import (
    Net,
    build,
    data,
    parallelize,
    shard,
)
from tests.support.collectives import Collectives
from tests.support.world import plain_group, run_world
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import natgrad

Starts = list[tuple[str, int, int]]


def parallel(model: Net) -> nn.Module:
    parallelize(model, init_device_mesh("cpu", (2,)), by_sequence=True)
    return model


def parallel_and_sharded(model: Net) -> nn.Module:
    axes = ("data", "layers")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=axes)
    parallelize(model, mesh["layers"], by_sequence=False)
    shard(model, mesh["data"], "layers")
    return model


def sharded(model: Net) -> nn.Module:
    shard(model, init_device_mesh("cpu", (2,)), "layers")
    return model


def under_ddp(model: Net) -> nn.Module:
    return DistributedDataParallel(model, process_group=plain_group(), bucket_cap_mb=0)


WAYS: dict[str, tuple[int, Callable[[Net], nn.Module]]] = {
    "parallel": (2, parallel),
    "parallel and sharded": (4, parallel_and_sharded),
    "sharded": (2, sharded),
    "ddp": (2, under_ddp),
}


def starts(rank: int, way: str) -> Starts:
    """What starts in some steps: every bucket is of one item, and one rank is slow.

    Under `fully_shard` alone it also has no examples.
    """
    model = build()
    wrapped = WAYS[way][1](model)
    comm = natgrad.CommOptions(bucket_bytes=1)
    options = replace(natgrad.SPNGD.defaults, comm=comm)
    own = natgrad.SPNGD(wrapped, lr=1e-2, options=options)
    if rank == 1:
        for layer in model.modules():
            layer.register_forward_hook(lambda *_: time.sleep(random.random() / 200))
    with closing(own), Collectives() as seen:
        for x, y in data(3):
            some = 0 if way == "sharded" and rank == 1 else len(x)
            outputs = wrapped(x[:some])
            F.cross_entropy(outputs, y[:some], reduction="sum").div(len(x)).backward()
            own.step()
            own.zero_grad()
    return [start.place for start in seen.starts]


@pytest.mark.parametrize("way", WAYS)
def test_ranks_start_natgrads_collectives_at_the_same_places_among_torchs(
    way: str,
) -> None:
    first, *rest = run_world(WAYS[way][0], starts, way)
    ours = [i for i, (name, _, _) in enumerate(first) if name == "c10d::reduce_"]
    assert len(ours) < ours[-1] - ours[0], "Must start among torch's, to show anything."
    for other in rest:
        assert other == first
