"""A step of a transformer under fully_shard on two ranks, next to AdamW's.

    python -m benchmarks.sharded
    python -m benchmarks.sharded --quick

Ranks are processes on this machine with gloo over loopback, one thread each.
Contenders take turns, a step at a time; seconds are wall seconds of the slowest rank,
from a barrier to the end of the step. The mean has the steps that estimate statistics
and invert them, as often as they come; the median is that of the other steps. Phases
are means over all measured steps of rank 0; "estimate" is a part of forward and
backward. Writes ``results/sharded.json`` and ``.md``: one minute.
"""

import argparse
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import natgrad
from benchmarks.common import (
    RESULTS,
    describe,
    machine,
    markdown_table,
    say,
    write_json,
)
from benchmarks.sharded.models import SIZES, Transformer
from natgrad.diagnostics.timer import Reader

WORLD, EXAMPLES, LENGTH = 2, 8, 64
PHASES = ("reduce", "gradients", "refresh", "precondition", "update")
"""Parts of natgrad's step, as `natgrad.diagnostics.timer` names them."""
COLUMNS = ("forward", "backward", "estimate", *PHASES, "rest of the step")


def adamw(model: Transformer) -> tuple[Any, Any]:
    """The baseline."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3), None


def kfac(model: Transformer) -> tuple[Any, Any]:
    """K-FAC in front of AdamW."""
    host, _ = adamw(model)
    return host, natgrad.KFAC(model, host, loss="tokens")


def alone(kind: Any, **options: Any) -> Callable[[Transformer], tuple[Any, Any]]:
    """An optimizer of ours that needs no other."""

    def make(model: Transformer) -> tuple[Any, Any]:
        optimizer = kind(model, lr=1e-3, **options)
        return optimizer, optimizer

    return make


CONTENDERS: dict[str, Callable[[Transformer], tuple[Any, Any]]] = {
    "AdamW": adamw,
    "Muon": alone(natgrad.Muon),
    "Polar": alone(natgrad.Polar, loss="tokens"),
    "Shampoo": alone(natgrad.Shampoo),
    "SPNGD": alone(natgrad.SPNGD, loss="tokens"),
    "KFAC on AdamW": kfac,
}


class Runner:
    """One contender: a sharded model, what steps, and seconds by phase."""

    def __init__(self, name: str, size: str) -> None:
        torch.manual_seed(0)
        self.words = SIZES[size].words
        self.model = Transformer(SIZES[size])
        for layer in self.model.layers:
            fully_shard(layer)
        fully_shard(self.model)
        self.stepper, self.own = CONTENDERS[name](self.model)
        self.reader = None if self.own is None else Reader(self.own.engine.meter)
        self.seconds: list[float] = []
        self.phases: dict[str, float] = defaultdict(float)
        self.moved: dict[str, int] = defaultdict(int)

    def step(self, *, counts: bool) -> None:
        """Take one; its time is that of the slowest rank."""
        words = torch.randint(self.words, (EXAMPLES, LENGTH + 1))
        self.stepper.zero_grad()
        dist.barrier()
        times = [time.perf_counter()]
        scores = self.model(words[:, :-1])
        loss = F.cross_entropy(scores.flatten(0, 1), words[:, 1:].flatten())
        times.append(time.perf_counter())
        loss.backward()
        times.append(time.perf_counter())
        self.stepper.step()
        times.append(time.perf_counter())
        took = torch.tensor([times[-1] - times[0]])
        dist.all_reduce(took, dist.ReduceOp.MAX)
        inner = self.reader.take() if self.reader is not None else {}
        if not counts:
            return
        self.seconds.append(float(took))
        self._charge([b - a for a, b in pairwise(times)], inner)

    def _charge(self, passes: list[float], inner: dict[tuple[str, str], float]) -> None:
        forward, backward, step = passes
        parts: dict[str, float] = defaultdict(float)
        for (phase, _), seconds in inner.items():
            parts[phase] += seconds
        known = {phase: parts[phase] for phase in PHASES}
        known |= {"forward": forward, "backward": backward}
        known["estimate"] = parts["estimate"]
        known["rest of the step"] = step - sum(parts[phase] for phase in PHASES)
        for phase, seconds in known.items():
            self.phases[phase] += seconds
        if self.own is not None:
            for exchange, count in self.own.traffic()["step"].items():
                self.moved[exchange] += count["sent"]

    def result(self) -> dict[str, Any]:
        """Medians, and means by phase and exchange."""
        steps = len(self.seconds)
        return {
            "seconds": statistics.median(self.seconds),
            "mean": statistics.mean(self.seconds),
            "all": self.seconds,
            "phases": {k: x / steps for k, x in self.phases.items()},
            "sent": {k: x / steps for k, x in self.moved.items()},
        }


def rank_main(rank: int, store: str, out: str, size: str, rounds: int) -> None:
    """What one process does."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=WORLD)
    runners = {name: Runner(name, size) for name in CONTENDERS}
    torch.manual_seed(rank)
    for i in range(rounds + 2):
        if rank == 0 and i % 5 == 0:
            say(f"step {i} of {rounds + 2}, of each of {len(runners)} optimizers")
        for runner in runners.values():
            runner.step(counts=i >= 2)
    if rank == 0:
        write({name: r.result() for name, r in runners.items()}, Path(out), size)
    for runner in runners.values():
        if runner.own is not None:
            runner.own.close()
    dist.barrier()
    dist.destroy_process_group()


def write(found: dict[str, Any], folder: Path, size: str) -> None:
    """Results as JSON, and a table of milliseconds."""
    facts, base = machine(), found["AdamW"]["mean"]
    write_json(folder / "sharded.json", {"machine": facts, "size": size, **found})
    rows = [
        [
            name,
            f"{1e3 * each['seconds']:.0f}",
            f"{1e3 * each['mean']:.0f}",
            f"{each['mean'] / base:.2f}",
            *(f"{1e3 * each['phases'].get(phase, 0.0):.1f}" for phase in COLUMNS),
        ]
        for name, each in found.items()
    ]
    head = ["", "median ms", "mean ms", "mean, of AdamW's", *COLUMNS]
    steps = len(found["AdamW"]["all"])
    text = (
        f"Milliseconds a step of the transformer `{size}` under `fully_shard` on "
        f"{WORLD} ranks, {steps} steps each, from `python -m benchmarks.sharded`. "
        f"{describe(facts)}\n\n{markdown_table(head, rows)}\n"
    )
    (folder / "sharded.md").write_text(text)
    say(text)


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="small", choices=["tiny", "small"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="tiny: does it run?")
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    size, rounds = ("tiny", 4) if asked.quick else (asked.size, asked.rounds)
    asked.out.mkdir(parents=True, exist_ok=True)
    store = asked.out / f".store{os.getpid()}"
    try:
        given = str(store.resolve()), str(asked.out), size, rounds
        mp.spawn(rank_main, given, nprocs=WORLD)
    finally:
        store.unlink(missing_ok=True)
