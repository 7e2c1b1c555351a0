"""Models under `fully_shard`: trained as one process trains them, moved as planned."""

import warnings
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from tests.support.collectives import Collectives
from tests.support.world import run_world
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import natgrad
from natgrad.math.shards import is_shard, local

BATCH, VOCABULARY, LENGTH, CLASSES = 12, 7, 5, 3


class Net(nn.Module):
    """Every kind of block: a table, a convolution, norms, linear layers, a vector.

    Rows are fewer than ranks in some; ``body`` runs twice; ``idle`` does not run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 6)
        self.conv = nn.Conv1d(6, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.body = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4))
        self.frozen = nn.Linear(4, 4)
        self.idle = nn.Linear(4, 2)
        self.head = nn.Linear(4, CLASSES, bias=False)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, CLASSES))
        self.frozen.requires_grad_(False)
        self.recomputes = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.conv(self.table(x).mT)).mean(2)
        for _ in range(2):
            body = self.body
            h = checkpoint(body, h, use_reentrant=False) if self.recomputes else body(h)
        return self.head(self.frozen(h)) * self.scale


@dataclass(frozen=True)
class Case:
    """How a model is cut and trained."""

    make: str
    wrap: str = "layers"
    reshard: bool = True
    steps: int = 20
    micro: int = 1
    clip: bool = False
    scaler: bool = False
    recomputes: bool = False
    replicas: int = 1
    dtype: torch.dtype = torch.float64
    bound: float = 1e-10


CASES = {
    "polar": Case("polar"),
    "spngd": Case("spngd", wrap="whole", reshard=False),
    "kfac": Case("kfac", wrap="blocks"),
    "clipped": Case("polar", wrap="blocks", steps=4, clip=True),
    "accumulated": Case("kfac", wrap="blocks", steps=4, micro=2),
    "not resharded, accumulated": Case("polar", reshard=False, steps=4, micro=2),
    "recomputed": Case("polar", wrap="blocks", steps=4, recomputes=True),
    "scaled": Case("polar", wrap="blocks", steps=4, scaler=True),
    "ekfac": Case("ekfac", wrap="blocks", steps=5),
    "rescaled": Case("rescaled", wrap="whole", steps=5),
    "groups": Case("groups", wrap="blocks", steps=5),
    "muon": Case("muon", wrap="whole", steps=5),
    "shampoo": Case("shampoo", wrap="whole", steps=5),
    "replicas, polar": Case("polar", wrap="blocks", replicas=2),
    "replicas, spngd": Case("spngd", wrap="blocks", replicas=2),
    "replicas, kfac": Case("kfac", wrap="whole", replicas=2),
    "replicas, rescaled": Case("rescaled", wrap="whole", steps=5, replicas=2),
    # updates of about 1e-2, whose smallest singular values are rounded at 1e-3
    "float32": Case("polar", wrap="whole", steps=1, dtype=torch.float32, bound=3e-5),
    "float32, long": Case("spngd", wrap="whole", dtype=torch.float32, bound=1e-3),
}


def make_kfac(model: nn.Module, rule: Any = None) -> tuple[Any, Any]:
    if rule is None:
        host: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    else:
        host = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    chosen = {} if rule is None else {"rule": rule}
    return host, natgrad.KFAC(model, host, damping=1e-2, **chosen)


def make(name: str, model: nn.Module) -> tuple[Any, Any]:
    """What steps, and what is natgrad's in it."""
    if name == "kfac":
        return make_kfac(model)
    if name == "ekfac":
        return make_kfac(model, natgrad.EKFAC())
    known: dict[str, Callable[[], Any]] = {
        "polar": lambda: natgrad.Polar(model, lr=1e-2),
        "spngd": lambda: natgrad.SPNGD(
            model, lr=1e-2, momentum=0.9, weight_decay=1e-2, damping=1e-2
        ),
        "rescaled": lambda: natgrad.SPNGD(
            model,
            lr=1e-2,
            momentum=0.9,
            options=replace(natgrad.SPNGD.defaults, decay=natgrad.Rescaled()),
        ),
        "groups": lambda: natgrad.Polar(model, natgrad.groups(model), lr=1e-2),
        "muon": lambda: natgrad.Muon(model, lr=1e-2),
        "shampoo": lambda: natgrad.Shampoo(model, lr=1e-2),
    }
    optimizer = known[name]()
    return optimizer, optimizer


def build(dtype: torch.dtype = torch.float64, recomputes: bool = False) -> Net:
    torch.manual_seed(0)
    model = Net().to(dtype)
    model.recomputes = recomputes
    return model


