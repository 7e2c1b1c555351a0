"""A machine in a few numbers: what an operation and an exchange cost on it.

A collective over ranks on several nodes runs inside the nodes first and then between
them. Moving ``b`` bytes through g ranks a node on N nodes, one way, takes ::

    (g - 1)/g b / inside.bandwidth  + steps(g) inside.latency
  + (N - 1)/N b / between.bandwidth + steps(N) between.latency

where ``between.bandwidth`` is a node's and steps(k) is k - 1 on a ring and
ceil(log2 k) on a tree. An all-reduce goes both ways. Where exchanges were measured
between so many ranks (``collectives``), that takes the formula's place.

Ranks on one node may share cores. ``crowding`` says how many times slower each of k
ranks computes; when some are done before others, the rest go on faster.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from natgrad.math.tuning import Tuning
from natgrad.plan.cost import CostModel, Rates, rate_at
from natgrad.plan.messages import WAYS, Way

if TYPE_CHECKING:
    import torch

ALGORITHMS = ("ring", "tree")
COLLECTIVES = ("reduce", "all_reduce", "gather", "all_to_all", "agree")


def _require(owner: str, *, above: float | None = None, **values: float) -> None:
    for key, value in values.items():
        low = value > above if above is not None else value >= 0
        if not (low and value < float("inf")):
            legal = (
                f"finite and > {above:g}" if above is not None else "finite and >= 0"
            )
            raise ValueError(f"Invalid {owner}.{key}={value}. Must be {legal}.")


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Seconds of an operation on an n x n matrix: call + square n^2 + cube n^3."""

    call: float = 0.0
    square: float = 0.0
    cube: float = 0.0

    def __post_init__(self) -> None:
        _require("curve", call=self.call, square=self.square, cube=self.cube)

    def __call__(self, n: float) -> float:
        return self.call + self.square * n**2 + self.cube * n**3


@dataclass(frozen=True, kw_only=True)
class Link:
    """``latency`` in seconds a message, ``bandwidth`` in bytes a second."""

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        _require("link", latency=self.latency)
        _require("link", above=0.0, bandwidth=self.bandwidth)


@dataclass(frozen=True, kw_only=True)
class ModelTimes:
    """One model's own seconds on one rank, as measured at ``batch`` examples.

    ``statistics`` is estimating all of them once, ``invert`` inverting and
    ``precondition`` applying all of them once, ``overhead`` what else a step of the
    library takes, ``update`` the optimizer's own step. Zero: not measured.
    """

    batch: int
    forward: float
    backward: float
    statistics: float
    update: float = 0.0
    invert: float = 0.0
    precondition: float = 0.0
    overhead: float = 0.0

    def __post_init__(self) -> None:
        _require("times", above=0.0, batch=self.batch, forward=self.forward)
        rest = {f.name: getattr(self, f.name) for f in fields(self)}
        _require("times", **rest)


@dataclass(frozen=True, kw_only=True)
class Collective:
    """Measured seconds of one kind of exchange between ``ranks`` ranks of a node.

    An exchange takes ``begin``, and ``call`` more for each collective in it, ``item``
    for each tensor and ``byte`` for each byte of its buckets. ``kind`` is "reduce"
    (sums to one rank each), "all_reduce", "gather" (from one rank each), "all_to_all"
    (the pieces of a sharded model) or "agree" (a small sum that all ranks wait for:
    ``begin`` alone).
    """

    kind: str
    ranks: int
    begin: float = 0.0
    call: float = 0.0
    item: float = 0.0
    byte: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in COLLECTIVES:
            raise ValueError(f"Invalid kind={self.kind!r}. Must be in {COLLECTIVES}.")
        _require("collective", above=1, ranks=self.ranks)
        times = {"begin": self.begin, "call": self.call}
        _require("collective", item=self.item, byte=self.byte, **times)

    def __call__(self, calls: int, items: int, size: float) -> float:
        """Seconds of one exchange, but for ``begin``."""
        return self.call * calls + self.item * items + self.byte * size


