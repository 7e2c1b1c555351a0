"""What the loop reads: batches of this rank, mixed and smoothed, without end.

A step's batch is ordered by forward, then by rank: the first examples are what all
ranks have in their first forward. Running mixup pairs example i of a step with example
i of the step before, however the batch is cut into forwards and ranks; the kind that
mixes by image pairs it with example i of the forward before.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from natgrad_lab import data
from natgrad_lab.augment import (
    ImageMixup,
    RandomErasing,
    RunningMixup,
    soft_targets,
)
from natgrad_lab.data import Batch, Dataset, Loader
from natgrad_lab.train.config import DataConfig, TrainConfig
from natgrad_lab.train.processes import World
from natgrad_lab.train.tree import Rows

_VIRTUAL = ("inputs", "targets")
SMALL = 3 * 64 * 64
"""Numbers in an example up to which a thousand at a time are evaluated."""


class Feed:
    """Training batches one after the other, and passes over the test set.

    Args:
        dataset: what to train and test on.
        config: augmentation, mixup and label smoothing.
        world: this rank's share is what it gets.
        micro: examples per forward on this rank; must divide its share of the batch.
        channels_last: the layout of images.
    """

    def __init__(
        self,
        dataset: Dataset,
        config: TrainConfig,
        world: World,
        *,
        micro: int,
        channels_last: bool = False,
    ) -> None:
        self.examples = len(dataset.train)
        self._classes = len(dataset.classes)
        self._settings, self._device = config.data, world.device
        self._world, self._channels_last = world, channels_last
        there = config.data.on_device
        if there is None:
            there = world.device.type != "cpu"
        small = math.prod(dataset.shape) <= SMALL
        self._train, self._test = data.loaders(
            dataset,
            batch_size=micro * world.size,
            test_batch_size=1000 if small else 64 * world.size,
            augment=config.data.augment,
            erasing=0.0 if _erases_mixed(config.data) else config.data.erasing,
            channels_last=channels_last,
            device=world.device if there else None,
            seed=config.seed,
            rank=world.rank,
            world=world.size,
        )
        self._mixup = _mixup(config, world, config.batch // (micro * world.size))
        self._stream = _endless(self._train)

    def next(self) -> Batch:
        """Inputs, and class numbers or (with mixup) probabilities."""
        inputs, labels = next(self._stream)
        if self._mixup is not None:
            # where the batch is: that of many forwards may not fit on a device
            smoothing = self._settings.label_smoothing
            targets = soft_targets(labels, self._classes, smoothing)
            inputs, labels = self._mixup(inputs, targets)
        return self._to_device((inputs, labels))

    def test(self) -> Iterator[Batch]:
        """This rank's part of the test set, once."""
        for batch in self._test:
            if len(batch[1]):
                yield self._to_device(batch)

    def state_dict(self) -> dict[str, Any]:
        """The position in the data, and the virtual batch of running mixup.

        Between two steps only.
        """
        return {"loader": self._train.state_dict(), "mixup": self._mixup_state()}

    def _mixup_state(self) -> dict[str, Any] | None:
        if self._mixup is None:
            return None
        state = self._mixup.state_dict()
        cut = {"ranks": self._world.size, "parts": self._mixup.parts}
        rows = {
            name: Rows(torch.cat(state[name])) if state[name] else None
            for name in _VIRTUAL
        }
        return {"step": state["step"], **cut, **rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo `state_dict`; the number of ranks may differ from then."""
        self._train.load_state_dict(self._position(state["loader"]))
        if self._mixup is not None:
            saved = state["mixup"]
            cut = saved["ranks"], saved["parts"]
            parts = {name: self._parts(saved[name], *cut) for name in _VIRTUAL}
            self._mixup.load_state_dict({"step": saved["step"], "part": 0, **parts})

    def _parts(self, rows: Tensor | None, ranks: int, parts: int) -> list[Tensor]:
        """This rank's parts of the virtual batch of all ranks, laid rank by rank."""
        if rows is None or self._mixup is None:
            return []
        if len(rows) % (self._mixup.parts * self._world.size):
            return []  # one forward's images, of other processes: begin without them
        ordered = rows.unflatten(0, (ranks, parts, -1)).transpose(0, 1).flatten(0, 2)
        own = ordered.unflatten(0, (self._mixup.parts, self._world.size, -1))
        return [self._laid_out(part) for part in own[:, self._world.rank]]

    def _laid_out(self, part: Tensor) -> Tensor:
        last = part.dim() == 4 and self._channels_last
        format = torch.channels_last if last else torch.contiguous_format
        return part.contiguous(memory_format=format)

    def _position(self, saved: dict[str, int]) -> dict[str, int]:
        """The same example in batches of another size.

        With micro-batches of a fixed size the ranks together read more or less at a
        time when they are more or fewer. Rounded down: no example is left out.
        """
        own = self._train.state_dict()
        size = own["batch_size"]
        batch = min(saved["batch"] * saved["batch_size"] // size, len(self._train) - 1)
        return {**saved, "batch_size": size, "batch": batch}

    def close(self) -> None:
        """Stop the loaders' threads."""
        self._train.close()
        self._test.close()

    def _to_device(self, batch: Batch) -> tuple[Tensor, Tensor]:
        inputs, labels = batch
        if self._device.type == "cpu":
            return inputs, labels
        return (
            inputs.to(self._device, non_blocking=True),
            labels.to(self._device, non_blocking=True),
        )


def _erases_mixed(settings: DataConfig) -> bool:
    """Whether images are erased after they are mixed, not as they are loaded."""
    return bool(settings.mixup) and settings.mixup_kind == "image"


def _mixup(config: TrainConfig, world: World, forwards: int) -> RunningMixup | None:
    """The running mixup that a config asks for."""
    alpha, probability = config.data.mixup, config.data.erasing
    if not alpha:
        return None
    if not _erases_mixed(config.data):
        return RunningMixup(alpha, seed=config.seed, parts=forwards)
    erasing = RandomErasing(probability=probability) if probability else None
    return ImageMixup(
        alpha, seed=config.seed, erasing=erasing, rank=world.rank, world=world.size
    )


def _endless(loader: Loader) -> Iterator[Batch]:
    while True:
        yield from loader
