"""`natgrad calibrate`: measure this machine and write a hardware profile."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from torch import nn
from torch.nn import functional as F

from natgrad.plan.profile import (
    Curve,
    HardwareProfile,
    Link,
    ModelTimes,
    save_profile,
)
from natgrad_lab.errors import UserError
from natgrad_lab.simulate.modeltimes import model_times


@dataclass(frozen=True, kw_only=True)
class Calibrate:
    """Measure products, convolutions, inverses and collectives; write a profile."""

    output: Path = Path("profile.toml")
    """Where the profile goes."""
    sizes: tuple[int, ...] = (32, 64, 128, 256, 512, 1024)
    """Matrix sizes."""
    worlds: tuple[int, ...] = (2,)
    """Numbers of processes for collectives; none: links keep their defaults."""
    models: tuple[str, ...] = ()
    """Lab models whose own seconds are measured as well."""
    batch: int = 32
    """Examples for these models."""
    seconds: float = 0.2
    """At least so long for each measurement."""


def main(arguments: Sequence[str]) -> int:
    """Parse, measure, write."""
    asked = tyro.cli(Calibrate, prog="natgrad calibrate", args=list(arguments))
    if len(asked.sizes) < 2 or min(asked.sizes) < 2:
        raise UserError(f"Invalid sizes={asked.sizes}. Must be two or more, each >= 2.")
    profile = calibrate(asked)
    save_profile(profile, asked.output)
    print(f"profile: {asked.output}")
    return 0


def calibrate(asked: Calibrate) -> HardwareProfile:
    """The profile of this machine, for one thread a process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _calibrate(asked)
    finally:
        torch.set_num_threads(threads)


def _calibrate(asked: Calibrate) -> HardwareProfile:
    short = asked.seconds
    eigen = [
        (n, timed(lambda n=n: torch.linalg.eigh(spd(n)), short)) for n in asked.sizes
    ]
    inverse = [(n, timed(lambda n=n: _cholesky(spd(n)), short)) for n in asked.sizes]
    largest = max(asked.sizes)
    product = timed(lambda: spd(largest) @ spd(largest), short) / (2 * largest**3)
    links = [_collectives(world) for world in asked.worlds]
    models: dict[str, ModelTimes] = {
        name: model_times(name, asked.batch) for name in asked.models
    }
    link, contention = _link(links), _contention(links)
    return HardwareProfile(
        name="this machine",
        source=f"natgrad calibrate, torch {torch.__version__}, one thread",
        flop=product,
        conv_flop=_convolution(short),
        statistics_flop=product,
        layer=timed(lambda: spd(8) @ spd(8), short),
        element=timed(lambda: _VECTOR.add_(1e-9), short) / _VECTOR.numel(),
        eigen=fit_curve(eigen),
        cholesky=fit_curve(inverse),
        ranks_per_node=max([1, *asked.worlds]),
        inside=link,
        between=link,
        contention=contention,
        models=models,
    )


_VECTOR = torch.zeros(1_000_000)
_CACHE: dict[int, torch.Tensor] = {}


def spd(n: int) -> torch.Tensor:
    """A fixed, well-conditioned symmetric matrix."""
    if n not in _CACHE:
        x = torch.randn(n, n, generator=torch.Generator().manual_seed(n))
        _CACHE[n] = x @ x.T / n + torch.eye(n)
    return _CACHE[n]


def _cholesky(x: torch.Tensor) -> torch.Tensor:
    return torch.cholesky_inverse(torch.linalg.cholesky(x))


def _convolution(seconds: float) -> float:
    """Seconds a flop of a 3x3 convolution, forward and backward."""
    layer = nn.Conv2d(32, 32, 3, padding=1, bias=False)
    x = torch.randn(16, 32, 16, 16, requires_grad=True)
    flops = 3 * 2 * 16 * 16 * 16 * 32 * 32 * 9

    def work() -> None:
        F.relu(layer(x)).sum().backward()

    return timed(work, seconds) / flops


def timed(work: Callable[[], Any], seconds: float) -> float:
    """The median of as many calls as fit into ``seconds``, three at least."""
    work()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or (time.perf_counter() < end and len(times) < 200):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def fit_curve(points: Sequence[tuple[int, float]]) -> Curve:
    """call + square n^2 + cube n^3 of least relative error, no term negative."""
    sizes = np.array([n for n, _ in points], dtype=float)
    seconds = np.array([t for _, t in points])
    matrix = np.stack([sizes**0, sizes**2, sizes**3], axis=1) / seconds[:, None]
    kept = [0, 1, 2]
    values = np.zeros(3)
    while kept:
        found = np.linalg.lstsq(matrix[:, kept], np.ones(len(points)), rcond=None)[0]
        if found.min() >= 0:
            values[kept] = found
            break
        kept.pop(int(found.argmin()))
    call, square, cube = (float(value) for value in values)
    return Curve(call=call, square=square, cube=cube)


def _collectives(world: int) -> dict[str, Any]:
    """What `collectives` measures on ``world`` processes."""
    if world < 2:
        raise UserError(f"Invalid worlds={world}. Must be >= 2.")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "links.json"
        launch = ["-m", "torch.distributed.run", "--standalone"]
        launch += ["--nproc-per-node", str(world), "-m"]
        launch += ["natgrad_lab.simulate.collectives", str(file)]
        done = subprocess.run([sys.executable, *launch], capture_output=True, text=True)
        if done.returncode or not file.is_file():
            raise UserError(f"{world} processes failed:\n{done.stderr[-2000:]}")
        return json.loads(file.read_text(encoding="utf-8"))


def _link(measured: Sequence[dict[str, Any]]) -> Link:
    """The link that explains all all-reduces: latency a hop, bandwidth."""
    rows: list[tuple[float, float]] = []
    seconds: list[float] = []
    for found in measured:
        ranks = found["world"]
        for size, spent in found["all_reduce"]:
            rows.append((2 * (ranks - 1), 2 * (ranks - 1) / ranks * size))
            seconds.append(spent)
    if not rows:
        return Link(latency=5e-5, bandwidth=2e9)
    matrix, target = np.array(rows), np.array(seconds)
    scaled = matrix / target[:, None]
    found = np.linalg.lstsq(scaled, np.ones(len(rows)), rcond=None)[0]
    latency, slope = max(float(found[0]), 1e-7), max(float(found[1]), 1e-12)
    return Link(latency=latency, bandwidth=1 / slope)


def _contention(measured: Sequence[dict[str, Any]]) -> float:
    """How much slower products are for each further rank that computes."""
    if not measured:
        return 0.0
    from natgrad_lab.simulate.collectives import products

    alone = products()
    slower = [(m["products"] / alone - 1) / (m["world"] - 1) for m in measured]
    return max(0.0, float(np.median(slower)))
