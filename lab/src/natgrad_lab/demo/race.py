"""Train an optimizer on a task of the demo, and keep its curve."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import natgrad
from natgrad_lab.demo.tasks import Data, Task

POINTS = 30
"""Values in a curve."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """An optimizer: how it is made for a network, and the rates that a sweep tries.

    A contender without rates finds its own, and has no schedule.
    """

    name: str
    make: Callable[[nn.Module, float], Any]
    rates: tuple[float, ...] = ()
    ours: bool = False


@dataclass(frozen=True, kw_only=True)
class Race:
    """What came out: the value after each of some steps, and the seconds until then."""

    contender: str
    rate: float | None
    steps: tuple[int, ...]
    values: tuple[float, ...]
    seconds: tuple[float, ...]

    @property
    def final(self) -> float:
        """The value at the end of the schedule."""
        return self.values[-1]

    def reaches(self, value: float) -> tuple[int, float] | None:
        """Steps and seconds until a value is reached and not lost again."""
        for i in range(len(self.values)):
            if all(later <= value for later in self.values[i:]):
                return self.steps[i], self.seconds[i]
        return None


def _sgd(model: nn.Module, rate: float) -> Any:
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)


def _adamw(model: nn.Module, rate: float) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=rate)


CONTENDERS = {
    each.name: each
    for each in (
        Contender(name="SGD", make=_sgd, rates=(0.01, 0.03, 0.1, 0.3, 1.0)),
        Contender(name="AdamW", make=_adamw, rates=(0.001, 0.003, 0.01, 0.03, 0.1)),
        Contender(
            name="Muon",
            make=lambda model, rate: natgrad.Muon(model, lr=rate),
            rates=(0.001, 0.003, 0.01, 0.03, 0.1),
        ),
        Contender(
            name="SOAP",
            make=lambda model, rate: natgrad.SOAP(model, lr=rate),
            rates=(0.001, 0.003, 0.01, 0.03, 0.1),
        ),
        Contender(
            name="Polar",
            make=lambda model, rate: natgrad.Polar(model, lr=rate),
            rates=(0.02, 0.05, 0.1, 0.2, 0.4),
            ours=True,
        ),
        Contender(
            name="SPNGD, nothing set",
            make=lambda model, _: natgrad.SPNGD(
                model, lr="auto", momentum="auto", damping="auto"
            ),
            ours=True,
        ),
    )
}


def race(
    task: Task,
    contender: Contender,
    rate: float | None,
    seed: int,
    advance: Callable[[], None] = lambda: None,
) -> Race:
    """One training, with the rate falling linearly to zero."""
    torch.manual_seed(seed)
    model, (train, test) = task.network(), task.data()
    optimizer = contender.make(model, rate or 0.0)
    rates = [group["lr"] for group in optimizer.param_groups]
    looks = {round(task.steps * (i + 1) / POINTS) for i in range(POINTS)}
    steps, values, seconds, spent = list[int](), list[float](), list[float](), 0.0
    for step, batch in zip(range(task.steps), task.batches(train, seed), strict=False):
        began = time.perf_counter()
        if rate is not None:
            for group, first in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = first * (1 - step / task.steps)
        _step(task, model, optimizer, batch, finds=rate is None)
        spent += time.perf_counter() - began
        advance()
        if step + 1 in looks:
            steps.append(step + 1)
            values.append(_judged(task, model, test))
            seconds.append(spent)
    if hasattr(optimizer, "close"):
        optimizer.close()
    return Race(
        contender=contender.name,
        rate=rate,
        steps=tuple(steps),
        values=tuple(values),
        seconds=tuple(seconds),
    )


def _step(
    task: Task, model: nn.Module, optimizer: Any, batch: Data, finds: bool
) -> None:
    inputs, targets = batch

    def closure() -> tuple[torch.Tensor, torch.Tensor]:
        outputs = model(inputs)
        return outputs, task.loss(outputs, targets)

    if finds:
        optimizer.step(closure)
        return
    optimizer.zero_grad()
    closure()[1].backward()
    optimizer.step()


@torch.no_grad()
def _judged(task: Task, model: nn.Module, test: Data) -> float:
    model.eval()
    value = task.value(model(test[0]), test[1])
    model.train()
    return value
