"""One process or many: the only place in the lab that talks to torch.distributed."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True, kw_only=True)
class World:
    """This process among its peers. Every method is a no-op with one process."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def main(self) -> bool:
        """Whether this is the rank that writes and prints."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks, in place, on all of them."""
        if self.size > 1:
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


@contextmanager
def processes(timeout: float = 600.0) -> Generator[World]:
    """Join torchrun's process group, if there is one, and leave it at the end.

    gloo on CPU; with CUDA, NCCL for device tensors and gloo for control messages.
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
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=limit
    )
    try:
        yield World(rank=rank, size=size, device=device)
    finally:
        dist.destroy_process_group()


def _device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _store(rank: int, size: int, limit: timedelta) -> dist.Store:
    # torchrun keeps its store across restarts, and gloo would find the addresses of
    # the dead processes in it: every restart gets keys of its own.
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        size,
        is_master=rank == 0 and not shared,
        timeout=limit,
    )
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"natgrad/{restart}", store)