def shard(model: Net, wrap: str = "layers", **options: Any) -> Net:
    layers = [m for m in model.modules() if [*m.parameters(recurse=False)]]
    parts = {
        "whole": [],
        "blocks": [model.body, model.head],
        "layers": [m for m in layers if m is not model],
    }
    for module in (*parts[wrap], model):
        fully_shard(module, **options)
    return model


def data(steps: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator),
            torch.randint(0, CLASSES, (BATCH,), generator=generator),
        )
        for _ in range(steps)
    ]


def train(
    model: nn.Module,
    stepper: Any,
    case: Case,
    rank: int = 0,
    world: int = 1,
    first: int = 0,
    scaler: Any = None,
) -> None:
    for x, y in data(case.steps)[first:]:
        stepper.zero_grad()
        batches = zip(x.chunk(case.micro), y.chunk(case.micro), strict=True)
        for i, (inputs, labels) in enumerate(batches):
            sharded: Any = model
            if isinstance(sharded, FSDPModule):
                sharded.set_requires_gradient_sync(i == case.micro - 1)
            mine = inputs.chunk(world)[rank], labels.chunk(world)[rank]
            loss = F.cross_entropy(model(mine[0]), mine[1]) / case.micro
            (loss if scaler is None else scaler.scale(loss)).backward()
        if case.clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        if scaler is None:
            stepper.step()
        else:
            scaler.step(stepper)
            scaler.update()


