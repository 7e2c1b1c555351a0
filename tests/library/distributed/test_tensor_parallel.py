"""Tensor parallelism, alone and under `fully_shard`: as one process trains."""

from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from tests.library.distributed.test_sharded import moved_as_planned, whole
from tests.library.distributed.test_sharded_checkpoint import resume, save
from tests.support.world import run_world
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import natgrad
from natgrad.capture import hooks, recorder
from natgrad.layers import Layout
from natgrad.layers.matrices import Linear
from natgrad.math import shards

BATCH, WORDS, LENGTH, CLASSES = 8, 9, 4, 3
SCALER = torch.amp.GradScaler("cpu", init_scale=8.0)
UNSCALED = torch.amp.GradScaler("cpu", enabled=False)


class Down(nn.Linear):
    """The layer whose inputs tensor parallelism cuts, of two ranks."""


class InTwo(Linear):
    """What two ranks make of the inputs that they do not gather, on one process."""

    def layout(self, module: nn.Module) -> Layout:
        found = super().layout(module)
        two = 0 if self.options.gather_inputs else self.weight(module).shape[1] // 2
        return replace(found, apart=two)


natgrad.register_layer(Down, InTwo)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 10)
        self.down = Down(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, 6)
        self.first, self.second = Layer(), Layer()
        self.last = nn.RMSNorm(6)
        self.head = nn.Linear(6, CLASSES)
        self.recomputes = False

    def forward(self, x: Tensor) -> Tensor:
        h, recompute = self.first(self.table(x)), self.recomputes
        again = partial(checkpoint, self.second, use_reentrant=False)
        h = again(h) if recompute else self.second(h)
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
        "scaled": lambda: natgrad.SPNGD(model, lr=1e-2, grad_scaler=SCALER),
        "blocks": lambda: natgrad.SPNGD(
            model,
            lr=1e-2,
            damping=1e-2,
            options=replace(natgrad.SPNGD.defaults, gather_inputs=False),
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
    micro: int = 1
    clip: bool = False
    recomputes: bool = False
    half: bool = False
    dtype: torch.dtype = torch.float64


CASES = {
    "muon": Case("muon", steps=5),
    "shampoo": Case("shampoo", by_sequence=True, steps=5),
    "polar": Case("polar"),
    "polar, by sequence": Case("polar", by_sequence=True, wrap="layers"),
    "spngd": Case("spngd"),
    "spngd, by sequence": Case("spngd", by_sequence=True, wrap="whole"),
    "kfac": Case("kfac"),
    "kfac, by sequence": Case("kfac", by_sequence=True),
    "blocks": Case("blocks"),
    "blocks, by sequence": Case("blocks", by_sequence=True, wrap="layers"),
    "accumulated": Case("kfac", by_sequence=True, steps=4, micro=2),
    "clipped": Case("spngd", by_sequence=True, steps=4, clip=True),
    "recomputed": Case("spngd", by_sequence=True, steps=4, recomputes=True),
    "scaled": Case("scaled", by_sequence=True, steps=4),
    "float32": Case("polar", steps=1, dtype=torch.float32, bound=1e-5),
    # weights that have moved by up to 0.15
    "bfloat16": Case("spngd", steps=4, half=True, dtype=torch.float32, bound=4e-3),
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


def train(
    model: Net, own: Any, case: Case, part: int = 0, parts: int = 1, first: int = 0
) -> None:
    """``own`` steps: on its part of each batch."""
    model.recomputes = case.recomputes
    scaler = SCALER if case.make == "scaled" else UNSCALED
    for x, y in data(case.steps)[first:]:
        own.zero_grad()
        batches = zip(x.chunk(case.micro), y.chunk(case.micro), strict=True)
        for i, (inputs, labels) in enumerate(batches):
            sharded: Any = model
            if isinstance(sharded, FSDPModule):
                sharded.set_requires_gradient_sync(i == case.micro - 1)
            mine = inputs.chunk(parts)[part], labels.chunk(parts)[part]
            loss = F.cross_entropy(model(mine[0]), mine[1]) / case.micro
            scaler.scale(loss).backward()
        if case.clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(own)
        scaler.update()


def shard(model: Net, mesh: Any, wrap: str, *, half: bool = False) -> None:
    dtypes = (torch.bfloat16, torch.float32) if half else (None, None)
    policy = MixedPrecisionPolicy(param_dtype=dtypes[0], reduce_dtype=dtypes[1])
    layers = [m for m in model.modules() if [*m.parameters(recurse=False)]]
    parts = {"whole": [], "blocks": [model.first, model.second], "layers": layers}
    for module in (*parts[wrap], model):
        fully_shard(module, mesh=mesh, mp_policy=policy)


def whole_but_inputs(x: Tensor) -> Tensor:
    """Fails where a forward would gather features."""
    assert hooks.backward_id() != -1 or not shards.width(x, -1)
    return shards.whole(x)


def every_case(rank: int, world: int, names: list[str]) -> Any:
    """On a mesh of two for the layers, and the rest for the data, in two copies."""
    found: dict[str, Any] = {}
    kept: dict[str, list[str]] = {}
    copies = world // 4 or 1
    axes = ("copies", "data", "layers")
    shape = copies, world // 2 // copies, 2
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=axes)
    data = mesh["data"] if copies == 1 else mesh["copies", "data"]
    for name in names:
        case = CASES[name]
        model = build(case.dtype)
        parallelize(model, mesh["layers"], by_sequence=case.by_sequence)
        if world > 2:
            shard(model, data, case.wrap, half=case.half)
        stepper, own = make(case.make, model)
        with closing(own), pytest.MonkeyPatch.context() as patch:
            if case.make == "blocks":
                patch.setattr(recorder, "whole", whole_but_inputs)
            train(model, stepper, case, rank // 2, world // 2)
            own.engine.plan.check()
            moved_as_planned(own)
            states = own.engine.statistics.states
            kept[name] = [n for n, s in states.items() if s.average is not None]
            found[name] = whole(model)
    return found, kept


def one_process(case: Case) -> dict[str, Tensor]:
    model = build(case.dtype)
    stepper, own = make(case.make, model)
    with closing(own):
        train(model, stepper, case)
        return whole(model)


@pytest.mark.parametrize("world", [2, 4, pytest.param(8, marks=pytest.mark.long)])
def test_parallel_layers_train_as_one_process_does(world: int) -> None:
    """On 2 ranks alone, on 2 x 2 under fully_shard, on 2 x 2 x 2 under HSDP."""
    limit = 60 + 90 * world
    results = run_world(world, every_case, world, [*CASES], timeout=limit)
    for name, case in CASES.items():
        want = one_process(case)
        for parameters, _ in results:
            away = {n: _away(x, want[n]) for n, x in parameters[name].items()}
            assert max(away.values()) < case.bound, (name, away)
        held = [s for _, kept in results for s in kept[name]]
        assert len(held) == len(set(held)), f"{name}: an average is kept twice"


def _away(x: Tensor, want: Tensor) -> float:
    return float((x - want).abs().max())


RESUMED = {"polar": True, "spngd": True, "kfac": False}
"""Whether positions are cut too."""
HALF = 3
"""Steps before a checkpoint: in the middle of the intervals of refreshes."""


def begin_and_save(rank: int, path: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "layers"))
    for name, by_sequence in RESUMED.items():
        model = build()
        parallelize(model, mesh["layers"], by_sequence=by_sequence)
        shard(model, mesh["data"], "blocks")
        stepper, own = make(name, model)
        with closing(own):
            train(model, stepper, Case(name, steps=HALF), rank // 2, 2)
            save(model, stepper, f"{path}/{name}")


def go_on(rank: int, path: str) -> list[dict[str, Tensor]]:
    """Parallel on two ranks, and sharded on two."""
    found: list[dict[str, Tensor]] = []
    mesh = init_device_mesh("cpu", (2,))
    for name, by_sequence in RESUMED.items():
        case = Case(name, steps=2 * HALF)
        for parallel in (True, False):
            model = build()
            if parallel:
                parallelize(model, mesh, by_sequence=by_sequence)
            else:
                shard(model, mesh, "whole")
            stepper, own = make(name, model)
            with closing(own):
                resume(model, stepper, f"{path}/{name}")
                at = (0, 1) if parallel else (rank, 2)
                train(model, stepper, case, *at, first=HALF)
                found.append(whole(model))
    return found


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_of_a_mesh_goes_on_in_other_worlds(tmp_path: Any) -> None:
    pytest.importorskip("numpy", reason="torch's DCP gathers objects by NumPy")
    run_world(4, begin_and_save, str(tmp_path), timeout=200)
    found = run_world(2, go_on, str(tmp_path), timeout=200)
    for i, name in enumerate(RESUMED):
        case = Case(name, steps=2 * HALF)
        want = one_process(case)
        for results in found:
            for way, parameters in enumerate(results[2 * i : 2 * i + 2]):
                away = {n: _away(x, want[n]) for n, x in parameters.items()}
                assert max(away.values()) < 1e-10, (name, way, away)
        model = build()
        stepper, own = make(name, model)
        with closing(own):
            resume(model, stepper, str(tmp_path / name))
            train(model, stepper, case, first=HALF)
            away = {n: _away(x, want[n]) for n, x in whole(model).items()}
        assert max(away.values()) < 1e-10, (name, away)
