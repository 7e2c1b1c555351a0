"""A small model in training on several ranks, by any optimizer: for tests of faults."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from tests.support.construct import construct
from tests.support.world import plain_group
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import natgrad
from natgrad.distributed import watchdog
from natgrad.math.shards import local

RULES: dict[str, dict[str, Any]] = {
    "eigen": {"rule": natgrad.Kronecker(style="eigen")},
    "factored": {"rule": natgrad.Kronecker(style="factored")},
    "corrected": {"rule": natgrad.EKFAC()},
    "adaptive": {"rule": natgrad.EigenAdam()},
    "orthogonal": {"rule": natgrad.Orthogonal()},
}
METHODS = ("spngd", "polar", "kfac", "kfac ddp")
"""Each reduces gradients itself, or leaves them to DDP: "spngd ddp" as well.

"spngd sharded" and the like have the model cut by `fully_shard`.
"""
TIMEOUT = 30.0


class Fragile(natgrad.Refresh):
    """Every step; raises, in a process that is told to, after ranks have agreed."""

    fails = False

    def __repr__(self) -> str:
        return "Fragile()"

    def after_inverse(self, step: int, timing: Any) -> int:
        if self.fails and timing.inverted:
            raise KeyError("lost")
        return step + 1

    def after_statistic(self, step: int, timing: Any) -> int:
        return step + 1


class Damping:
    """A function of the step; raises, in a process that is told to, before that."""

    fails = False
    value = 0.1

    def __call__(self, step: int) -> float:
        if self.fails:
            raise KeyError("lost")
        return self.value


def quick() -> None:
    """Beat faster in this process than in use, so that tests are short."""
    watchdog.PULSE_SECONDS, watchdog.PATIENCE_SECONDS = 0.1, 0.6
    watchdog.FAREWELL_SECONDS = 0.5


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Two linear layers, ``0`` and ``3``, with a norm, ``1``, between them."""
    torch.manual_seed(0)
    layers = (nn.Linear(4, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3))
    return nn.Sequential(*layers).to(dtype)


class Fleet:
    """One rank's model, optimizer and batches."""

    def __init__(
        self,
        method: str,
        rank: int,
        *,
        model: nn.Module | None = None,
        lr: float = 0.05,
        momentum: float = 0.9,
        timeout: float = TIMEOUT,
        comm: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.rank = rank
        self.plain: Any = network() if model is None else model
        self.model: Any = self.plain
        options["comm"] = natgrad.CommOptions(timeout=timeout, **comm or {})
        options.setdefault("refresh", natgrad.Every())
        name, _, wrapper = method.partition(" ")
        limit = timedelta(seconds=timeout)
        self.is_sharded = wrapper == "sharded"
        if self.is_sharded:
            group: Any = dist.new_group(timeout=limit)
            mesh = DeviceMesh.from_group(group, "cpu")
            for module in (self.plain[0], self.plain[3], self.plain):
                fully_shard(module, mesh=mesh)
        elif wrapper:
            self.model = DistributedDataParallel(
                self.plain, process_group=plain_group(timeout=limit)
            )
        if name == "kfac":
            self.optimizer: Any = torch.optim.SGD(
                self.plain.parameters(), lr=lr, momentum=momentum
            )
            self.natural: Any = construct(
                natgrad.KFAC, self.model, self.optimizer, **options
            )
        else:
            kind = {"spngd": natgrad.SPNGD, "polar": natgrad.Polar}[name]
            self.optimizer = construct(
                kind, self.model, lr=lr, momentum=momentum, **options
            )
            self.natural = self.optimizer
        self.generator = torch.Generator().manual_seed(100 + rank)

    def backward(self, examples: int = 8, first: float | None = None) -> None:
        """Gradients of a batch of this rank's own, whose ``first`` number is given."""
        dtype = next(self.plain.parameters()).dtype
        x = torch.randn(examples, 4, generator=self.generator).to(dtype)
        y = torch.randint(0, 3, (examples,), generator=self.generator)
        if first is not None:
            x[0, 0] = first
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(x), y).backward()

    def weights(self) -> Tensor:
        """A copy of all parameters, or of this rank's parts of them."""
        parameters = (local(p.detach()) for p in self.plain.parameters())
        return torch.cat([p.flatten() for p in parameters])

    def step(self, times: int = 1) -> None:
        """Train."""
        for _ in range(times):
            self.backward()
            self.optimizer.step()


def outcome(act: Callable[[], Any]) -> tuple[str, str, float]:
    """The kind and text of what is raised, if anything, and seconds until then."""
    clock = _Clock()
    try:
        act()
    except Exception as error:
        return type(error).__name__, str(error), clock.seconds()
    return "", "", clock.seconds()


class _Clock:
    """Counts its own short sleeps: on a machine that is busy it is slow as well."""

    TICK = 0.05

    def __init__(self) -> None:
        self._ticks, self._stopped = 0, threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while not self._stopped.wait(self.TICK):
            self._ticks += 1

    def seconds(self) -> float:
        self._stopped.set()
        return self._ticks * self.TICK


def store_of_test() -> Any:
    """The store in the test's own process, which no rank takes with it."""
    return dist.distributed_c10d._get_default_store()


def host_store_on_rank_0(rank: int, world: int) -> None:
    """As without torchrun: when that process ends, the store is gone."""
    first, local = store_of_test(), "127.0.0.1"
    if rank == 0:
        store = dist.TCPStore(local, 0, is_master=True, wait_for_workers=False)
        first.set("port of rank 0", str(store.port))
    else:
        port = int(first.get("port of rank 0"))
        store = dist.TCPStore(local, port, is_master=False)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
