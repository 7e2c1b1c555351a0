"""Planned bytes are those that a real engine keeps, rank by rank."""

from typing import Any

import pytest
import torch
from tests.support.construct import construct
from tests.support.world import run_world
from torch import nn

import natgrad
from natgrad import KFAC, SPNGD, Adaptive, Budget, Every, Polar, hybrid
from natgrad.plan.memory import memory_of
from natgrad_lab.simulate.memory import keeps_of, momentum_of

OFTEN, RARELY = Every(), Every(statistics=1, inverses=3)
CASES: dict[str, tuple[type, dict[str, Any]]] = {
    "kfac": (KFAC, {"refresh": OFTEN}),
    "kfac, inverses": (
        KFAC,
        {"rule": natgrad.Kronecker(style="factored"), "refresh": OFTEN},
    ),
    "layer_wise": (KFAC, {"strategy": "layer_wise", "norm": "full", "refresh": OFTEN}),
    "hybrid": (KFAC, {"strategy": hybrid(0.5), "norm": "diag", "refresh": OFTEN}),
    "no average": (KFAC, {"factor_decay": 0.0, "refresh": OFTEN}),
    "waiting": (KFAC, {"factor_decay": 0.0, "refresh": RARELY}),
    "watched": (KFAC, {"factor_decay": 0.0, "refresh": Budget(overhead=10.0)}),
    "judged": (KFAC, {"refresh": Adaptive(tolerance=1e-9)}),
    "ekfac": (KFAC, {"rule": natgrad.EKFAC(), "refresh": OFTEN}),
    "ekfac, alone": (
        KFAC,
        {"rule": natgrad.EKFAC(), "strategy": "layer_wise", "refresh": OFTEN},
    ),
    "ekfac, waiting": (
        KFAC,
        {"rule": natgrad.EKFAC(), "factor_decay": 0.0, "refresh": RARELY},
    ),
    "soap": (
        KFAC,
        {
            "rule": natgrad.EigenAdam(),
            "length": natgrad.Free(),
            "fallback": natgrad.Adam(),
            "refresh": OFTEN,
        },
    ),
    "soap, averaged": (
        SPNGD,
        {
            "rule": natgrad.EigenAdam(),
            "average": natgrad.AverageGradients(),
            "refresh": RARELY,
        },
    ),
    "spngd": (SPNGD, {"refresh": Adaptive(tolerance=1e-9)}),
    "spngd, everywhere": (SPNGD, {"strategy": "factor_wise", "refresh": OFTEN}),
    "polar": (Polar, {"refresh": OFTEN}),
}
STEPS = 5


class Network(nn.Module):
    """Convolution, norm, linear, and a parameter of no known layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.linear = nn.Linear(4, 3, bias=False)
        self.gain = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norm(self.conv(x))).mean((2, 3))
        return self.gain * self.linear(y)


def bytes_of(tensors: list[torch.Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def kept_on(rank: int, case: str) -> tuple[dict[str, int], dict[str, int]]:
    """What this rank keeps after a few steps, and what was planned for it."""
    kind, options = CASES[case]
    torch.manual_seed(0)
    model = Network()
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    curved = kind is KFAC
    chosen = options if curved else {"lr": 1e-3, **options}
    made: Any = construct(kind, model, sgd if curved else None, **chosen)
    generator = torch.Generator().manual_seed(rank)
    optimizer: Any = sgd if curved else made
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(8, 2, 4, 4, generator=generator)).square().mean().backward()
        optimizer.step()
    engine = made.engine
    states = list(engine.statistics.states.values())
    buffers = [x for s in optimizer.state.values() for x in s.values()]
    moments = engine.moments.states.values()
    means = [m.mean for m in moments if m.mean is not None]
    real = {
        "statistics": bytes_of([s.average for s in states if s.average is not None]),
        "history": bytes_of([x for s in states for x in s.history]),
        "inverses": bytes_of([x for s in states for x in s.inverse or ()]),
        "moments": bytes_of([m.square for m in moments] + means),
        "momentum": bytes_of([x for x in buffers if isinstance(x, torch.Tensor)]),
    }
    ruled = [("", b) for b in engine.blocks] if kind is Polar else []
    planned = memory_of(engine.plan, keeps_of(engine.options, ruled))[rank]
    planned["momentum"] = momentum_of(engine.plan, sharded=not curved)[rank]
    made.close()
    return real, planned


def all_on(rank: int) -> dict[str, tuple[dict[str, int], dict[str, int]]]:
    return {case: kept_on(rank, case) for case in CASES}


@pytest.mark.parametrize("case", CASES)
def test_one_rank_keeps_what_was_planned(case: str) -> None:
    real, planned = kept_on(0, case)
    assert real == planned


@pytest.mark.processes
@pytest.mark.parametrize("world", [2])
def test_several_ranks_keep_what_was_planned(world: int) -> None:
    for found in run_world(world, all_on, timeout=240):
        for case, (real, planned) in found.items():
            assert real == planned, case
