"""`natgrad calibrate`: measure this machine and write a hardware profile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro

from natgrad.math.tuning import CPU, PLAIN, VARIABLE
from natgrad.plan.autotune import (
    Collective,
    HardwareProfile,
    Link,
    default_path,
    save_profile,
)
from natgrad_lab.errors import UserError
from natgrad_lab.simulate import operations
from natgrad_lab.simulate.modeltimes import in_own_process
from natgrad_lab.simulate.operations import fit_curve, fit_positive
from natgrad_lab.simulate.tuning import tune
from natgrad_lab.simulate.work import lab_settings


@dataclass(frozen=True, kw_only=True)
class Calibrate:
    """Measure operations, exchanges and crowding on this machine; write a profile.

    Let nothing else run meanwhile.
    """

    output: Path | None = None
    """Where the profile goes. None: where strategy="auto" finds it."""
    sizes: tuple[int, ...] = (16, 32, 64, 128, 256, 512, 1024)
    """Matrix sizes."""
    worlds: tuple[int, ...] = (2,)
    """Numbers of processes for exchanges; none: links keep their defaults."""
    models: tuple[str, ...] = ()
    """Lab models whose own seconds on one rank are measured as well."""
    batch: int = 32
    """Examples for these models."""
    seconds: float = 0.2
    """At least so long for each measurement."""
    device: Literal["cpu", "cuda"] | None = None
    """Where operations run. None: a GPU if there is one."""


def main(arguments: Sequence[str]) -> int:
    """Parse, measure, write."""
    asked = tyro.cli(Calibrate, prog="natgrad calibrate", args=list(arguments))
    _require_legal(asked)
    output = asked.output or default_path()
    # found out now, not after minutes of measuring, if it cannot be written there
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=output.parent):
        pass
    profile = calibrate(asked)
    save_profile(profile, output)
    print(told(profile, output))
    return 0


def told(profile: HardwareProfile, output: Path) -> str:
    """What was found, and who will read it."""
    link, tuning = profile.inside, profile.tuning
    lines = [f"profile: {output}", f"products: {1e-9 / profile.flop:.0f} GFLOP/s"]
    if profile.collectives:
        speed = f"{1e6 * link.latency:.0f} us, {1e-9 * link.bandwidth:.2f} GB/s"
        lines.append(f"between ranks: {speed}")
    if tuning is not None:
        usual = CPU if tuning.device == CPU.device else PLAIN
        sizes = ("batched_up_to", "panel", "block_bytes")
        pairs = [(name, getattr(tuning, name), getattr(usual, name)) for name in sizes]
        lines.append(
            "tuning: " + ", ".join(f"{n}={x} (built in {y})" for n, x, y in pairs)
        )
    read = Path(os.environ.get(VARIABLE) or default_path())
    if read.absolute() == output.absolute():
        lines.append(
            "Every natgrad optimizer on this machine reads it from now on: results "
            "differ by rounding. All ranks need the same file; without it the "
            "built-in values count."
        )
    else:
        lines.append(f"It is read only if {VARIABLE} names it, or by profile=.")
    return "\n".join(lines)


def _require_legal(asked: Calibrate) -> None:
    if len(asked.sizes) < 2 or min(asked.sizes) < 2:
        raise UserError(f"Invalid sizes={asked.sizes}. Must be two or more, each >= 2.")
    if asked.worlds and min(asked.worlds) < 2:
        raise UserError(f"Invalid worlds={asked.worlds}. Must be >= 2, each.")
    if not 0 < asked.seconds <= 60:
        raise UserError(f"Invalid seconds={asked.seconds}. Must be in (0, 60].")
    if asked.batch < 1:
        raise UserError(f"Invalid batch={asked.batch}. Must be >= 1.")
    for name in asked.models:
        lab_settings(name)


def calibrate(asked: Calibrate) -> HardwareProfile:
    """The profile of this machine, for one thread a process."""
    threads = torch.get_num_threads()
    device = asked.device or ("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)
    try:
        with torch.device(device):
            return _calibrate(asked, device)
    finally:
        torch.set_num_threads(threads)


def _calibrate(asked: Calibrate, device: str) -> HardwareProfile:
    short = asked.seconds
    _say("small operations")
    layer = operations.call(short)
    own = operations.library_overheads(short)
    found = [_in_processes(world) for world in asked.worlds]
    link = _link(found)
    _say(f"products and inverses of matrices up to {max(asked.sizes)}")
    return HardwareProfile(
        name="this machine",
        source=f"natgrad calibrate, torch {torch.__version__}, {device}, one thread",
        flop=operations.product(min(256, max(asked.sizes)), short),
        flops=tuple(operations.products(max(asked.sizes), layer, short)),
        conv_flop=operations.convolution(short),
        statistics_flop=operations.statistics_flop(short),
        conv_statistics_flop=operations.conv_statistics_flop(short),
        layer=layer,
        statistic=own["statistic"],
        apply=max(0.0, own["apply"] - layer),
        block=own["block"],
        element=operations.element(short),
        eigen=fit_curve(operations.eigen(asked.sizes, short)),
        cholesky=fit_curve(operations.cholesky(asked.sizes, short)),
        ranks_per_node=max([1, *asked.worlds]),
        way="padded" if str(device).startswith("cuda") else "rooted",
        inside=link,
        between=link,
        crowding=_crowding(found),
        overlap=float(np.median([f["overlap"] for f in found])) if found else 1.0,
        collectives=tuple(c for f in found for c in _collectives(f)),
        tuning=tune(device, short),
        models={
            name: in_own_process(name, asked.batch, device) for name in asked.models
        },
    )


def _say(what: str) -> None:
    print(f"measuring {what}", file=sys.stderr, flush=True)


def _in_processes(world: int) -> dict[str, Any]:
    """What `collectives` measures on ``world`` processes."""
    _say(f"exchanges between {world} processes")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        launch = ["-m", "torch.distributed.run", "--standalone"]
        launch += ["--nproc-per-node", str(world), "-m"]
        launch += ["natgrad_lab.simulate.collectives", str(file)]
        done = subprocess.run([sys.executable, *launch], capture_output=True, text=True)
        if done.returncode or not file.is_file():
            raise UserError(f"{world} processes failed:\n{done.stderr[-2000:]}")
        return json.loads(file.read_text(encoding="utf-8"))


def _collectives(found: dict[str, Any]) -> list[Collective]:
    """A model of each kind of exchange, of least relative error."""
    ranks = found["world"]
    models = [Collective(kind="agree", ranks=ranks, begin=found["agree"])]
    for kind in ("reduce", "all_reduce", "gather", "all_to_all"):
        rows = [row for row in found["exchanges"] if row["kind"] == kind]
        parts = [[1.0, r["calls"], r["items"], r["bytes"]] for r in rows]
        seconds = np.array([r["seconds"] for r in rows])
        begin, call, item, byte = fit_positive(np.array(parts), seconds)
        models.append(
            Collective(
                kind=kind, ranks=ranks, begin=begin, call=call, item=item, byte=byte
            )
        )
    return models


def _link(found: Sequence[dict[str, Any]]) -> Link:
    """The link that explains all exchanges, for worlds that were not measured."""
    rows: list[tuple[float, float]] = []
    seconds: list[float] = []
    for each in found:
        hops, share = each["world"] - 1, (each["world"] - 1) / each["world"]
        for row in each["exchanges"]:
            ways = 2 if row["kind"] == "all_reduce" else 1
            rows.append((ways * hops * row["calls"], ways * share * row["bytes"]))
            seconds.append(row["seconds"])
    if not rows:
        return Link(latency=5e-5, bandwidth=2e9)
    latency, slope = fit_positive(np.array(rows), np.array(seconds))
    return Link(latency=latency, bandwidth=1 / max(slope, 1e-12))


def _crowding(found: Sequence[dict[str, Any]]) -> tuple[float, ...]:
    """How many times slower each of k ranks computes, from the largest world.

    Not less than k over the cores there are, whatever was measured.
    """
    if not found:
        return ()
    largest = max(found, key=lambda each: each["world"])
    rows, cores = largest["crowding"], largest["cores"]
    ratios = [[row[name] / rows[0][name] for name in row] for row in rows]
    means = np.exp(np.log(np.array(ratios)).mean(axis=1))
    least = [max(1.0, k / cores if cores else 1.0) for k in range(1, len(rows) + 1)]
    return tuple(float(x) for x in np.maximum.accumulate(np.maximum(means, least)))
