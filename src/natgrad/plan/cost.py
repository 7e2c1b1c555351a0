"""Modelled seconds of inverting a statistic and of preconditioning a block.

The constants are those of a two-core CPU in float32 (a factor of size 4608: 8.05 s by
eigendecomposition, 0.92 s by Cholesky). Placement needs only their ratios, which hold
well elsewhere; pass ``measured`` seconds where they do not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from natgrad.plan.spec import BlockSpec, StatisticSpec

INVERSES = ("eigen", "factored")
POLAR_STEPS = 2
"""Iterations of `natgrad.math.polar`, as `natgrad.Polar` has them."""
Rates = tuple[tuple[float, float], ...]
"""Sizes, ascending, with the seconds a floating-point operation of a product takes."""


def check_inverse(inverse: str) -> str:
    """Return ``inverse`` if it names a way to invert."""
    if inverse not in INVERSES:
        raise ValueError(f"Invalid inverse={inverse!r}. Must be one of {INVERSES}.")
    return inverse


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Seconds from shapes, or as measured.

    Attributes:
        inverse: "eigen" (eigendecomposition) or "factored" (Cholesky).
        eigen_cubic, factored_cubic: Seconds per n^3 of one matrix of size n.
        eigen_square, factored_square: Seconds per n^2: what memory or a host limits.
        call: Seconds of overhead a statistic or block.
        invert_call: Seconds of overhead a matrix statistic, if not ``call``.
        element: Seconds per element of a diagonal.
        flop: Seconds per floating-point operation of a matrix product.
        flops: The same by size, where it was measured; see `rate_at`.
        scale: The name of the rule that preconditions.
        scales: The same of blocks with rules of their own, by block name.
        measured: Seconds by statistic name; statistics missing here are modelled.
            Must be the same on all ranks: the plan follows from it.
    """

    inverse: str = "eigen"
    eigen_cubic: float = 8.2e-11
    factored_cubic: float = 9.4e-12
    eigen_square: float = 0.0
    factored_square: float = 0.0
    call: float = 2e-5
    invert_call: float | None = None
    element: float = 1e-9
    flop: float = 2e-11
    flops: Rates = ()
    scale: str = "kronecker"
    scales: Mapping[str, str] = field(default_factory=dict[str, str])
    measured: Mapping[str, float] = field(default_factory=dict[str, float])

    def __post_init__(self) -> None:
        check_inverse(self.inverse)
        for name, seconds in self.measured.items():
            if not 0 <= seconds < float("inf"):
                raise ValueError(
                    f"Invalid measured[{name!r}]={seconds}. Must be finite and >= 0."
                )

    def invert(self, spec: StatisticSpec) -> float:
        """Seconds to invert or decompose one statistic."""
        if spec.name in self.measured:
            return self.measured[spec.name]
        if spec.diagonal:
            return self.call + self.element * spec.elements
        eigen = self.inverse == "eigen" if spec.eigen is None else spec.eigen
        cubic = self.eigen_cubic if eigen else self.factored_cubic
        square = self.eigen_square if eigen else self.factored_square
        call = self.call if self.invert_call is None else self.invert_call
        return call + spec.stack * (square * spec.size**2 + cubic * spec.size**3)

    def precondition(self, block: BlockSpec) -> float:
        """Seconds to apply a block's inverses to its gradient once."""
        if not block.statistics:
            bare = self.scales.get(block.name) == "orthogonal"
            return self.call + self._polar(block) if bare else 0.0
        scale = self.scales.get(block.name, self.scale)
        factors = all(s.is_factor or s.kind == "S" for s in block.statistics)
        polar = factors and scale == "orthogonal"
        # Into the eigenbasis and out again, or whitened and back: twice the products
        # of a dense inverse.
        passes = 2 if self.inverse == "eigen" or polar else 1
        seconds = self.call
        for spec in block.statistics:
            flops = 2 * passes * block.elements * (1 if spec.diagonal else spec.size)
            width = (block.rows * block.cols * spec.size) ** (1 / 3)
            rate = self.flop if spec.diagonal else self.product(width)
            seconds += rate * flops
        return seconds + (self._polar(block) if polar else 0.0)

    def passes(self, block: BlockSpec, vectors: float) -> float:
        """Seconds of the products with a weight: forward and both of the backward.

        Of so many input vectors, each of which an embedding only looks up.
        """
        is_table = any(s.side == "right" and s.diagonal for s in block.statistics)
        elements = block.elements // block.cols if is_table else block.elements
        return 6 * self.flop * elements * vectors

    def product(self, size: float) -> float:
        """Seconds a flop of a product whose three dims have this geometric mean."""
        return rate_at(self.flops, size) if self.flops else self.flop

    def _polar(self, block: BlockSpec) -> float:
        """Each iteration: a Gram matrix, its inverse, and the product with that.

        An inverse of 2 k^3 flops at half of a product's speed, and a square.
        """
        k, n = sorted((block.rows, block.cols))
        wide, square = 4 * k * k * n, 6 * k**3
        rates = self.product((k * k * n) ** (1 / 3)), self.product(k)
        return POLAR_STEPS * block.stack * (rates[0] * wide + rates[1] * square)


def rate_at(rates: Rates, size: float) -> float:
    """Between the sizes measured on a line in logarithms; beyond them as at the end."""
    if size <= rates[0][0]:
        return rates[0][1]
    for (a, low), (b, high) in pairwise(rates):
        if size <= b:
            share = math.log(size / a) / math.log(b / a)
            return low * (high / low) ** share
    return rates[-1][1]


def inverse_elements(spec: StatisticSpec, inverse: str) -> int:
    """Elements sent to share an inverse.

    A dense inverse is symmetric and goes packed, ``s n (n + 1) / 2``; an
    eigendecomposition is vectors and values, ``s (n n + n)``; a diagonal ``s n``. The
    one statistic of a normalisation layer is inverted densely in either style.
    """
    if keeps_basis(spec, inverse):
        return spec.elements + spec.stack * spec.size
    return spec.packed


def keeps_basis(spec: StatisticSpec, inverse: str) -> bool:
    """Whether an inverse is kept as eigenvectors and eigenvalues."""
    eigen = check_inverse(inverse) == "eigen" if spec.eigen is None else spec.eigen
    return eigen and spec.is_factor and not spec.diagonal


def kept_shapes(spec: StatisticSpec, eigen: bool) -> list[tuple[int, ...]]:
    """Of the tensors of an inverse between steps: packed ones as rows.

    Upper triangles with a zero: see `natgrad.math.packing.pack_upper`.
    """
    if spec.packing:
        zero = spec.packing == "upper"
        return [(spec.stack, spec.packed // spec.stack + zero)]
    return inverse_shapes(spec, eigen)


def inverse_shapes(spec: StatisticSpec, eigen: bool) -> list[tuple[int, ...]]:
    """Of what a rule is given: ``(X^-1,)``, or ``(Q, v)`` if it is ``eigen``."""
    diagonal = spec.diagonal
    values = (spec.stack, spec.size)
    dense = values if diagonal else (*values, spec.size)
    return [(0,) if diagonal else dense, values] if eigen else [dense]
