"""Sizes at which one way of computing overtakes another: a device's, measured.

Note [Tuned sizes]
None of them changes a result, but for rounding. They are one frozen value for each kind
of device: what ``natgrad calibrate`` measured, if the calibrated profile is of this
kind of device, or else built-in ones: those of a CPU, or `PLAIN` elsewhere, which
decides by no size at all. The profile is read once in a process. Ranks whose values
differ would round differently, so they are compared when an optimizer is made.
"""

import os
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from torch import Tensor

VARIABLE = "NATGRAD_PROFILE"
"""The environment variable that names a profile's file."""


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Where one way of computing overtakes another.

    Attributes:
        device: of which kind of device this is: "cpu", "cuda".
        batched_up_to: equal sizes are inverted as one batch up to this size.
        panel: rows of a symmetric product made in one go, from the diagonal to the
            right; 0: all of it is one product.
        symmetric_panel, symmetric_from: the same of products that need no sum (polar
            factors, triangular roots), and from how many rows on: in a smaller one what
            is saved is lost to the number of operations.
        block_bytes: patches, spectra and copies are made for so many bytes at a time.
        product, convolution, copy: multiplications, and elements copied, a nanosecond,
            of which only ratios count. ``convolution=0``: moments of convolutions are
            always by im2col.
    """

    device: str
    batched_up_to: int
    panel: int
    block_bytes: int
    symmetric_panel: int = 0
    symmetric_from: int = 0
    product: float = 1.0
    convolution: float = 0.0
    copy: float = 1.0

    def __post_init__(self) -> None:
        sizes = ("batched_up_to", "panel", "symmetric_panel", "symmetric_from")
        for name in (*sizes, "convolution"):
            if getattr(self, name) < 0:
                value = getattr(self, name)
                raise ValueError(f"Invalid tuning.{name}={value}. Must be >= 0.")
        for name in ("block_bytes", "product", "copy"):
            if getattr(self, name) <= 0:
                value = getattr(self, name)
                raise ValueError(f"Invalid tuning.{name}={value}. Must be > 0.")


# Measured in one thread of an AVX2 CPU: 4 MiB stay in a last-level cache and are enough
# for a product to run at full speed.
CPU = Tuning(
    device="cpu",
    batched_up_to=64,
    panel=192,
    block_bytes=4 * 2**20,
    symmetric_panel=128,
    symmetric_from=384,
    product=30.0,
    convolution=22.0,
    copy=2.0,
)
# No cache is aimed at: only the memory that is taken at once is bounded.
PLAIN = Tuning(device="", batched_up_to=sys.maxsize, panel=0, block_bytes=256 * 2**20)


def default_path() -> Path:
    """Where ``natgrad calibrate`` writes and ``strategy="auto"`` looks.

    ``natgrad/profile.toml`` in ``$XDG_CACHE_HOME``, or in ``~/.cache``.
    """
    folder = os.environ.get("XDG_CACHE_HOME")
    return (Path(folder) if folder else Path.home() / ".cache") / (
        "natgrad/profile.toml"
    )


def tuning_of(x: Tensor) -> Tuning:
    """What decides on the device of a tensor. See Note [Tuned sizes]."""
    return _tuning(x.device.type)


@lru_cache(maxsize=8)
def _tuning(device: str) -> Tuning:
    calibrated = _calibrated()
    if calibrated is not None and calibrated.device == device:
        return calibrated
    return CPU if device == CPU.device else PLAIN


@lru_cache(maxsize=1)
def _calibrated() -> Tuning | None:
    """The table of the calibrated profile; None if there is none."""
    path = Path(os.environ.get(VARIABLE) or default_path())
    if not path.is_file():
        return None
    import tomllib  # slow to import, and few runs read a profile

    with path.open("rb") as file:
        table = tomllib.load(file).get("tuning")
    return Tuning(**table) if table else None