@dataclass(frozen=True, kw_only=True)
class HardwareProfile:
    """What a machine needs for the operations of a step.

    Attributes:
        name, source: What it is and where its numbers are from.
        flop, conv_flop, statistics_flop: Seconds a floating-point operation of a
            product, of a convolution and of a statistic.
        flops: ``flop`` by size: pairs of the geometric mean of a product's three dims
            and its seconds a flop, ascending; (): ``flop`` at every size.
        conv_statistics_flop: Seconds a flop of a convolution's input statistic,
            counted as by im2col; None: as ``statistics_flop``.
        layer: Seconds of overhead a layer and pass.
        statistic, apply, block: Seconds of the library's own overhead for each
            statistic estimated, for each block that a rank preconditions, and for each
            block on every rank in every step.
        step: Seconds of every step outside the model: loader, host, framework.
        element: Seconds an element of an element-wise pass, such as the update.
        eigen, cholesky: Decomposition, and damped inverse, of one matrix.
        ranks_per_node, inside, between: Ranks share a node's link to other nodes.
        algorithm: "ring" or "tree".
        way: How buckets become collectives, "rooted" or "padded": see
            `natgrad.plan.messages`.
        crowding: The k-th number, >= 1, multiplies a rank's compute seconds while k
            ranks of its node compute. Beyond the last it grows in proportion to k; ()
            means that ranks do not share cores.
        overlap: Share of an exchange that runs beside compute, in [0, 1]; 0 where the
            same cores do both.
        collectives: Measured exchanges between ranks of one node.
        models: Seconds of whole models by name; used in place of flops.
        tuning: Where one way of computing overtakes another on this machine's devices;
            None: as built in.
    """

    name: str
    source: str = ""
    flop: float = 2e-11
    conv_flop: float = 2e-11
    statistics_flop: float = 2e-11
    flops: Rates = ()
    conv_statistics_flop: float | None = None
    layer: float = 2e-5
    statistic: float = 0.0
    apply: float = 0.0
    block: float = 0.0
    step: float = 0.0
    element: float = 1e-9
    eigen: Curve = field(default_factory=lambda: Curve(call=2e-5, cube=8.2e-11))
    cholesky: Curve = field(default_factory=lambda: Curve(call=2e-5, cube=9.4e-12))
    ranks_per_node: int = 1
    inside: Link = field(default_factory=lambda: Link(latency=5e-5, bandwidth=2e9))
    between: Link = field(default_factory=lambda: Link(latency=5e-5, bandwidth=1e9))
    algorithm: str = "ring"
    way: Way = "padded"
    crowding: tuple[float, ...] = ()
    overlap: float = 1.0
    collectives: tuple[Collective, ...] = ()
    models: Mapping[str, ModelTimes] = field(default_factory=dict[str, ModelTimes])
    tuning: Tuning | None = None

    def __post_init__(self) -> None:
        numbers = {f.name: getattr(self, f.name) for f in fields(self)}
        positive = ("flop", "conv_flop", "statistics_flop", "ranks_per_node")
        _require("profile", above=0.0, **{k: numbers[k] for k in positive})
        rest = ("layer", "step", "element", "statistic", "apply", "block", "overlap")
        _require("profile", **{k: numbers[k] for k in rest})
        if self.overlap > 1:
            raise ValueError(f"Invalid overlap={self.overlap}. Must be in [0, 1].")
        if any(not 1 <= value < float("inf") for value in self.crowding):
            raise ValueError(f"Invalid crowding={self.crowding}. Must be >= 1 each.")
        sizes = [size for size, _ in self.flops]
        if sizes != sorted(set(sizes)) or any(min(x) <= 0 for x in self.flops):
            raise ValueError(
                f"Invalid flops={self.flops}. Must be pairs of numbers > 0, sizes "
                "ascending."
            )
        if self.algorithm not in ALGORITHMS:
            raise ValueError(
                f"Invalid algorithm={self.algorithm!r}. Must be one of {ALGORITHMS}."
            )

        if self.way not in WAYS:
            raise ValueError(f"Invalid way={self.way!r}. Must be one of {WAYS}.")

    def product(self, size: float) -> float:
        """Seconds a flop of a product whose three dims have this geometric mean."""
        return rate_at(self.flops, size) if self.flops else self.flop

    def cost(self, inverse: str = "eigen", scale: str = "kronecker") -> CostModel:
        """The cost model for `make_plan` on this machine."""
        curve = self.eigen if inverse == "eigen" else self.cholesky
        return CostModel(
            inverse=inverse,
            eigen_cubic=self.eigen.cube,
            eigen_square=self.eigen.square,
            factored_cubic=self.cholesky.cube,
            factored_square=self.cholesky.square,
            invert_call=curve.call,
            call=self.layer + self.apply,
            element=self.element,
            flop=self.flop,
            flops=self.flops,
            scale=scale,
        )

    def nodes(self, ranks: int) -> tuple[int, int]:
        """Ranks a node, and nodes, of a collective over neighbouring ranks."""
        inside = min(ranks, self.ranks_per_node)
        return inside, -(-ranks // inside)

    def slowdown(self, world: int) -> float:
        """Factor on compute seconds when all ranks of a node compute."""
        return self._crowd(self.nodes(world)[0])

    def _crowd(self, ranks: int) -> float:
        known = len(self.crowding)
        if not known or ranks == 0:
            return 1.0
        return self.crowding[min(ranks, known) - 1] * max(1.0, ranks / known)

    def finish(self, loads: Sequence[float]) -> list[float]:
        """When each rank is done with its seconds of compute, all starting at once.

        ``loads`` are of all ranks in order, each in seconds of a rank that computes
        alone. The ranks of a node share its cores: with k of them left, each needs
        ``crowding[k - 1]`` seconds for a second's work.
        """
        if not self.crowding:
            return list(loads)
        ends = [0.0] * len(loads)
        inside = self.nodes(len(loads))[0]
        for first in range(0, len(loads), inside):
            node = range(first, min(first + inside, len(loads)))
            now, done, left = 0.0, 0.0, sum(loads[rank] > 0 for rank in node)
            for rank in sorted(node, key=lambda rank: loads[rank]):
                if loads[rank] <= 0:
                    continue
                now += (loads[rank] - done) * self._crowd(left)
                ends[rank], done, left = now, loads[rank], left - 1
        return ends

    def collective(self, kind: str, ranks: int) -> Collective | None:
        """What was measured of this kind between so many ranks of a node, if it was."""
        found = (c for c in self.collectives if (c.kind, c.ranks) == (kind, ranks))
        return next(found, None)

    def move(self, size: float, ranks: int, calls: int = 1) -> float:
        """Seconds to reduce-scatter or all-gather ``size`` bytes over neighbours."""
        inside, nodes = self.nodes(ranks)
        return self._pass(self.inside, size, inside, calls) + self._pass(
            self.between, size, nodes, calls
        )

    def move_strided(self, size: float, ranks: int, groups: int) -> float:
        """Seconds to share ``size`` bytes in each of ``groups`` interleaved groups.

        Neighbours are in different groups, so that a node's link carries a copy for
        each of its ranks.
        """
        inside, nodes = self.nodes(ranks * groups)
        copies = min(groups, inside)
        if nodes == 1:
            return self._pass(self.inside, size, ranks, 1)
        return self._pass(self.between, size * copies, ranks, 1)

    def swap(self, near: float, far: float, ranks: int) -> float:
        """Seconds of an all-to-all over neighbours.

        The busiest rank sends, or gets, ``near`` bytes inside of its node, and the
        busiest node ``far`` bytes from or to others.
        """
        inside, nodes = self.nodes(ranks)
        latency = (inside - 1) * self.inside.latency
        latency += (nodes - 1) * self.between.latency
        return near / self.inside.bandwidth + far / self.between.bandwidth + latency

    def small(self, ranks: int) -> float:
        """Seconds of a sum of a few numbers over neighbours, up a tree and down."""
        inside, nodes = self.nodes(ranks)
        pairs = ((self.inside, inside), (self.between, nodes))
        return 2 * sum(x.latency * math.ceil(math.log2(n)) for x, n in pairs)

    def _pass(self, link: Link, size: float, ranks: int, calls: int) -> float:
        if ranks == 1:
            return 0.0
        ring = self.algorithm == "ring"
        steps = ranks - 1 if ring else math.ceil(math.log2(ranks))
        return (
            ranks - 1
        ) / ranks * size / link.bandwidth + calls * steps * link.latency


def built_in(device: torch.device, world: int) -> HardwareProfile:
    """Rough numbers of a CPU core with gloo, or of a GPU of 2018 with NCCL."""
    inside = min(world, int(os.environ.get("LOCAL_WORLD_SIZE", world)))
    if device.type != "cuda":
        return HardwareProfile(name="built-in CPU", ranks_per_node=inside)
    return HardwareProfile(
        name="built-in GPU",
        flop=1e-13,
        conv_flop=1.7e-13,
        statistics_flop=4e-14,
        layer=3e-5,
        element=1e-11,
        eigen=Curve(call=2.6e-2, square=7.9e-8),
        cholesky=Curve(call=2e-4, cube=6.2e-13),
        ranks_per_node=inside,
        inside=Link(latency=5e-6, bandwidth=6e10),
        between=Link(latency=1e-5, bandwidth=1e10),
    )
