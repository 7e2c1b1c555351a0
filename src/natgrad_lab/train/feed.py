"""What the loop eats: batches of this rank, mixed and smoothed, without end."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from natgrad_lab import data
from natgrad_lab.augment import RunningMixup, soft_targets
from natgrad_lab.data import Batch, Dataset, Loader
from natgrad_lab.train.config import TrainConfig
from natgrad_lab.train.processes import World
from natgrad_lab.train.tree import Rows

SMALL = 3 * 64 * 64
"""Numbers in an example up to which a thousand at a time are evaluated."""


class Feed:
    """Training batches one after the other, and passes over the test set.

    Args:
        dataset: what to train and test on.
        config: augmentation, mixup and label smoothing.
        world: this rank's share is what it gets.
        micro: examples a forward on this rank.
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
        small = math.prod(dataset.shape) <= SMALL
        self._train, self._test = data.loaders(
            dataset,
            batch_size=micro * world.size,
            test_batch_size=1000 if small else 64 * world.size,
            augment=config.data.augment,
            erasing=config.data.erasing,
            channels_last=channels_last,
            seed=config.seed,
            rank=world.rank,
            world=world.size,
        )
        self._mixup: RunningMixup | None = None
        if config.data.mixup:
            self._mixup = RunningMixup(config.data.mixup, seed=config.seed)
        self._stream = _endless(self._train)

    def next(self) -> Batch:
        """Inputs, and class numbers or (with mixup) probabilities."""
        inputs, labels = self._to_device(next(self._stream))
        if self._mixup is None:
            return inputs, labels
        smoothing = self._settings.label_smoothing
        return self._mixup(inputs, soft_targets(labels, self._classes, smoothing))

    def test(self) -> Iterator[Batch]:
        """This rank's part of the test set, once."""
        for batch in self._test:
            if len(batch[1]):
                yield self._to_device(batch)

    def state_dict(self) -> dict[str, Any]:
        """The position in the data, and the virtual batch of running mixup."""
        mixup = None if self._mixup is None else self._mixup.state_dict()
        if mixup is not None and mixup["inputs"] is not None:
            mixup |= {name: Rows(mixup[name]) for name in ("inputs", "targets")}
        return {"loader": self._train.state_dict(), "mixup": mixup}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo `state_dict`; the number of ranks may differ from then."""
        self._train.load_state_dict(self._position(state["loader"]))
        if self._mixup is not None:
            mixup = dict(state["mixup"])
            if mixup["inputs"] is not None:
                for name in ("inputs", "targets"):
                    mixup[name] = self._share(mixup[name])
            self._mixup.load_state_dict(mixup)

    def _share(self, rows: Tensor) -> Tensor:
        """This rank's part of the virtual batch of all ranks."""
        rank, size = self._world.rank, self._world.size
        part = rows.tensor_split(size)[rank].to(self._device)
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


def _endless(loader: Loader) -> Iterator[Batch]:
    while True:
        yield from loader
