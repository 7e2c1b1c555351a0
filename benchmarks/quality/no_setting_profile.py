"""Where the seconds of a self-tuned step are: see `benchmarks.quality.no_setting`."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import natgrad
from benchmarks.quality.no_setting_tasks import TASKS, Task
from natgrad.quadratic.replay import Replay, Run

STEPS, TIMES = 60, 15


def milliseconds(call: Callable[[], Any]) -> float:
    """The median CPU time of a call."""
    call()
    found: list[float] = []
    for _ in range(TIMES):
        began = time.process_time()
        call()
        found.append(1e3 * (time.process_time() - began))
    return median(found)


def row(task: Task) -> list[float]:
    """Milliseconds: forward, and backward, both products, Adam's step and ours."""
    torch.manual_seed(0)
    model, batches = task.network(), task.batches(0)
    at = next(batches)
    run = Run(lambda: task.closure(model, at), [torch.device("cpu")])
    weights = {n: p.detach() for n, p in model.named_parameters()}
    two = [{n: torch.randn_like(w) for n, w in weights.items()} for _ in range(2)]
    replay = Replay(model, nullcontext)
    adam = torch.optim.Adam(model.parameters(), lr=0.0)

    def both() -> Tensor:
        loss = task.closure(model, at)[1]
        loss.backward()
        return loss

    def plain() -> None:
        adam.zero_grad()
        both()
        adam.step()

    forward = milliseconds(lambda: task.closure(model, at))
    passes = [
        milliseconds(both),
        milliseconds(lambda: replay.tangents(run, weights, two)),
    ]
    return [forward, *passes, milliseconds(plain), _own(task, model, batches)]


def _own(task: Task, model: nn.Module, batches: Any) -> float:
    """The mean of a training's steps: those that refresh cost more."""
    optimizer = natgrad.SPNGD(model, lr="auto", momentum="auto", damping="auto")
    began = time.process_time()
    for _, at in zip(range(STEPS), batches, strict=False):
        optimizer.step(lambda at=at: task.closure(model, at))
    spent = 1e3 * (time.process_time() - began) / STEPS
    optimizer.close()
    return spent


def profile(tasks: list[str]) -> dict[str, list[float]]:
    """The rows of the tasks."""
    return {name: row(TASKS[name]()) for name in tasks}


def table(rows: dict[str, list[float]]) -> str:
    """Markdown."""
    lines = [
        "| task, CPU ms | forward | forward and backward | forward-mode pass, two "
        "directions | step of Adam | step of `auto` |",
        "|---|---|---|---|---|---|",
    ]
    for name, values in rows.items():
        lines.append(" | ".join([f"| {name}", *(f"{v:.2f}" for v in values)]) + " |")
    return "\n".join(lines)
