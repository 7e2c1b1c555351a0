"""Where one way of computing overtakes another on this device: what is tuned by size.

As in `operations`, tensors are made on torch's default device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeVar

import torch

from natgrad.math.conv.correlation import correlate_images
from natgrad.math.conv.geometry import ConvGeometry
from natgrad.math.conv.moments import conv_input_moment, windows
from natgrad.math.products import add_product
from natgrad.math.tuning import CPU, PLAIN, Tuning
from natgrad_lab.simulate.operations import spd, timed

BATCHES = (16, 32, 64, 128, 256, 512)
COUNT = 6
"""Matrices of one size in a batch."""
PANELS = (0, 64, 128, 192, 256, 384)
BLOCKS = {"cpu": (1, 2, 4, 8, 16), "cuda": (16, 64, 256)}
"""MiB: caches of a CPU, and memory that a GPU may spare."""
BETTER = 0.95
"""Of the built-in choice's seconds: another one must take less than this share."""

Choice = TypeVar("Choice", bound=int)


def tune(device: str, seconds: float) -> Tuning:
    """The tuning of this device, for one thread a process.

    Panels of products that need no sum stay as they are built in.
    """
    start = replace(CPU if device == CPU.device else PLAIN, device=device)
    images = torch.randn(64, 32, 32, 32)  # whose patches have 72 MiB
    geometry = ConvGeometry(
        kernel=(3, 3), stride=(1, 1), padding=((1, 1), (1, 1)), dilation=(1, 1)
    )
    rows, total = torch.randn(1, 768, 2048), torch.zeros(1, 768, 768)
    blocks = [2**20 * mib for mib in BLOCKS[device]]

    def product(panel: int) -> Callable[[], Any]:
        tuning = replace(start, panel=panel)
        return lambda: add_product(total, rows, tuning)

    def moment(block: int) -> Callable[[], Any]:
        tuning = replace(start, block_bytes=block)
        return lambda: conv_input_moment(images, geometry, "im2col", tuning)

    return replace(
        start,
        batched_up_to=batched_up_to(seconds),
        panel=fastest(PANELS, start.panel, product, seconds),
        block_bytes=fastest(blocks, start.block_bytes, moment, seconds),
        **rates(images, geometry, seconds),
    )


def fastest(
    choices: Iterable[Choice],
    usual: Choice,
    work: Callable[[Choice], Callable[[], Any]],
    seconds: float,
) -> Choice:
    """The choice that takes least, or the usual one if nothing is clearly faster."""
    spent = {x: timed(work(x), seconds) for x in (*choices, usual)}
    best = min(spent, key=lambda x: spent[x])
    return best if spent[best] < BETTER * spent[usual] else usual


def batched_up_to(seconds: float) -> int:
    """The largest size up to which a batch is faster than a call for each matrix."""
    largest = 0
    for n in BATCHES:
        each = [spd(n) + torch.eye(n)] * COUNT
        spent = timed(lambda x=each: _inverse(torch.stack(x)), seconds)
        if spent > timed(lambda x=each: [_inverse(m) for m in x], seconds):
            break
        largest = n
    return largest


def _inverse(matrix: torch.Tensor) -> torch.Tensor:
    return torch.cholesky_inverse(torch.linalg.cholesky_ex(matrix)[0])


def rates(
    images: torch.Tensor, geometry: ConvGeometry, seconds: float
) -> dict[str, float]:
    """Multiplications and copies a nanosecond, as `natgrad.math.conv.cost` counts."""
    x = spd(512)
    product = 512**3 / timed(lambda: x @ x, seconds)
    offsets = 1
    for each in geometry.offsets:
        offsets *= len(each)
    pixels = images.numel() // images.shape[1]
    many = pixels * images.shape[1] ** 2 * offsets
    spent = timed(lambda: correlate_images(images, geometry), seconds)
    # as many as stay in a cache, for that is how patches are copied
    padded = torch.nn.functional.pad(images[:3], (1, 1, 1, 1))
    patches = windows(padded, geometry)
    taken = patches.movedim(0, 1 + geometry.dims)
    copied = taken.numel() / timed(taken.contiguous, seconds)
    found = {"product": product, "convolution": many / spent, "copy": copied}
    return {name: 1e-9 * rate for name, rate in found.items()}
