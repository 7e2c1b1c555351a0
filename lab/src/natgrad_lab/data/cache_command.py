"""`natgrad data cache imagenet`: resize ImageNet's images once."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from natgrad_lab.data.cache import (
    Crop,
    Form,
    damaged,
    estimate,
    open_cache,
    write_cache,
)
from natgrad_lab.data.folders import DataError, data_root
from natgrad_lab.data.follow import followed
from natgrad_lab.data.imagenet import originals
from natgrad_lab.data.images import STORED


@dataclass(frozen=True, kw_only=True)
class MakeCache:
    """Resize a folder of images once, for `natgrad train --data.cache`.

    Its size is said before it starts. An interrupted one goes on: give the same command
    again. Many processes write together under torchrun or srun, each its own shards.
    """

    name: Annotated[str, tyro.conf.Positional] = "imagenet"
    """The data set: imagenet."""
    out: Path
    """Folder of the cache: on a disk that every process can read, or one per node."""
    root: Path | None = None
    """Folder of all data sets. None: $NATGRAD_DATA, or the user's cache."""
    crop: Crop = "stretched"
    """What it is for, as --data.crop: squares, or images with their own aspect."""
    side: int = STORED
    """Side of the squares, or the shorter side of images."""
    quality: int = 95
    """Quality of the JPEGs, 10 to 100."""
    workers: int | None = None
    """Threads of this process. None: its share of the cores."""
    rank: int | None = None
    """Number of this process. None: what torchrun or srun says, or 0."""
    world: int | None = None
    """How many processes write. None: what torchrun or srun says, or 1."""
    check: bool = False
    """Write nothing: read the whole cache and name the images that are damaged."""


def main(arguments: Sequence[str]) -> int:
    """Parse and write, or check."""
    asked = tyro.cli(MakeCache, prog="natgrad data cache", args=list(arguments))
    if asked.name != "imagenet":
        raise DataError(f"Invalid name={asked.name!r}. Must be imagenet.")
    if asked.workers is not None and asked.workers < 1:
        raise DataError(f"Invalid workers={asked.workers}. Must be >= 1.")
    rank, world = place(asked.rank, asked.world)
    if asked.check:
        return _check(asked, rank, world)
    form = Form(crop=asked.crop, side=asked.side, quality=asked.quality)
    splits, classes = originals(data_root(asked.root), threads=asked.workers)
    if rank == 0:
        told = estimate(splits, form, asked.out)
        _say(f"{asked.out}: {told}")
        if told.images * told.bytes_each > told.free and not asked.out.exists():
            raise DataError(f"That does not fit on the disk of {asked.out}.")
    whole = write_cache(
        asked.out, splits, classes, form, rank=rank, world=world, say=_say
    )
    if not whole:
        _say(f"rank {rank} of {world} is done; {asked.out} is whole when all are")
    return 0


def _check(asked: MakeCache, rank: int, world: int) -> int:
    cache = open_cache(asked.out, threads=asked.workers)
    with followed("images") as progress:
        wrong = list(damaged(cache, rank=rank, world=world, progress=progress))
    for name in wrong:
        _say(f"damaged: {name}")
    images = sum(len(split) for split in cache.splits.values())
    _say(f"{asked.out}: {images:,} images, {len(wrong)} damaged")
    return 1 if wrong else 0


def place(rank: int | None, world: int | None) -> tuple[int, int]:
    """This process's number and how many there are.

    Raises:
        DataError: they do not go together.
    """
    told = os.environ
    # a batch script, which is one process, has SLURM_NTASKS too; only tasks have this
    tasks = told.get("SLURM_STEP_NUM_TASKS")
    if rank is None:
        rank = int(told.get("RANK") or (tasks and told["SLURM_PROCID"]) or 0)
    if world is None:
        world = int(told.get("WORLD_SIZE") or tasks or 1)
    if not 0 <= rank < world:
        raise DataError(f"Invalid {rank=}. Must be in [0, {world}).")
    return rank, world


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
