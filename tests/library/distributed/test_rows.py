"""Every rule of a parameter group on several ranks: as one process, and resumed."""

import io
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from tests.support.world import run_world
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import natgrad
from natgrad import (
    SPNGD,
    Adam,
    Adaptive,
    AverageGradients,
    EigenAdam,
    Every,
    FixedNorm,
    Free,
    Kronecker,
    LayerTrust,
    Matrices,
    MuonLength,
    Orthogonal,
    Plain,
    Rule,
)

STEPS = 5
MIDDLE = 2
"""Of an interval: SOAP's average has been projected, and follows in its bases."""
STRATEGIES = ("spngd", "layer_wise", "factor_wise", "hybrid(0.5)")
MUON = Orthogonal(sides="none", iteration="muon")
TRUST = LayerTrust(reference="now", memory=None)
FREE = Free()


@dataclass(frozen=True, kw_only=True)
class Toy(Rule):
    """A user's rule: rows of this step's gradient at length 1, with a memory."""

    name: ClassVar[str] = "toy"
    sides: Any = "none"
    beta: float = 0.5

    def moment_shape(self, shape: tuple[int, int, int]) -> tuple[int, int, int]:
        """One number a row."""
        return *shape[:2], 1

    def apply(self, x: Matrices) -> Tensor:
        """V over the running norm of its rows."""
        rows = torch.linalg.vector_norm(x.direction, dim=2, keepdim=True)
        return x.direction / (x.moment(rows, self.beta).sqrt() + 1e-12)


ROWS: dict[str, dict[str, Any]] = {
    "shampoo": {
        "rule": Kronecker(source="gradients", power=0.25, style="whole"),
        "factor_decay": 1.0,
    },
    "soap": {"rule": natgrad.SOAP.defaults.rule, "average": AverageGradients()},
    "soap-muon": {
        "rule": replace(EigenAdam(source="gradients", late=True), orthogonal=True),
        "length": MuonLength(),
    },
    "muon": {"rule": MUON, "length": MuonLength(normalise=False)},
    "normuon": {"rule": replace(MUON, beta2=0.9), "length": MuonLength()},
    "muonh": {"rule": MUON, "length": LayerTrust(memory=None), "decay": FixedNorm()},
    "newton-muon": {
        "rule": replace(MUON, sides="inputs", whitening="full"),
        "length": MuonLength(),
    },
    "pmuon": {
        "rule": replace(
            MUON, sides="both", source="gradients", whitening="full", power=0.3
        ),
        "length": MuonLength(),
        "refresh": Adaptive(),
    },
    "lars": {"rule": Plain(), "length": TRUST},
    "lamb": {"rule": Adam(), "length": TRUST, "average": AverageGradients()},
    "toy": {"rule": Toy()},
}


def net() -> nn.Sequential:
    """Square: in the null space of SOAP's first factors rounding chooses the basis."""
    torch.manual_seed(0)
    layers = nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)
    return nn.Sequential(*layers).double()


