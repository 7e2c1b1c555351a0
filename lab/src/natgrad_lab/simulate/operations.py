"""Seconds of single operations on this machine, one thread.

Tensors are made on torch's default device, which calibration sets: a GPU is waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from natgrad import KFAC, Every, KLClip
from natgrad.math.conv.geometry import ConvGeometry
from natgrad.math.conv.moments import conv_input_moment, conv_output_moment
from natgrad.math.inverse import damped_inverses, eigendecompositions
from natgrad.math.statistics import gram
from natgrad.plan.autotune import Curve

NEVER = Every(statistics=10**6, inverses=10**6)
PRODUCTS = (16, 64, 256, 1024)
"""Sizes at which products are measured: small ones are slower a flop."""
LEAST = 0.1
"""What is left at least of a product's seconds without its call."""
_CACHE: dict[tuple[int, torch.device], torch.Tensor] = {}


def spd(n: int) -> torch.Tensor:
    """A fixed symmetric matrix of a quarter of full rank, as statistics of few
    examples are: decompositions of such are faster than of others.
    """
    key = n, torch.get_default_device()
    if key not in _CACHE:
        generator = torch.Generator().manual_seed(n)
        x = torch.randn(n, max(1, n // 4), generator=generator, device="cpu")
        _CACHE[key] = (x @ x.T / n).to(key[1])
    return _CACHE[key]


def now() -> float:
    """The time, when the default device has done all it was given."""
    if torch.get_default_device().type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def timed(work: Callable[[], Any], seconds: float) -> float:
    """The median of as many calls as fit into ``seconds``, three at least."""
    work()
    times: list[float] = []
    start = now()
    end = start + seconds
    while len(times) < 3 or (start < end and len(times) < 200):
        start = now()
        work()
        times.append(now() - start)
    return float(np.median(times))


def eigen(sizes: Sequence[int], seconds: float) -> list[tuple[int, float]]:
    """Seconds of the library's eigendecomposition by size."""
    return [
        (n, timed(lambda n=n: eigendecompositions([spd(n)[None]]), seconds))
        for n in sizes
    ]


def cholesky(sizes: Sequence[int], seconds: float) -> list[tuple[int, float]]:
    """Seconds of the library's damped inverse by size."""
    return [
        (n, timed(lambda n=n: damped_inverses([spd(n)[None]], [1e-3]), seconds))
        for n in sizes
    ]


def product(n: int, seconds: float) -> float:
    """Seconds a flop of a matrix product."""
    x = spd(n)
    return timed(lambda: x @ x, seconds) / (2 * n**3)


def products(largest: int, call: float, seconds: float) -> list[tuple[int, float]]:
    """Seconds a flop of products by size, but for the seconds of the smallest call."""
    sizes = [n for n in PRODUCTS if n <= largest] or [largest]
    # Of a small product the call is nearly all, and is counted on its own.
    return [
        (n, max(r - call / (2 * n**3), LEAST * r))
        for n, r in ((n, product(n, seconds)) for n in sizes)
    ]


def convolution(seconds: float) -> float:
    """Seconds a flop of a 3x3 convolution, forward and backward."""
    layer = nn.Conv2d(32, 32, 3, padding=1, bias=False)
    x = torch.randn(16, 32, 16, 16, requires_grad=True)
    flops = 3 * 2 * 16 * 16 * 16 * 32 * 32 * 9

    def work() -> None:
        F.relu(layer(x)).sum().backward()

    return timed(work, seconds) / flops


def element(seconds: float) -> float:
    """Seconds an element of an addition in place."""
    x = torch.zeros(1_000_000)
    return timed(lambda: x.add_(1e-9), seconds) / x.numel()


def call(seconds: float) -> float:
    """Seconds of the smallest product."""
    x = spd(8)
    return timed(lambda: x @ x, seconds)


def statistics_flop(seconds: float) -> float:
    """Seconds a flop of symmetric products: linear layers, and output gradients."""
    rows = torch.randn(256, 256)
    outputs = torch.randn(16, 64, 8, 8)
    rates = [
        timed(lambda: gram(rows), seconds) / (256 * 256**2),
        timed(lambda: conv_output_moment(outputs), seconds) / (16 * 64 * 64**2),
    ]
    return float(np.exp(np.log(rates).mean()))


def conv_statistics_flop(seconds: float, batch: int = 16) -> float:
    """Seconds a flop of convolutions' input moments, counted as im2col's products.

    The library takes the cheapest way, autocorrelation or im2col, by shape.
    """
    geometry = ConvGeometry(
        kernel=(3, 3), stride=(1, 1), padding=((1, 1), (1, 1)), dilation=(1, 1)
    )
    rates: list[float] = []
    for channels, side in ((16, 32), (32, 16), (64, 8)):
        x = torch.randn(batch, channels, side, side)
        flops = batch * side**2 * (9 * channels) ** 2
        spent = timed(lambda x=x: conv_input_moment(x, geometry), seconds)
        rates.append(spent / flops)
    return float(np.exp(np.log(rates).mean()))


def library_overheads(seconds: float, layers: int = 24) -> dict[str, float]:
    """Seconds of the library's own work, where tensors are too small to cost any.

    ``statistic`` for each estimate, ``apply`` for each block preconditioned, ``block``
    for each block in every step.
    """
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))
    x = torch.randn(4, 8)

    def passes() -> None:
        model.zero_grad()
        model(x).square().mean().backward()

    plain = timed(passes, seconds)
    with KFAC(model, length=KLClip(lr=1e-3), refresh=NEVER) as kfac:

        def step() -> None:
            passes()
            kfac.step()

        step()
        idle = timed(step, seconds)
        engine = kfac.engine
        gradients = {b.name: b.gradient() for b in engine.blocks}
        known = {name: g for name, g in gradients.items() if g is not None}
        blocks = [engine.block[name] for name in known]
        apply = timed(lambda: engine.preconditioner(blocks, known, known), seconds)
    often = Every(statistics=1, inverses=10**6)
    with KFAC(model, length=KLClip(lr=1e-3), refresh=often) as kfac:

        def full() -> None:
            passes()
            kfac.step()

        full()
        busy = timed(full, seconds)
    return {
        "statistic": max(0.0, busy - idle) / (2 * layers),
        "apply": apply / layers,
        "block": max(0.0, idle - plain - apply) / layers,
    }


def fit_curve(points: Sequence[tuple[int, float]]) -> Curve:
    """call + square n^2 + cube n^3 of least relative error, no term negative."""
    sizes = np.array([n for n, _ in points], dtype=float)
    seconds = np.array([t for _, t in points])
    columns = np.stack([sizes**0, sizes**2, sizes**3], axis=1)
    call, square, cube = fit_positive(columns, seconds)
    return Curve(call=call, square=square, cube=cube)


def fit_positive(columns: np.ndarray, seconds: np.ndarray) -> list[float]:
    """Weights of the columns of least relative error, no weight negative."""
    matrix = columns / seconds[:, None]
    # Columns differ by many orders of magnitude.
    scale = np.maximum(np.abs(matrix).max(axis=0), 1e-300)
    kept = list(range(columns.shape[1]))
    values = np.zeros(len(kept))
    while kept:
        scaled = (matrix / scale)[:, kept]
        found = np.linalg.lstsq(scaled, np.ones(len(seconds)), rcond=None)[0]
        if found.min() >= 0:
            values[kept] = found / scale[kept]
            break
        kept.pop(int(found.argmin()))
    return [float(value) for value in values]
