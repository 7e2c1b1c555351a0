"""One model's own seconds on one rank, by what a step does.

Measured in a process of its own, as it would train: memory that other work has touched
before makes large tensors cheaper.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from natgrad import KFAC, Every
from natgrad.plan.autotune import ModelTimes
from natgrad_lab.errors import UserError
from natgrad_lab.models import build
from natgrad_lab.simulate.operations import now
from natgrad_lab.simulate.work import lab_settings

CYCLE = 4
"""Steps between inversions; statistics are estimated in every other step."""


def in_own_process(name: str, batch: int, device: str = "cpu") -> ModelTimes:
    """`model_times` on a device, in a new process."""
    command = [sys.executable, "-m", "natgrad_lab.simulate.modeltimes", name]
    command += [str(batch), device]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"{name} could not be measured:\n{done.stderr[-2000:]}")
    return ModelTimes(**json.loads(done.stdout.splitlines()[-1]))


def model_times(name: str, batch: int, cycles: int = 6) -> ModelTimes:
    """Measure a lab model: SGD alone, then with K-FAC, whose steps differ in kind.

    Steps that estimate, and steps that also invert, take longer than the others: by
    ``statistics`` and by ``invert``. What the others take more than SGD's is
    ``precondition``, timed on its own, and ``overhead``.
    """
    settings, shape = lab_settings(name)
    model = build(name, **settings)
    x, y = torch.randn(batch, *shape), torch.randint(10, (batch,))
    if name == "gpt":
        x = torch.randint(settings["vocabulary"], (batch, *shape))
        y = torch.randint(settings["vocabulary"], (batch, *shape))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    plain = _steps(model, optimizer, x, y, cycles)
    forward, backward, update = (
        median(each[part] for kind in plain for each in kind) for part in range(3)
    )
    refresh = Every(statistics=2, inverses=CYCLE)
    with KFAC(model, optimizer, refresh=refresh) as kfac:
        curved = _steps(model, optimizer, x, y, cycles)
        apply = _precondition(kfac, model, x, y)
    inverting, idle, estimating, other = (
        median(sum(each) for each in kind) for kind in curved
    )
    idle = (idle + other) / 2
    return ModelTimes(
        batch=batch,
        forward=forward,
        backward=backward,
        update=update,
        statistics=max(0.0, estimating - idle),
        invert=max(0.0, inverting - estimating),
        precondition=apply,
        overhead=max(0.0, idle - forward - backward - update - apply),
    )


def _steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    x: Tensor,
    y: Tensor,
    cycles: int,
) -> list[list[tuple[float, float, float]]]:
    """Seconds of forward, backward and update, by the step's place in a cycle."""
    found: list[list[tuple[float, float, float]]] = [[] for _ in range(CYCLE)]
    for step in range(CYCLE * (cycles + 1)):
        optimizer.zero_grad()
        times = [now()]
        outputs = model(x)
        loss = F.cross_entropy(outputs.flatten(0, -2), y.flatten())
        times.append(now())
        loss.backward()
        times.append(now())
        optimizer.step()
        times.append(now())
        if step >= CYCLE:
            a, b, c, d = times
            found[step % CYCLE].append((b - a, c - b, d - c))
    return found


def _precondition(kfac: KFAC, model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Seconds of preconditioning every block once."""
    F.cross_entropy(model(x).flatten(0, -2), y.flatten()).backward()
    engine = kfac.engine
    gradients = {b.name: b.gradient() for b in engine.blocks}
    known = {name: g for name, g in gradients.items() if g is not None}
    blocks = [engine.block[name] for name in known]
    spent: list[float] = []
    with torch.no_grad():
        for _ in range(12):
            start = now()
            engine.preconditioner(blocks, known, known)
            spent.append(now() - start)
    return median(spent)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with torch.device(sys.argv[3]):
        print(json.dumps(asdict(model_times(sys.argv[1], int(sys.argv[2])))))
