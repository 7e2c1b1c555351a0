"""Images a second of the ImageNet path: as it was, from the originals, from the cache.

    python -m benchmarks.images [--cores 1 2] [--seconds 30]    (a minute and a half)

Photographs of ImageNet's sizes are generated, and batches of what SP-NGD trains on are
made of them: windows of 224 pixels, mirrored, normalised, erased. The contenders take
turns (see Note [Interleaving] in common.py), so that ratios hold on a busy machine too;
CPU seconds an image are the robust number. *Cold* means that the files are not in the
system's memory, as far as the system lets go of them.
"""

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from benchmarks.common import (
    PLAIN,
    RESULTS,
    Contender,
    Sample,
    describe,
    interleave,
    machine,
    markdown_table,
    say,
    write_json,
)
from benchmarks.pictures import write_imagenet
from natgrad_lab import data
from natgrad_lab.augment import Chain, Normalize, RandomCropFlip, RandomErasing
from natgrad_lab.data.cache import Form, open_cache, write_cache
from natgrad_lab.data.imagenet import originals
from natgrad_lab.data.images import Files, ImageSplit, View

STEP_IMAGES, STEP_SECONDS = 32_768, 0.187
"""SP-NGD's step on 1,024 GPUs (Osawa et al. 2020, Table 1)."""
OLD, COLD, ORIGINALS = "before", "originals, cold", "originals"
WRITE, CACHE_COLD, CACHE, PIXELS = (
    "write the cache",
    "cache, cold",
    "cache",
    "cache, pixels",
)
ERASING = 0.5


class Before:
    """The path until this benchmark was written: Pillow decodes and resizes in threads,
    one thread crops, normalises and erases the batch."""

    def __init__(self, paths: Sequence[Path], mean: Tensor, threads: int) -> None:
        self._paths, self._pool = paths, ThreadPoolExecutor(threads)
        self._chain = Chain(
            [
                RandomCropFlip(size=224),
                Normalize(mean, torch.tensor(255.0)),
                RandomErasing(probability=ERASING),
            ]
        )

    def __call__(self) -> None:
        batch = torch.empty(len(self._paths), 256, 256, 3, dtype=torch.uint8)
        reads = self._pool.map(_read, self._paths)
        for row, pixels in zip(batch.unbind(), reads, strict=True):
            row.copy_(torch.from_numpy(pixels))
        self._chain(batch.permute(0, 3, 1, 2))