def run(case: Case, model: Net, rank: int = 0, world: int = 1) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if case.scaler else None
    if scaler is not None:
        own: Any = natgrad.Polar(model, lr=1e-2, grad_scaler=scaler)
        stepper = own
    else:
        stepper, own = make(case.make, model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what does not run
        train(model, stepper, case, rank, world, scaler=scaler)
    return own


def whole(model: nn.Module) -> dict[str, Tensor]:
    named: list[tuple[str, Any]] = [*model.named_parameters()]
    full = ((n, p.full_tensor() if is_shard(p) else p) for n, p in named)
    return {name: p.detach().clone() for name, p in full}


def moved_as_planned(own: Any) -> None:
    """Bytes of the last step by exchange are those of the plan."""
    engine, rank = own.engine, own.engine.comm.rank
    for name in ("reduce_gradients", "share_updates"):
        exchange = engine.plan.exchanges[name]
        back = name == "share_updates"  # what has no gradient has no update either
        moved = [i.name for i in exchange.items if not (back and "idle" in i.name)]
        want = [engine.like.element_size() * x[rank] for x in exchange.volumes(moved)]
        counted = own.traffic()["step"].get(name, {"sent": 0, "received": 0})
        assert [counted["sent"], counted["received"]] == want, name


def every_case(rank: int, world: int, names: list[str]) -> Any:
    found: dict[str, Any] = {}
    kept: dict[str, list[str]] = {}
    for name in names:
        case = CASES[name]
        model = build(case.dtype, case.recomputes)
        options: dict[str, Any] = {"reshard_after_forward": case.reshard}
        if case.replicas > 1:
            shape = case.replicas, world // case.replicas
            names_of = "replicate", "shard"
            options["mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=names_of)
        shard(model, case.wrap, **options)
        with closing(run(case, model, rank, world)) as own:
            own.engine.plan.check()
            moved_as_planned(own)
            states = own.engine.statistics.states
            kept[name] = [n for n, s in states.items() if s.average is not None]
            found[name] = whole(model)
    return found, kept


def one_process(case: Case) -> dict[str, Tensor]:
    model = build(case.dtype, case.recomputes)
    with closing(run(case, model)):
        return whole(model)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_sharded_training_is_that_of_one_process(world: int) -> None:
    names = [name for name, case in CASES.items() if case.replicas == 1]
    if world == 4:
        copies = [name for name, case in CASES.items() if case.replicas > 1]
        names = ["polar", "spngd", "kfac", "shampoo", *copies]
    results = run_world(world, every_case, world, names, timeout=400)
    for name in names:
        case = CASES[name]
        want = one_process(case)
        for parameters, _ in results:
            away = {n: _away(x, want[n]) for n, x in parameters[name].items()}
            assert max(away.values()) < case.bound, (name, away)
        held = [s for _, kept in results for s in kept[name]]
        assert len(held) == len(set(held)), f"{name}: an average is kept twice"


def _away(x: Tensor, want: Tensor) -> float:
    return float((x - want).abs().max())


def strict_steps(rank: int, world: int) -> None:
    """No step gathers anything; a NaN in one shard skips the step on all ranks."""
    for name, dtype in (("polar", torch.float64), ("kfac", torch.float64)):
        model = shard(build(dtype), "blocks")
        stepper, own = make(name, model)
        case = Case(name, steps=2)
        with closing(own), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train(model, stepper, case, rank, world)
            x, y = (t.chunk(world)[rank] for t in data(1)[0])
            F.cross_entropy(model(x), y).backward()
            with Collectives() as seen:
                stepper.step()
            names = [start.name for start in seen.starts]
            assert not [n for n in names if "gather" in n], names
            swaps = [n for n in names if "alltoall" in n]
            calls = own.traffic()["step"]
            planned = [n for n in ("reduce_gradients", "share_updates") if n in calls]
            assert len(swaps) == sum(calls[n]["calls"] for n in planned) == 2
            before = whole(model)
            F.cross_entropy(model(x), y).backward()
            if rank == world - 1:
                grad: Any = model.conv.weight.grad
                local(grad)[0] = torch.nan
            stepper.step()
            assert own.health()["skipped_steps"] == 1
            assert all(torch.equal(before[n], p) for n, p in whole(model).items())
            F.cross_entropy(model(x), y).backward()
            stepper.step()
            assert not torch.equal(before["conv.weight"], whole(model)["conv.weight"])


def refusals(rank: int, world: int) -> list[str]:
    said: list[str] = []

    def refused(kind: type[Exception], make: Callable[[], Any]) -> None:
        with pytest.raises(kind) as caught:
            make()
        said.append(str(caught.value))

    def of(**options: Any) -> Callable[[], Any]:
        chosen = replace(natgrad.Polar.defaults, **options)
        return lambda: natgrad.Polar(shard(build()), options=chosen)

    refused(ValueError, of(strategy="hybrid(0.5)"))
    refused(ValueError, of(placement="measured"))
    refused(ValueError, of(length=natgrad.LayerTrust(reference="now")))
    refused(ValueError, of(fisher="sampled"))
    offloaded = shard(build(), offload_policy=CPUOffloadPolicy(pin_memory=False))
    refused(TypeError, lambda: natgrad.Polar(offloaded))
    partly = build()
    fully_shard(partly.body)
    refused(TypeError, lambda: natgrad.Polar(partly))
    mesh = init_device_mesh("cpu", (world,))
    parallel = build()
    parallelize_module(parallel, mesh, {"head": ColwiseParallel()})
    fully_shard(parallel.body)
    refused(TypeError, lambda: natgrad.Polar(parallel))
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("data", "layers"))
    apart = build()
    parallelize_module(apart, mesh["layers"], {"head": ColwiseParallel()})
    refused(TypeError, lambda: natgrad.Polar(apart))
    tuned = shard(build())
    host = torch.optim.SGD(tuned.parameters(), lr=0.1)
    refused(ValueError, lambda: natgrad.KFAC(tuned, host, damping="auto"))
    with closing(natgrad.Polar(shard(build()))) as optimizer:
        refused(RuntimeError, optimizer.watch)
    return said


def half_precision(rank: int, world: int) -> None:
    """Sharded weights and what is learned of them stay in float32."""
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    )
    model = shard(build(torch.float32), "blocks", mp_policy=policy)
    want = one_process(Case("polar", steps=3, dtype=torch.float32))
    with closing(run(Case("polar", steps=3), model, rank, world)) as own:
        states = own.engine.statistics.states.values()
        kept = [s.average for s in states if s.average is not None]
        assert kept
        assert all(x.dtype == torch.float32 for x in kept)
        found = whole(model)
        for name, x in found.items():
            assert x.dtype == torch.float32
            assert (x - want[name]).norm() < 0.05 * want[name].norm(), name


def all_else(rank: int, world: int) -> list[str]:
    strict_steps(rank, world)
    half_precision(rank, world)
    return refusals(rank, world)


def test_a_step_gathers_nothing_and_what_cannot_be_sharded_is_said() -> None:
    said = run_world(2, all_else, 2, timeout=200)[0]
    found = [
        "strategy='hybrid(0.5)'",
        "placement='measured'",
        "reference='now'",
        "fisher='sampled'",
        "CPUOffloadPolicy",
        "is whole on every rank",
        "is whole on every rank",
        "mesh of a part",
        '"auto"',
        "watch",
    ]
    for text, message in zip(found, said, strict=True):
        assert text in message
        assert "Must" in message
