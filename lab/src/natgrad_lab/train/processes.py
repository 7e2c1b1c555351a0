"""One process or many: the only place in the lab that talks to torch.distributed."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from natgrad import CommError
from natgrad.distributed import Pulse
from natgrad_lab.train.meeting import meet


@dataclass(frozen=True, kw_only=True)
class World:
    """This process among its peers. Every method is a no-op with one process."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    pulse: Pulse | None = None

    @property
    def main(self) -> bool:
        """Whether this is the rank that writes and prints."""
        return self.rank == 0

    def mark(self, where: str) -> None:
        """Say where this rank is, in case that another must say who is stuck."""
        if self.pulse is not None:
            self.pulse.mark(where)

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks, in place, on all of them."""
        if self.size > 1:
            self.mark("in a sum over ranks")
            dist.all_reduce(tensor)
        return tensor

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on at least one rank."""
        return bool(self.sum(torch.tensor(int(flag))).item())

    def barrier(self) -> None:
        """Wait for every rank."""
        self.any(False)

    def share(self, text: str) -> str:
        """Rank 0's text, on all ranks."""
        if self.size == 1:
            return text
        box = [text]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def first(self, text: str) -> str:
        """The text of the first rank that has one, on all ranks."""
        if self.size == 1:
            return text
        heard: list[Any] = [None] * self.size
        dist.all_gather_object(heard, text)
        return next(filter(None, heard), "")

    def new_group(self) -> Any:
        """A group of all ranks for messages beside the training's. Collective."""
        return dist.new_group(backend="gloo") if self.size > 1 else None

    def drop_group(self, group: Any) -> None:
        """Undo `new_group`."""
        if group is not None:
            dist.destroy_process_group(group)

    def mesh(self) -> Any:
        """All ranks in one axis, for `rows`. Collective."""
        if self.size == 1:
            return None
        return init_device_mesh("cpu", (self.size,))

    def rows(self, local: Tensor, mesh: Any) -> Tensor:
        """The ranks' tensors laid one after the other, each where it is."""
        if self.size == 1:
            return local
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False)

    @contextmanager
    def average_buffers(self, model: nn.Module) -> Generator[None]:
        """Inside, batch norm's statistics are the ranks' average; after, their own."""
        own = [x for x in model.buffers() if x.is_floating_point()]
        if self.size == 1:
            own = []
        before = [buffer.clone() for buffer in own]
        for buffer in own:
            self.sum(buffer).div_(self.size)
        try:
            yield
        finally:
            for buffer, value in zip(own, before, strict=True):
                buffer.copy_(value)

    def data_parallel(self, model: nn.Module) -> nn.Module:
        """The model with its gradients averaged by DDP."""
        if self.size == 1:
            return model
        ids = [self.device.index] if self.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=ids)


class PeerError(RuntimeError):
    """Another rank is gone, stuck or failed. The message says which."""


@contextmanager
def processes(timeout: float = 600.0) -> Generator[World]:
    """Join torchrun's process group, if there is one, and leave it at the end.

    gloo on CPU; with CUDA, NCCL for device tensors and gloo for control messages. A
    rank that does not answer for ``timeout`` seconds ends the others. An error that
    another rank is the cause of becomes a `PeerError`.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    device = _device(int(os.environ.get("LOCAL_RANK", "0")))
    if size == 1:
        yield World(device=device)
        return
    rank = int(os.environ["RANK"])
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    limit = timedelta(seconds=timeout)
    store = _store(rank, size, limit)
    pulse = Pulse(dist.PrefixStore("lab", store.clone()), rank, size)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=limit
    )
    try:
        with _explained(pulse):
            yield World(rank=rank, size=size, device=device, pulse=pulse)
    finally:
        dist.destroy_process_group()
        pulse.stop()


@contextmanager
def _explained(pulse: Pulse) -> Generator[None]:
    try:
        yield
    except CommError:
        raise
    except Exception as error:
        if is_connection(error):
            first = str(error).splitlines()[0]
            raise PeerError(f"{pulse.verdict()} ({first})") from error
        pulse.fail(error)
        raise


def is_connection(error: Exception) -> bool:
    """Whether a collective has failed, not something on this rank."""
    return isinstance(error, dist.DistError | CommError) or (
        isinstance(error, RuntimeError) and "gloo" in str(error)
    )


def _device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _store(rank: int, size: int, limit: timedelta) -> Any:
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        size,
        is_master=rank == 0 and not shared,
        timeout=limit,
    )
    if not shared:
        return store
    return dist.PrefixStore(meet(store, rank, size, limit.total_seconds()), store)