def _read(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        image.draft("RGB", (256, 256))
        size, bilinear = (256, 256), Image.Resampling.BILINEAR
        return np.array(image.convert("RGB").resize(size, bilinear))


def contenders(
    root: Path, cache: Path, batch: int, threads: int
) -> Iterator[Contender]:
    """Every way to make a batch, on so many threads; the first is the baseline."""
    torch.set_num_threads(threads)
    dataset = data.load("imagenet", root, threads=threads)
    kept = data.load("imagenet", root, cache=cache, threads=threads)
    pixels = data.steps(dataset, erasing=ERASING, device=torch.device("cpu")).view
    numbers = data.steps(dataset, erasing=ERASING, channels_last=True).view
    train, small = dataset.train, kept.train
    assert isinstance(train, ImageSplit)
    assert isinstance(small, ImageSplit)
    assert isinstance(train.source, Files)
    assert pixels is not None
    assert numbers is not None
    assert dataset.mean is not None
    paths = [train.source.paths[i % len(train)] for i in range(batch)]
    shards = list(cache.glob("*.tar"))
    yield Contender(name=OLD, step=Before(paths, dataset.mean, threads))
    originals_step = made(train, numbers, batch)
    yield Contender(name=COLD, step=originals_step, prepare=lambda _: let_go(paths))
    yield Contender(name=ORIGINALS, step=originals_step)
    yield Contender(name=WRITE, step=writing(root, batch, threads))
    cache_step = made(small, numbers, batch)
    yield Contender(name=CACHE_COLD, step=cache_step, prepare=lambda _: let_go(shards))
    yield Contender(name=CACHE, step=cache_step)
    yield Contender(name=PIXELS, step=made(small, pixels, batch))


def made(split: ImageSplit, view: View, batch: int) -> Callable[[], None]:
    """Makes a batch of a split's images."""
    indices = torch.arange(batch) % len(split)

    def step() -> None:
        split.view(indices, view, torch.rand(batch, view.randoms))

    return step


def writing(root: Path, batch: int, threads: int) -> Callable[[], None]:
    """Writes a cache of as many images."""
    splits, classes = originals(root, threads=threads)
    train = splits["train"]
    assert isinstance(train.source, Files)
    paths = [train.source.paths[i % len(train)] for i in range(batch)]
    labels = train.labels[torch.arange(batch) % len(train)]
    some = {"train": ImageSplit(Files(paths), labels, threads=threads)}

    def step() -> None:
        with tempfile.TemporaryDirectory() as folder:
            write_cache(Path(folder), some, classes, Form())

    return step


def let_go(paths: Sequence[Path]) -> None:
    """Ask the system to forget files."""
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def measure(
    root: Path, cache: Path, batch: int, threads: int, seconds: float
) -> list[dict[str, Any]]:
    """A row for each contender."""
    known = list(contenders(root, cache, batch, threads))
    samples = interleave(known, seconds=seconds, least=2, say=say)
    base = samples[OLD, PLAIN]
    return [
        row(each.name, samples[each.name, PLAIN], base, batch, threads)
        for each in known
    ]


def row(
    name: str, own: list[Sample], base: list[Sample], batch: int, threads: int
) -> dict[str, Any]:
    """Medians, and the median of the ratios to the baseline of the same round."""
    cpu = statistics.median(s.cpu for s in own) / batch
    wall = statistics.median(s.wall for s in own) / batch
    first = {s.round: s for s in reversed(base)}
    return {
        "path": name,
        "cores": threads,
        "cpu_ms": 1e3 * cpu,
        "images_a_second": 1 / wall,
        "times_cpu": statistics.median(first[s.round].cpu / s.cpu for s in own),
        "times_wall": statistics.median(first[s.round].wall / s.wall for s in own),
        "cores_for_a_step": STEP_IMAGES / STEP_SECONDS * cpu,
        "rounds": len(own),
    }


def report(rows: Sequence[dict[str, Any]], sizes: Sequence[int]) -> str:
    """The table."""
    cells = [
        [
            each["path"],
            str(each["cores"]),
            f"{each['cpu_ms']:.2f}",
            f"{each['times_cpu']:.2f}",
            f"{each['images_a_second']:.0f}",
            f"{each['times_wall']:.2f}",
            f"{each['cores_for_a_step']:,.0f}",
        ]
        for each in rows
    ]
    header = ("path", "threads", "CPU ms an image", "times less CPU")
    header += ("images a second", "times faster", "cores for SP-NGD's step")
    return (
        f"{markdown_table(header, cells)}\n\nThe cache has "
        f"{statistics.fmean(sizes) / 1e3:.1f} kB an image, the largest "
        f"{max(sizes) / 1e3:.1f}. SP-NGD's step: {STEP_IMAGES:,} images in "
        f"{STEP_SECONDS} s."
    )


def main() -> None:
    """Generate, measure, print and write down."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cores", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seconds", type=float, default=30.0, help="for each")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        root, cache = Path(folder), Path(folder) / "cache"
        say("generating photographs")
        write_imagenet(root, train=asked.batch // 2, val=2)
        splits, classes = originals(root)
        write_cache(cache, splits, classes, Form())
        train = open_cache(cache).splits["train"].source
        sizes = [len(train.read(i)) for i in range(len(train))]
        for threads in asked.cores:
            rows += measure(root, cache, asked.batch, threads, asked.seconds)
    text = report(rows, sizes)
    facts = machine()
    say(text)
    write_json(asked.out / "images.json", {"machine": facts, "rows": rows})
    (asked.out / "images.md").write_text(f"{text}\n\n{describe(facts)}\n")


if __name__ == "__main__":
    main()
