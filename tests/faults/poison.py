"""Numbers that are not finite, put where a training step meets them."""

import hashlib
import math
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from tests.support.construct import construct
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import natgrad
from natgrad.math import inverse as inverses

PLACES = ("batch", "activation", "gradient", "statistic", "inverse")
METHODS = ("spngd", "ddp", "scaler")
"""SPNGD; KFAC under DDP; the same in float16 with a `GradScaler`."""
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


def make(method: str, model: nn.Module) -> tuple[Any, Any, Any, Any]:
    """What is called, what is stepped, what is asked for its health, and a scaler."""
    options: dict[str, Any] = {
        "refresh": natgrad.Every(),
        "factor_decay": 0.5,
        "damping": 0.1,
    }
    options["comm"] = natgrad.CommOptions(overlap=False)
    if method == "spngd":
        optimizer = construct(natgrad.SPNGD, model, lr=0.01, **options)
        return model, optimizer, optimizer, None
    replica = model
    if dist.is_initialized():
        replica = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.01, momentum=0.9)
    scaler = None
    if method == "scaler":
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    options |= {"norm": "unit", "grad_scaler": scaler}
    return (
        replica,
        optimizer,
        construct(natgrad.KFAC, replica, optimizer, **options),
        scaler,
    )


def train_poisoned(rank: int, method: str, poisons: list[Poison]) -> dict[str, Any]:
    """Train with all of them, two good steps between each; what is left of the run."""
    warnings.simplefilter("ignore")
    model = network()
    run = _Run(model, *make(method, model), rank)
    natural, alike, failed = run.natural, True, 0
    for poison in poisons:
        for turn in range(GAP):
            run.step(poison if turn == 1 else None)
            failed += turn == 1 and bool(natural.health()["failures"])
        alike &= _alike(model)
    report = {"health": natural.health(), "digest": digest(model), "alike": alike}
    report["failed"] = failed
    report["finite"] = all(bool(p.isfinite().all()) for p in model.parameters())
    kept = natural.engine.statistics.states.values()
    held = [x for s in kept for x in (*(s.inverse or ()), *s.history)]
    held += [s.average for s in kept if s.average is not None]
    report["finite"] &= all(bool(x.isfinite().all()) for x in held)
    natural.close()
    return report


class _Run:
    """A model in training, whose steps can be poisoned."""

    def __init__(
        self,
        model: Any,
        replica: Any,
        optimizer: Any,
        natural: Any,
        scaler: torch.amp.GradScaler | None,
        rank: int,
    ) -> None:
        self.model, self.replica, self.optimizer = model, replica, optimizer
        self.natural, self.scaler, self.rank = natural, scaler, rank
        self._generator = torch.Generator().manual_seed(100 + rank)

    def step(self, poison: Poison | None = None) -> None:
        """One step, in which a poison may be met."""
        x = torch.randn(8, 4, generator=self._generator)
        y = torch.randint(0, 3, (8,), generator=self._generator)
        bad = poison if poison is not None and poison.here(self.rank) else None
        place, value = (bad.place, bad.value) if bad else ("", 0.0)
        if place == "batch":
            x[0, 0] = value
        handle = self._hook(place, value)
        self.optimizer.zero_grad()
        self._backward(x, y)
        if handle is not None:
            handle.remove()
        if place == "gradient" and self.scaler is None:
            self.model[3].weight.grad[0, 0] = value
        sums = self.natural.engine.capture.current.sums
        if place == "statistic":
            sums["3/A"].fill_(value)
        with _spoiled_solvers(value) if place == "inverse" else nullcontext():
            self._update()

    def _hook(self, place: str, value: float) -> Any:
        if place == "activation":
            return self.model[1].register_forward_hook(lambda *a: a[2] + value)
        # A scaler decides by what DDP has averaged: the poison must come before it.
        if place == "gradient" and self.scaler is not None:
            return self.model[3].weight.register_hook(lambda g: g + value)
        return None

    def _backward(self, x: Tensor, y: Tensor) -> None:
        half = self.scaler is not None
        with torch.autocast("cpu", dtype=torch.float16, enabled=half):
            outputs = self.replica(x)
        loss = nn.functional.cross_entropy(outputs.float(), y)
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def _update(self) -> None:
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()


def fail_to_invert(rank: int) -> str:
    """Train while nothing on rank 1 can be inverted; what this rank is told."""
    warnings.simplefilter("ignore")
    model = network()
    run = _Run(model, *make("ddp", model), rank)
    bad = Poison(step=0, place="inverse", value=math.nan, rank=1)
    run.step()
    for turn in range(5):
        try:
            run.step(bad)
        except RuntimeError as error:
            return f"{turn}: {error}"
    return "no error"


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