def backward(model: nn.Module, step: int, rank: int, world: int) -> None:
    """The gradient of this rank's part of the step's twelve examples."""
    source = torch.Generator().manual_seed(step)
    x = torch.randn(12, 5, generator=source, dtype=torch.float64)
    y = torch.randn(12, 5, generator=source, dtype=torch.float64)
    share = slice(rank * 12 // world, (rank + 1) * 12 // world)
    model.zero_grad()
    F.mse_loss(model(x[share]), y[share]).backward()


def made(model: nn.Module, parts: dict[str, Any], strategy: str) -> SPNGD:
    base: dict[str, Any] = {
        "length": FREE,
        "lr": 0.02,
        "damping": 0.1,
        "factor_decay": 0.9,
        "refresh": Every(1, 3),
        "strategy": strategy,
    }
    return SPNGD(model, options=replace(SPNGD.defaults, **(base | parts)))


def loaded(state: Any) -> Any:
    """Through a file that is read as plain data."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def trained(
    parts: dict[str, Any],
    *,
    strategy: str = "spngd",
    rank: int = 0,
    world: int = 1,
    ddp: bool = False,
    stop: int | None = None,
    change: Callable[[Any], Any] = lambda state: state,
) -> tuple[Tensor, bool]:
    """Weights after some steps, and whether each moved the bytes that were planned."""
    plain = net()
    model = DistributedDataParallel(plain) if ddp else plain
    optimizer, as_planned = made(model, parts, strategy), True
    for step in range(STEPS):
        if step == stop:
            optimizer.gather()
            state = change(loaded(optimizer.state_dict()))
            optimizer.close()
            optimizer = made(model, parts, strategy)
            optimizer.load_state_dict(state)
        backward(model, step, rank, world)
        optimizer.step()
        as_planned &= world == 1 or _as_planned(optimizer, rank)
    optimizer.close()
    return torch.cat([p.detach().flatten() for p in plain.parameters()]), as_planned


def _as_planned(optimizer: SPNGD, rank: int) -> bool:
    """All that moved in the last step: what was due of statistics, and all else."""
    engine = optimizer.engine
    plan, moved = engine.plan, optimizer.traffic()["step"]
    last = engine.statistics.last
    present = [b.name for b in engine.blocks]
    # SOAP's first step only makes the bases: its matrices do not move
    first = engine.step == 1
    moving = [b.name for b in engine.blocks if not (first and b.rule.late)]
    due = {
        "reduce_statistics": last.estimated,
        "share_inverses": last.inverted,
        "share_updates": moving,
    }
    for name, exchange in plan.exchanges.items():
        volumes = exchange.volumes(due.get(name, present))
        planned = [8 * volumes[way][rank] for way in (0, 1)]
        found = moved.get(name, {"sent": 0, "received": 0})
        if planned != [found["sent"], found["received"]]:
            return False
    return True


def every_cell(rank: int, world: int, some: bool) -> dict[Any, tuple[Tensor, bool]]:
    """With ``some``, DDP and own gradients take turns, and change places on 3 ranks."""
    found: dict[Any, tuple[Tensor, bool]] = {}
    for number, (name, parts) in enumerate(ROWS.items()):
        for ddp in (False, True):
            for i, strategy in enumerate(STRATEGIES):
                if some and (i + number // 2 + ddp + world) % 2:
                    continue
                stop = MIDDLE if (i + number) % 2 else None
                found[name, ddp, strategy] = trained(
                    parts, strategy=strategy, rank=rank, world=world, ddp=ddp, stop=stop
                )
    return found


@pytest.mark.parametrize(
    ("world", "some"),
    [
        (2, True),
        (3, True),
        pytest.param(2, False, marks=pytest.mark.long),
        pytest.param(3, False, marks=pytest.mark.long),
    ],
)
def test_every_row_on_several_ranks_is_one_process(world: int, some: bool) -> None:
    alone = {name: trained(parts)[0] for name, parts in ROWS.items()}
    for found in run_world(world, every_cell, world, some, timeout=240):
        for (name, ddp, strategy), (weights, as_planned) in found.items():
            cell = f"{name}, {strategy}, {'DDP' if ddp else 'own gradients'}"
            assert as_planned, cell
            torch.testing.assert_close(
                weights, alone[name], rtol=1e-7, atol=1e-9, msg=lambda m, c=cell: c + m
            )


@pytest.mark.parametrize("name", ROWS)
def test_every_row_resumes_in_mid_interval(name: str) -> None:
    whole, _ = trained(ROWS[name])
    resumed, _ = trained(ROWS[name], stop=MIDDLE)
    torch.testing.assert_close(resumed, whole, rtol=0, atol=0)


def without_means(state: Any) -> Any:
    """As natgrad saved it before averages were kept in their bases."""
    for entry in state["natgrad"]["moments"].values():
        assert entry.pop("mean") is not None
    return state


def test_a_state_without_averages_in_bases_goes_on_too() -> None:
    """By another projection, so up to rounding only."""
    whole, _ = trained(ROWS["soap"])
    resumed, _ = trained(ROWS["soap"], stop=MIDDLE, change=without_means)
    torch.testing.assert_close(resumed, whole, rtol=1e-9, atol=1e-12)


def test_a_users_rule_is_in_the_report() -> None:
    optimizer = made(net(), ROWS["toy"], "spngd")
    assert "toy" in optimizer.report()


# -- what no group names ---------------------------------------------------------------


def shared_work(rank: int = 0, world: int = 1) -> Tensor:
    """Two layers are ours, the third is SGD's; no DDP."""
    model: Any = net()
    named = [(n, p) for n, p in model.named_parameters() if not n.startswith("4")]
    optimizer = natgrad.Polar(model, [{"params": named}], lr=0.05)
    other = torch.optim.SGD(model[4].parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        backward(model, step, rank, world)
        optimizer.step()
        other.step()
    optimizer.close()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_another_optimizer_gets_the_mean_gradient_of_all_ranks() -> None:
    alone = shared_work()
    for weights in run_world(2, shared_work, 2):
        torch.testing.assert_close(weights, alone, rtol=1e-9, atol=1e-11)
