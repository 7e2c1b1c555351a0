"""A machine in a few numbers: what an operation and an exchange cost on it.

A collective over ranks on several nodes runs inside the nodes first and then between
them. Moving ``b`` bytes through g ranks a node on N nodes, one way, takes ::

    (g - 1)/g b / inside.bandwidth  + steps(g) inside.latency
  + (N - 1)/N b / between.bandwidth + steps(N) between.latency

where ``between.bandwidth`` is a node's and steps(k) is k - 1 on a ring and
ceil(log2 k) on a tree. An all-reduce goes both ways.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from natgrad.plan.cost import CostModel

ALGORITHMS = ("ring", "tree")


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

    ``statistics`` is estimating all of them once, ``update`` the optimizer's step.
    """

    batch: int
    forward: float
    backward: float
    statistics: float
    update: float = 0.0

    def __post_init__(self) -> None:
        _require("times", above=0.0, batch=self.batch, forward=self.forward)
        _require("times", statistics=self.statistics, backward=self.backward)


@dataclass(frozen=True, kw_only=True)
class HardwareProfile:
    """What a machine needs for the operations of a step.

    Attributes:
        name, source: What it is and where its numbers are from.
        flop, conv_flop, statistics_flop: Seconds a floating-point operation of a
            product, of a convolution and of a statistic.
        layer: Seconds of overhead a layer and pass.
        step: Seconds of every step outside the model: loader, host, framework.
        element: Seconds an element of an element-wise pass, such as the update.
        eigen, cholesky: Decomposition, and damped inverse, of one matrix.
        ranks_per_node, inside, between: Ranks share a node's link to other nodes.
        algorithm: "ring" or "tree".
        contention: Ranks that compute together slow each other: seconds are
            multiplied by 1 + contention (k - 1) with k ranks on a node.
        models: Seconds of whole models by name; used in place of flops.
    """

    name: str
    source: str = ""
    flop: float = 2e-11
    conv_flop: float = 2e-11
    statistics_flop: float = 2e-11
    layer: float = 2e-5
    step: float = 0.0
    element: float = 1e-9
    eigen: Curve = field(default_factory=lambda: Curve(call=2e-5, cube=8.2e-11))
    cholesky: Curve = field(default_factory=lambda: Curve(call=2e-5, cube=9.4e-12))
    ranks_per_node: int = 1
    inside: Link = field(default_factory=lambda: Link(latency=5e-5, bandwidth=2e9))
    between: Link = field(default_factory=lambda: Link(latency=5e-5, bandwidth=1e9))
    algorithm: str = "ring"
    contention: float = 0.0
    models: Mapping[str, ModelTimes] = field(default_factory=dict[str, ModelTimes])

    def __post_init__(self) -> None:
        numbers = {f.name: getattr(self, f.name) for f in fields(self)}
        positive = ("flop", "conv_flop", "statistics_flop", "ranks_per_node")
        _require("profile", above=0.0, **{k: numbers[k] for k in positive})
        rest = ("layer", "step", "element", "contention")
        _require("profile", **{k: numbers[k] for k in rest})
        if self.algorithm not in ALGORITHMS:
            raise ValueError(
                f"Invalid algorithm={self.algorithm!r}. Must be one of {ALGORITHMS}."
            )

    def cost(self, inverse: str = "eigen") -> CostModel:
        """The cost model for `make_plan` on this machine."""
        curve = self.eigen if inverse == "eigen" else self.cholesky
        return CostModel(
            inverse=inverse,
            eigen_cubic=self.eigen.cube,
            eigen_square=self.eigen.square,
            factored_cubic=self.cholesky.cube,
            factored_square=self.cholesky.square,
            invert_call=curve.call,
            call=self.layer,
            element=self.element,
            flop=self.flop,
        )

    def nodes(self, ranks: int) -> tuple[int, int]:
        """Ranks a node, and nodes, of a collective over neighbouring ranks."""
        inside = min(ranks, self.ranks_per_node)
        return inside, -(-ranks // inside)

    def slowdown(self, world: int) -> float:
        """Factor on compute seconds when all ranks of a node compute."""
        return 1 + self.contention * (self.nodes(world)[0] - 1)

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

    def _pass(self, link: Link, size: float, ranks: int, calls: int) -> float:
        if ranks == 1:
            return 0.0
        ring = self.algorithm == "ring"
        steps = ranks - 1 if ring else math.ceil(math.log2(ranks))
        return (
            ranks - 1
        ) / ranks * size / link.bandwidth + calls * steps * link.latency


def load_profile(path: Path | str) -> HardwareProfile:
    """Read a profile that `save_profile` or ``natgrad calibrate`` wrote."""
    with Path(path).open("rb") as file:
        return profile_from_dict(tomllib.load(file))


def profile_from_dict(data: Mapping[str, Any]) -> HardwareProfile:
    """A profile from TOML tables; what is missing has its default."""
    given = dict(data)
    legal = {f.name for f in fields(HardwareProfile)}
    if unknown := sorted(set(given) - legal):
        raise ValueError(f"Unknown in profile: {unknown}. Must be in {sorted(legal)}.")
    makes = {"eigen": Curve, "cholesky": Curve, "inside": Link, "between": Link}
    for key, make in makes.items():
        if key in given:
            given[key] = make(**given[key])
    models = given.get("models", {})
    given["models"] = {name: ModelTimes(**times) for name, times in models.items()}
    return HardwareProfile(**given)


def save_profile(profile: HardwareProfile, path: Path | str) -> None:
    """Write a profile as TOML."""
    plain: list[str] = []
    tables: list[str] = []
    for each in fields(profile):
        value = getattr(profile, each.name)
        if each.name == "models":
            for name, times in value.items():
                tables += ["", f'[models."{name}"]', *_lines(times)]
        elif isinstance(value, Curve | Link):
            tables += ["", f"[{each.name}]", *_lines(value)]
        else:
            plain.append(f"{each.name} = {_literal(value)}")
    Path(path).write_text("\n".join([*plain, *tables, ""]), encoding="utf-8")


def _lines(value: Curve | Link | ModelTimes) -> list[str]:
    names = [each.name for each in fields(value)]
    return [f"{name} = {_literal(getattr(value, name))}" for name in names]


def _literal(value: str | float) -> str:
    if isinstance(value, str):
        text = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")
        return f'"{text}"'
    return repr(value)
