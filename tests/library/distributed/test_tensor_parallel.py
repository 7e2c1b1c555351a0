"""Tensor parallelism, alone and under `fully_shard`: as one process trains."""

from contextlib import closing
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.support.world import run_world
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

import natgrad
from natgrad.math.shards import is_shard

BATCH, WORDS, LENGTH, CLASSES = 8, 9, 4, 3


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, 6)
        self.first, self.second = Layer(), Layer()
        self.last = nn.RMSNorm(6)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.second(self.first(self.table(x)))
        return self.head(self.last(h)).mean(1)


def build(dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def parallelize(model: Net, mesh: Any, *, by_sequence: bool) -> None:
    """Features of all layers are cut; between them, by choice, positions."""
    apart = Shard(1)
    plan: dict[str, Any] = {
        "table": RowwiseParallel(input_layouts=Replicate(), output_layouts=apart),
        "last": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=apart, output_layouts=Replicate()),
    }
    for name in ("first", "second"):
        plan |= {
            f"{name}.norm": SequenceParallel(),
            f"{name}.up": ColwiseParallel(input_layouts=apart),
            f"{name}.down": RowwiseParallel(output_layouts=apart),
        }
    if not by_sequence:
        plan = {
            "table": ColwiseParallel(output_layouts=Replicate()),
            "first.up": ColwiseParallel(),
            "first.down": RowwiseParallel(),
            "second.up": ColwiseParallel(),
            "second.down": RowwiseParallel(),
            "head": ColwiseParallel(output_layouts=Replicate()),
        }
    parallelize_module(model, mesh, plan)


def whole(model: nn.Module) -> dict[str, Tensor]:
    named: list[tuple[str, Any]] = [*model.named_parameters()]
    full = ((n, p.full_tensor() if is_shard(p) else p) for n, p in named)
    return {name: p.detach().clone() for name, p in full}


def make(name: str, model: nn.Module) -> tuple[Any, Any]:
    """What steps, and what is natgrad's in it."""
    if name == "kfac":
        host: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return host, natgrad.KFAC(model, host, damping=1e-2)
    if name == "ekfac":
        host = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
        return host, natgrad.KFAC(model, host, damping=1e-2, rule=natgrad.EKFAC())
    known: dict[str, Any] = {
        "polar": lambda: natgrad.Polar(model, lr=1e-2),
        "spngd": lambda: natgrad.SPNGD(
            model, lr=1e-2, momentum=0.9, weight_decay=1e-2, damping=1e-2
        ),
        "muon": lambda: natgrad.Muon(model, lr=1e-2),
        "shampoo": lambda: natgrad.Shampoo(model, lr=1e-2),
    }
    optimizer = known[name]()
    return optimizer, optimizer


@dataclass(frozen=True)
class Case:
    """Who trains, and how."""

    make: str
    by_sequence: bool = False
    steps: int = 20
    wrap: str = "blocks"
    bound: float = 1e-10


CASES = {
    "muon": Case("muon", steps=5),
    "shampoo": Case("shampoo", by_sequence=True, steps=5),
    "polar": Case("polar"),
    "polar, by sequence": Case("polar", by_sequence=True, wrap="layers"),
    "spngd": Case("spngd"),
    "spngd, by sequence": Case("spngd", by_sequence=True, wrap="whole"),
    "kfac": Case("kfac"),
    "kfac, by sequence": Case("kfac", by_sequence=True),
    # where eigenvalues are equal, a batch in another order makes as much on one process
    "ekfac": Case("ekfac", by_sequence=True, steps=5, bound=1e-5),
}


def data(steps: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randint(0, WORDS, (BATCH, LENGTH), generator=generator),
            torch.randint(0, CLASSES, (BATCH,), generator=generator),
        )
        for _ in range(steps)
    ]


def train(model: Net, case: Case, part: int = 0, parts: int = 1) -> Any:
    stepper, own = make(case.make, model)
    for x, y in data(case.steps):
        stepper.zero_grad()
        loss = F.cross_entropy(model(x.chunk(parts)[part]), y.chunk(parts)[part])
        loss.backward()
        stepper.step()
    return own


def shard(model: Net, mesh: Any, wrap: str) -> None:
    layers = [m for m in model.modules() if [*m.parameters(recurse=False)]]
    parts = {"whole": [], "blocks": [model.first, model.second], "layers": layers}
    for module in (*parts[wrap], model):
        fully_shard(module, mesh=mesh)


def every_case(rank: int, world: int, names: list[str]) -> Any:
    """On a mesh of two for the layers, and the rest for the data."""
    found: dict[str, Any] = {}
    kept: dict[str, list[str]] = {}
    shape = world // 2, 2
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "layers"))
    for name in names:
        case, model = CASES[name], build()
        parallelize(model, mesh["layers"], by_sequence=case.by_sequence)
        if world > 2:
            shard(model, mesh["data"], case.wrap)
        with closing(train(model, case, rank // 2, world // 2)) as own:
            own.engine.plan.check()
            moved_as_planned(own)
            states = own.engine.statistics.states
            kept[name] = [n for n, s in states.items() if s.average is not None]
            found[name] = whole(model)
    return found, kept


def moved_as_planned(own: Any) -> None:
    """Bytes of the last step by exchange are those of the plan."""
    engine, element = own.engine, own.engine.like.element_size()
    for name in ("reduce_gradients", "share_updates"):
        sent, received = engine.plan.exchanges[name].volumes()
        counted = own.traffic()["step"].get(name, {"sent": 0, "received": 0})
        want = element * sent[engine.comm.rank], element * received[engine.comm.rank]
        assert (counted["sent"], counted["received"]) == want, name


@pytest.mark.parametrize("world", [2, 4])
def test_parallel_layers_train_as_one_process_does(world: int) -> None:
    results = run_world(world, every_case, world, [*CASES], timeout=300)
    for name, case in CASES.items():
        model = build()
        with closing(train(model, case)):
            want = whole(model)
        for parameters, _ in results:
            away = {n: _away(x, want[n]) for n, x in parameters[name].items()}
            assert max(away.values()) < case.bound, (name, away)
        held = [s for _, kept in results for s in kept[name]]
        assert len(held) == len(set(held)), f"{name}: an average is kept twice"


def _away(x: Tensor, want: Tensor) -> float:
    return float((x - want).abs().max())
