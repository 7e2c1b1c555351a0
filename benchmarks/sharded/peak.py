"""Bytes of a rank at the highest point of a step under fully_shard, measured.

    python -m benchmarks.sharded.peak
    python -m benchmarks.sharded.peak --quick

Ranks are processes on this machine. Counted are the storages of all tensors that a rank
has, looked at after every operation; scratch space inside of an operation is not seen.
All numbers are of the rank that has the most. "Kept" is what `natgrad plan` says of the
optimizer between steps; "after a step" is all that is in use then, weights and
gradients included; "peak" is the highest point of a step that estimates every
statistic, and of one that estimates none. Every rank has one example.
"""

import argparse
import os
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import natgrad
from benchmarks.common import markdown_table, say
from benchmarks.sharded.memory import planned, state
from benchmarks.sharded.models import SIZES, Transformer
from natgrad.plan import size_text

LENGTH, STEPS, WORLDS = 16, 4, (1, 2, 4)


def kfac(model: Transformer) -> tuple[Any, Any]:
    """K-FAC in front of SGD."""
    host = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    return host, natgrad.KFAC(model, host, loss="tokens", refresh=REFRESH)


def alone(kind: Any, **options: Any) -> Callable[[Transformer], tuple[Any, Any]]:
    """An optimizer of ours that needs no other."""

    def make(model: Transformer) -> tuple[Any, Any]:
        optimizer = kind(model, lr=1e-3, **options)
        return optimizer, optimizer

    return make


REFRESH = natgrad.Every(statistics=2, inverses=2)
"""Every second step, so that few have both kinds."""
CONTENDERS: dict[str, Callable[[Transformer], tuple[Any, Any]]] = {
    "polar": alone(natgrad.Polar, loss="tokens", refresh=REFRESH),
    "muon": alone(natgrad.Muon),
    "kfac": kfac,
    "adamw": lambda model: (torch.optim.AdamW(model.parameters(), lr=1e-3), None),
}


class Live(TorchDispatchMode):
    """Bytes of all storages that operations have seen and that are still in use."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, weakref.ref[Any]] = {}
        self.highest = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its operations are on what this rank has
        found = function(*args, **(kwargs or {}))
        for x in tree_leaves((args, kwargs, found)):
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                key: int = storage._cdata  # pyright: ignore[reportPrivateUsage]
                self._known[key] = weakref.ref(storage)
        self.highest = max(self.highest, self.now())
        return found

    def now(self) -> int:
        """In use at this moment."""
        storages = [(key, ref()) for key, ref in self._known.items()]
        self._known = {k: weakref.ref(s) for k, s in storages if s is not None}
        return sum(s.nbytes() for _, s in storages if s is not None)


class Rank:
    """One contender on one rank: what it has in use at each point."""

    def __init__(self, method: str, size: str) -> None:
        self.method, self.size = method, size

    def run(self) -> dict[str, int]:
        """A few steps; the last two are of either kind."""
        peaks: list[int] = []
        with Live() as live:
            self.build()
            for _ in range(STEPS):
                live.highest = 0
                self.step()
                peaks.append(live.highest)
            after = live.now()
        if self.own is not None:
            self.own.close()
        return {"after": after, "estimates": peaks[-2], "plain": peaks[-1]}

    def build(self) -> None:
        """A sharded model and its optimizer."""
        torch.manual_seed(0)
        self.model = Transformer(SIZES[self.size])
        for layer in self.model.layers:
            fully_shard(layer)
        fully_shard(self.model)
        self.stepper, self.own = CONTENDERS[self.method](self.model)

    def step(self) -> None:
        """Gradients of the step before are dropped first, as in a training loop."""
        self.stepper.zero_grad()
        words = torch.randint(SIZES[self.size].words, (1, LENGTH + 1))
        scores = self.model(words[:, :-1])
        F.cross_entropy(scores.flatten(0, 1), words[:, 1:].flatten()).backward()
        self.stepper.step()


def rank_main(rank: int, world: int, folder: str, size: str) -> None:
    """What one process does."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = f"file://{folder}/store{world}"
    dist.init_process_group("gloo", store, rank=rank, world_size=world)
    found = {method: Rank(method, size).run() for method in CONTENDERS}
    torch.save(found, f"{folder}/{world}.{rank}")
    dist.barrier()
    dist.destroy_process_group()


def measure(world: int, size: str) -> dict[str, dict[str, int]]:
    """By method, the most that any rank has in use at each point."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (world, folder, size), nprocs=world)
        ranks = [torch.load(Path(folder) / f"{world}.{rank}") for rank in range(world)]
    return {
        method: {
            point: max(r[method][point] for r in ranks) for point in ranks[0][method]
        }
        for method in CONTENDERS
    }


def main() -> None:
    """Print the table of `docs/sharded.md`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny: does it run?")
    size = "tiny" if parser.parse_args().quick else "small"
    rows: list[list[str]] = []
    for world in WORLDS:
        say(f"{world} of {WORLDS[-1]} ranks ...")
        for method, found in measure(world, size).items():
            row = planned(size, "muon" if method == "adamw" else method, world)[1]
            kept = [2 * r["weights"] if method == "adamw" else state(r) for r in row]
            cells = (max(kept), found["after"], found["estimates"], found["plain"])
            rows.append([method, str(world), *map(size_text, cells)])
    head = ["optimizer", "ranks", "kept, as planned", "after a step"]
    head += ["peak, estimating", "peak, other steps"]
    say(markdown_table(head, sorted(rows)))


if __name__ == "__main__":
    main()
