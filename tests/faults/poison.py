"""Numbers that are not finite, put where a training step meets them."""

import hashlib
import math
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import natgrad
from natgrad.math import inverse as inverses

PLACES = ("batch", "activation", "gradient", "statistic", "inverse")
GAP = 3


@dataclass(frozen=True, kw_only=True)
class Poison:
    """A value at a place, on one rank or (None) all, before the step-th recovery."""

    step: int
    place: str
    value: float
    rank: int | None

    def here(self, rank: int) -> bool:
        """Whether this rank is poisoned."""
        return self.rank in (None, rank)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Linear(4, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 3))
    return nn.Sequential(*layers)


def make(method: str, model: nn.Module) -> tuple[Any, Any, Any]:
    """What is called, what is stepped, and what is asked for its health."""
    options: dict[str, Any] = {"refresh": natgrad.Every(), "decay": 0.5, "damping": 0.1}
    options["comm"] = natgrad.CommOptions(overlap=False)
    if method == "spngd":
        optimizer = natgrad.SPNGD(model, lr=0.01, **options)
        return model, optimizer, optimizer
    replica = model
    if dist.is_initialized():
        replica = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.01, momentum=0.9)
    return replica, optimizer, natgrad.KFAC(replica, optimizer, norm="unit", **options)


def train_poisoned(rank: int, method: str, poisons: list[Poison]) -> dict[str, Any]:
    """Train with all of them, two good steps between each; what is left of the run."""
    warnings.simplefilter("ignore")
    model = network()
    replica, optimizer, natural = make(method, model)
    generator = torch.Generator().manual_seed(100 + rank)
    alike = True
    for poison in poisons:
        for turn in range(GAP):
            chosen = poison if turn == 1 else None
            _step(replica, model, optimizer, natural, chosen, rank, generator)
        alike &= _alike(model)
    report = {"health": natural.health(), "digest": digest(model), "alike": alike}
    report["finite"] = all(bool(p.isfinite().all()) for p in model.parameters())
    kept = natural.engine.statistics.states.values()
    held = [x for s in kept for x in (*(s.inverse or ()), *s.history)]
    held += [s.average for s in kept if s.average is not None]
    report["finite"] &= all(bool(x.isfinite().all()) for x in held)
    natural.close()
    return report


def _step(
    replica: Any,
    model: Any,
    optimizer: Any,
    natural: Any,
    poison: Poison | None,
    rank: int,
    generator: torch.Generator,
) -> None:
    x = torch.randn(8, 4, generator=generator)
    y = torch.randint(0, 3, (8,), generator=generator)
    bad = poison if poison is not None and poison.here(rank) else None
    place, value = (bad.place, bad.value) if bad else ("", 0.0)
    if place == "batch":
        x[0, 0] = value
    handle = None
    if place == "activation":
        handle = model[1].register_forward_hook(lambda *a: a[2] + value)
    optimizer.zero_grad()
    nn.functional.cross_entropy(replica(x), y).backward()
    if handle is not None:
        handle.remove()
    if place == "gradient":
        weight: Any = model[3].weight.grad
        weight[0, 0] = value
    if place == "statistic":
        natural.engine.capture.current.sums["3/A"].fill_(value)
    if place == "inverse":
        with _spoiled_solvers(value):
            optimizer.step()
    else:
        optimizer.step()


class _spoiled_solvers:
    """Inside, every decomposition on this rank comes out as not finite."""

    def __init__(self, value: float) -> None:
        self._value = value

    def __enter__(self) -> None:
        self._kept = inverses._eigh, inverses._inverse
        value = self._value if not math.isinf(self._value) else math.inf

        def eigh(matrix: Tensor, damping: Tensor) -> Any:
            vectors, values = self._kept[0](matrix, damping)
            return vectors, values + value

        def inverse(matrix: Tensor, damping: Tensor) -> Tensor:
            return self._kept[1](matrix, damping) + value

        inverses._eigh, inverses._inverse = eigh, inverse

    def __exit__(self, *error: object) -> None:
        inverses._eigh, inverses._inverse = self._kept


def digest(model: nn.Module) -> str:
    """Equal just when all parameters are, to the last bit."""
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    return hashlib.blake2b(flat.numpy().tobytes(), digest_size=8).hexdigest()


def _alike(model: nn.Module) -> bool:
    heard: list[Any] = [digest(model)]
    if dist.is_initialized():
        heard = [None] * dist.get_world_size()
        dist.all_gather_object(heard, digest(model))
    return len(set(heard)) == 1
