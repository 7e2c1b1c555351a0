"""A cache of images at the size that training reads them, written once.

Note [The cache]
Images are resized once and kept as JPEGs of a bounded size in shards (`shards.py`). A
shard's images depend on its number alone. So any number of processes can write a cache
together, each every world-th shard, without talking to each other; one that is
interrupted goes on with the shards that are missing; and whoever finds all of them
whole writes ``cache.json``, always the same one.
"""

import json
import shutil
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from natgrad_lab.augment.windows import fitted
from natgrad_lab.data.download import Progress
from natgrad_lab.data.folders import DataError
from natgrad_lab.data.images import STORED, ImageSplit
from natgrad_lab.data.jpeg import ImageError, Pixels, encode, read_resized, size_of
from natgrad_lab.data.shards import (
    Encoded,
    Shard,
    Shards,
    digest_of,
    known,
    path_of,
    seal,
    whole,
    write,
)

VERSION = 1
FILE = "cache.json"
LIMIT = 120_000
"""Most bytes of an image of 256 x 256 pixels."""
LOOKED_AT = 48
"""Images that the size is estimated from."""
AT_ONCE = 256
"""Images that are held in memory while a shard is written."""

Crop = Literal["stretched", "resized"]
Splits = dict[str, ImageSplit]
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Form:
    """How a cache's images are made.

    Attributes:
        crop: the crop they are for. For "stretched" they are squares; for "resized"
            they keep their aspect.
        side: of the square, or the shorter one.
        quality: of the JPEGs, 10 to 100; less where an image would be too large.
        shard: images a shard.
    """

    crop: Crop = "stretched"
    side: int = STORED
    quality: int = 95
    shard: int = 4096

    def __post_init__(self) -> None:
        if not 8 <= self.side <= 4096:
            raise DataError(f"Invalid side={self.side}. Must be in 8 to 4096.")
        if not 10 <= self.quality <= 100:
            raise DataError(f"Invalid quality={self.quality}. Must be in 10 to 100.")
        if not 1 <= self.shard <= 2**16:
            raise DataError(f"Invalid shard={self.shard}. Must be in 1 to {2**16}.")

    @property
    def limit(self) -> int:
        """Most bytes of an image."""
        return LIMIT * self.side**2 // STORED**2

    def shards(self, split: ImageSplit) -> int:
        """How many a split has."""
        return -(-len(split) // self.shard)

    def members(self, split: ImageSplit, number: int) -> Tensor:
        """The numbers of a shard's images."""
        first = number * self.shard
        return torch.arange(first, min(len(split), first + self.shard))

    def pixels(self, data: bytes) -> Pixels:
        """An original image as the cache has it."""
        if self.crop == "stretched":
            return read_resized(data, self.side, self.side)
        return read_resized(data, *fitted(*size_of(data), self.side))


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a cache will take on disk, from a few of its images."""

    images: int
    shards: int
    bytes_each: float
    most: int
    free: int

    def __str__(self) -> str:
        each, whole = self.bytes_each / 1e3, self.images * self.bytes_each / 1e9
        return (
            f"{self.images:,} images in {self.shards:,} shards, about {each:.1f} kB "
            f"each: {whole:.2f} GB (at most {self.images * self.most / 1e9:.2f}); "
            f"{self.free / 1e9:.2f} GB are free"
        )


def estimate(splits: Splits, form: Form, folder: Path) -> Estimate:
    """Encode a few images to see what all will take."""
    images, shards = sum(map(len, splits.values())), 0
    sizes: list[int] = []
    for split in splits.values():
        shards += form.shards(split)
        some = torch.linspace(0, len(split) - 1, min(LOOKED_AT, len(split)))
        sizes += [len(each.data) for each, _ in _encoded(split, form, some.long())]
    place = next(each for each in (folder, *folder.parents) if each.exists())
    return Estimate(
        images=images,
        shards=shards,
        bytes_each=statistics.fmean(sizes) + 2048,  # tar: two headers, two fillings
        most=form.limit + 2048,
        free=shutil.disk_usage(place).free,
    )


def write_cache(
    folder: Path,
    splits: Splits,
    classes: tuple[str, ...],
    form: Form,
    *,
    rank: int = 0,
    world: int = 1,
    say: Say = lambda _: None,
) -> bool:
    """Write this rank's shards that are not there yet.

    Args:
        folder: made if missing.
        splits: the original images, by name.
        classes: name of each class.
        form: how images are made.
        rank: writes the shards rank, rank + world, ...
        world: how many write together.
        say: told a line for each shard.

    Returns:
        Whether the cache is whole now: the other ranks may still be writing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _require_same(folder, form)
    todo = [(n, s, i) for n, s in splits.items() for i in range(form.shards(s))]
    for name, split, number in todo[rank::world]:
        path, digest = path_of(folder, name, number), _digest(split, form, number)
        shard = known(path)
        if shard is None or shard.digest != digest:
            shard = _write_shard(path, split, form, number, digest)
            say(f"{path.name}: {_told([shard])}")
    return _finish(folder, splits, classes, form, say)


def _require_same(folder: Path, form: Form) -> None:
    if (folder / FILE).is_file() and (found := _facts(folder)["form"]) != asdict(form):
        raise DataError(f"{folder} has another cache: {found}. Choose another --out.")


def _digest(split: ImageSplit, form: Form, number: int) -> str:
    names = [split.source.name(i) for i in form.members(split, number).tolist()]
    return digest_of(names, f"{VERSION} {form}")


def _write_shard(
    path: Path, split: ImageSplit, form: Form, number: int, digest: str
) -> Shard:
    square = form.crop == "stretched"
    total = np.zeros((form.side, form.side, 3) if square else (0,), np.uint32)

    def images() -> Iterator[Encoded]:
        for part in form.members(split, number).split(AT_ONCE):
            for encoded, pixels in _encoded(split, form, part):
                if square:
                    np.add(total, pixels, out=total)
                yield encoded

    records, size = write(path, number * form.shard, images())
    shard = Shard(records=records, size=size, digest=digest, total=total)
    seal(path, shard)
    return shard


def _encoded(
    split: ImageSplit, form: Form, indices: Tensor
) -> Iterator[tuple[Encoded, Pixels]]:
    """Images as the cache has them, and their pixels, by all threads."""
    numbers: list[int] = indices.tolist()
    made: dict[int, tuple[Encoded, Pixels]] = {}

    def some(rows: range) -> None:
        for row in rows:
            index = numbers[row]
            try:
                pixels = form.pixels(split.source.read(index))
            except ImageError as error:
                name = split.source.name(index)
                raise DataError(f"{name} cannot be read ({error}).") from error
            data = encode(pixels, form.quality, form.limit)
            made[row] = Encoded(data, int(split.labels[index])), pixels

    split.run(some, len(numbers))
    return (made[row] for row in range(len(numbers)))


def _finish(
    folder: Path,
    splits: Splits,
    classes: tuple[str, ...],
    form: Form,
    say: Say,
) -> bool:
    """Write what opens the cache, if all of it is there."""
    facts: dict[str, Any] = {"version": VERSION, "form": asdict(form), "splits": {}}
    facts["classes"] = list(classes)
    every: list[Shard] = []
    for name, split in splits.items():
        shards: list[Shard] = []
        for number in range(form.shards(split)):
            shard = known(path_of(folder, name, number))
            if shard is None or shard.digest != _digest(split, form, number):
                return False
            shards.append(shard)
        facts["splits"][name] = [shard.size for shard in shards]
        with whole(folder / f"{name}.npz") as file:
            np.savez(file, **_joined(shards))
        every += shards
    with whole(folder / FILE) as file:
        file.write(json.dumps(facts, indent=1).encode())
    say(f"{folder} is whole: {_told(every)}")
    return True


def _joined(shards: list[Shard]) -> dict[str, Any]:
    records = np.concatenate([shard.records for shard in shards])
    total = np.sum([shard.total for shard in shards], axis=0, dtype=np.int64)
    return {"records": records, "mean": (total / len(records)).astype(np.float32)}


def _told(shards: list[Shard]) -> str:
    sizes = np.concatenate([shard.records["bytes"] for shard in shards])
    return (
        f"{len(sizes):,} images, {sum(s.size for s in shards) / 1e6:,.1f} MB, "
        f"{sizes.mean() / 1e3:.1f} kB an image, the largest {sizes.max() / 1e3:.1f}"
    )


# -- reading --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Cache:
    """A whole cache.

    Attributes:
        form: how its images were made.
        classes: name of each class.
        splits: its images.
        mean: of the training images, (3, side, side); None if they are no squares.
    """

    form: Form
    classes: tuple[str, ...]
    splits: Splits
    mean: Tensor | None


def open_cache(folder: Path, *, threads: int | None = None) -> Cache:
    """Open a cache that `write_cache` has made.

    Raises:
        DataError: it is not there, not whole or of another version.
    """
    facts = _facts(folder)
    form, classes = Form(**facts["form"]), tuple(facts["classes"])
    splits: Splits = {}
    mean: Tensor | None = None
    for name, sizes in facts["splits"].items():
        records, average = _index(folder / f"{name}.npz")
        source = Shards(folder, name, records, sizes, form.shard)
        labels = torch.from_numpy(records["label"].astype(np.int64))
        splits[name] = ImageSplit(source, labels, threads=threads)
        if name == "train" and average.ndim == 3:
            mean = torch.from_numpy(average).permute(2, 0, 1).contiguous()
    return Cache(form=form, classes=classes, splits=splits, mean=mean)


def damaged(
    cache: Cache, *, rank: int = 0, world: int = 1, progress: Progress | None = None
) -> Iterator[str]:
    """Names of images whose bytes are not those that were written; reads them all.

    ``progress`` is told (split, images read, images to read) by every rank of its own.
    """
    for split, images in cache.splits.items():
        source = images.source
        assert isinstance(source, Shards)
        mine = range(rank, len(source), world)
        for done, index in enumerate(mine, 1):
            if not source.is_right(index):
                yield source.name(index)
            if progress is not None and (done % AT_ONCE == 0 or done == len(mine)):
                progress(split, done, len(mine))


def _facts(folder: Path) -> dict[str, Any]:
    path = folder / FILE
    if not path.is_file():
        raise DataError(
            f"{folder} has no {FILE}: there is no whole cache. Write it, or the rest "
            "of it, with `natgrad data cache`."
        )
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        version = facts["version"]
    except (ValueError, KeyError) as error:
        raise DataError(f"{path} cannot be read ({error}).") from error
    if version != VERSION:
        raise DataError(f"{path} has {version=}. Must be {VERSION}: write it again.")
    return facts


def _index(path: Path) -> tuple[NDArray[np.void], NDArray[np.float32]]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return file["records"], file["mean"]
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{path} cannot be read ({error}).") from error
