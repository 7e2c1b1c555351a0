"""A step reads few numbers back from the device, however many layers there are.

Each read waits until the device has done all that was asked of it. The bounds are of a
whole step that refreshes everything; one that refreshes nothing reads once.
"""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.construct import construct
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

import natgrad
from natgrad import KFAC, SPNGD, Adaptive, Every, Polar

Make = Callable[[nn.Module], Optimizer]


class Reads(TorchDispatchMode):
    """Counts what makes the host wait for a value."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.count = 0
        tolist = Tensor.tolist

        def counted(x: Tensor) -> Any:
            self.count += 1
            return tolist(x)

        monkeypatch.setattr(Tensor, "tolist", counted)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        names = ("_local_scalar_dense", "is_nonzero", "nonzero", "equal")
        self.count += func.overloadpacket.__name__ in names
        return func(*args, **(kwargs or {}))


def deep(layers: int) -> nn.Sequential:
    """Layers of three shapes, so that not all are done together."""
    torch.manual_seed(0)
    found: list[nn.Module] = []
    for i in range(layers):
        size = 4 + i % 3
        found += [nn.Linear(5, size), nn.BatchNorm1d(size), nn.Tanh()]
        found += [nn.Linear(size, 5)]
    return nn.Sequential(*found).double()


def kfac(**options: Any) -> Make:
    def make(model: nn.Module) -> Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        chosen: dict[str, Any] = {"norm": "unit", "refresh": Every()}
        construct(KFAC, model, optimizer, **(chosen | options))
        return optimizer

    return make


EVERY = Every(statistics=3, inverses=3)
# reads of a step that refreshes all: the verdict, and one check of each sort of result
RULES: dict[str, tuple[Make, int]] = {
    "kfac-eigen": (kfac(), 3),
    "kfac-factored": (kfac(rule=natgrad.Kronecker(style="factored")), 2),
    "kfac-tracked": (kfac(rule=natgrad.Kronecker(basis="tracked")), 3),
    "kfac-corrected": (kfac(rule=natgrad.EKFAC(style="relative")), 3),
    "kfac-adaptive": (kfac(rule=natgrad.EigenAdam(), fallback=natgrad.Adam()), 3),
    "spngd": (lambda model: SPNGD(model, lr=0.01, refresh=Adaptive(1e9)), 3),
    # inverses, and roots of layers that a normalisation follows
    "polar": (lambda model: Polar(model, lr=0.01, refresh=Every()), 3),
}


def reads_of(make: Make, layers: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    model = deep(layers)
    optimizer = make(model)
    found: list[int] = []
    for step in range(4):
        torch.manual_seed(step)
        optimizer.zero_grad()
        with Reads(monkeypatch) as reads:
            F.mse_loss(model(torch.randn(8, 5).double()), torch.zeros(8, 5)).backward()
            optimizer.step()
        monkeypatch.undo()
        found.append(reads.count)
    return found


@pytest.mark.parametrize("rule", RULES)
def test_reads_do_not_grow_with_the_layers(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, bound = RULES[rule]
    few = reads_of(make, 2, monkeypatch)
    many = reads_of(make, 7, monkeypatch)
    assert few == many
    assert max(many) <= bound, many


def test_a_step_without_refresh_reads_once(monkeypatch: pytest.MonkeyPatch) -> None:
    makes = (
        kfac(refresh=EVERY),
        lambda model: SPNGD(model, lr=0.01, refresh=EVERY),
        lambda model: Polar(model, lr=0.01, refresh=EVERY),
    )
    for make in makes:
        assert reads_of(make, 3, monkeypatch)[1:3] == [1, 1]


class Operations(TorchDispatchMode):
    """Counts the operations that torch is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def convolutions() -> nn.Sequential:
    """19 convolutions of six shapes with BatchNorm, and a head: as ResNet-20."""
    torch.manual_seed(0)
    found: list[nn.Module] = []
    widths = [3, *[4] * 7, *[8] * 6, *[16] * 6]
    for before, after in itertools.pairwise(widths):
        found += [nn.Conv2d(before, after, 3, padding=1, bias=False)]
        found += [nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(
        *found, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)
    )


# Of a step that refreshes nothing, beyond those of torch.optim.SGD.
OPERATIONS: dict[str, tuple[Make, int]] = {
    "kfac": (kfac(refresh=Every(statistics=9, inverses=9), norm="skip"), 233),
    "polar": (lambda model: Polar(model, lr=0.01, refresh=EVERY), 400),
    "muon": (lambda model: natgrad.Muon(model, lr=0.01), 203),
}


def operations_of(make: Make) -> int:
    model = convolutions()
    optimizer = make(model)
    found = Operations()
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(torch.randn(2, 3, 8, 8)), torch.tensor([1, 2])).backward()
        found.count = 0
        with found:
            optimizer.step()
    return found.count


@pytest.mark.parametrize("rule", OPERATIONS)
def test_a_plain_step_takes_few_operations(rule: str) -> None:
    sgd = operations_of(
        lambda model: torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    )
    make, bound = OPERATIONS[rule]
    assert operations_of(make) - sgd <= bound
