"""Batches of a split: shuffled, sharded, augmented, made ahead of need.

Everything random about a batch follows from (seed, epoch, batch number) alone. So the
position is two numbers, a resumed run sees the same batches bit by bit, and a global
batch has the same examples, changed in the same way, whatever the number of ranks.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor

from natgrad_lab.augment import Transform
from natgrad_lab.data.dataset import Split
from natgrad_lab.data.images import ImageSplit, View
from natgrad_lab.data.placement import Placement, Sent
from natgrad_lab.data.prefetch import Prefetcher

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Batches:
    """Which examples are in which batch, and how they are changed; no state.

    Args:
        split: the examples.
        batch_size: of the global batch, over all ranks.
        view: what is made of the images of an `ImageSplit` as they are decoded.
        transform: applied to the inputs of a batch.
        placement: where the batch is sent, after that.
        seed: of the order and the augmentation; the same on all ranks.
        rank: this process's number.
        world: number of processes; rank r has the r-th contiguous part of each batch.
        shuffle: whether each epoch has its own order.
        drop_last: leave out the last batch of an epoch if it is not full.
    """

    split: Split
    batch_size: int
    view: View | None = None
    transform: Transform | None = None
    placement: Placement | None = None
    seed: int = 0
    rank: int = 0
    world: int = 1
    shuffle: bool = True
    drop_last: bool = True

    def __post_init__(self) -> None:
        examples = len(self.split)
        if not 0 <= self.rank < self.world:
            raise ValueError(f"Invalid rank={self.rank}. Must be in [0, {self.world}).")
        if self.batch_size < 1:
            raise ValueError(f"Invalid batch_size={self.batch_size}. Must be >= 1.")
        if self.drop_last and self.batch_size % self.world:
            raise ValueError(
                f"Invalid batch_size={self.batch_size}. "
                f"Must be a multiple of world={self.world}."
            )
        if self.drop_last and self.batch_size > examples:
            raise ValueError(
                f"Invalid batch_size={self.batch_size}. "
                f"Must be at most the {examples:,} examples."
            )

    def __len__(self) -> int:
        full, rest = divmod(len(self.split), self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def order(self, epoch: int) -> Tensor:
        """The numbers of all examples as an epoch visits them."""
        examples = len(self.split)
        if not self.shuffle:
            return torch.arange(examples)
        return torch.randperm(examples, generator=self._generator(epoch, "order"))

    def make(self, order: Tensor, epoch: int, batch: int) -> Sent:
        """This rank's part of one global batch."""
        start = batch * self.batch_size
        indices = order[start : start + self.batch_size]
        mine = slice(*_share(len(indices), self.rank, self.world))
        early, middle, late = self._uniforms(len(indices), mine, epoch, batch)
        if self.view is None:
            inputs, labels = self.split.fetch(indices[mine])
        else:
            assert isinstance(self.split, ImageSplit)
            inputs, labels = self.split.view(indices[mine], self.view, early)
        if self.transform is not None:
            inputs = self.transform(inputs, middle)
        if self.placement is not None:
            return self.placement.send(inputs, labels, late)
        return Sent(inputs, labels)

    def _uniforms(
        self, examples: int, mine: slice, epoch: int, batch: int
    ) -> Sequence[Tensor]:
        """This rank's rows for what uses them: view, transform, placement."""
        users = (self.view, self.transform, self.placement)
        each = [0 if user is None else user.randoms for user in users]
        generator = self._generator(epoch, batch)
        uniforms = torch.rand((examples, sum(each)), generator=generator)
        return uniforms[mine].split(each, dim=1)

    def stream(self, epoch: int, batch: int) -> Iterator[Sent]:
        """All batches from a position on, epoch after epoch without end."""
        for now in count(epoch):
            order = self.order(now)
            for number in range(batch, len(self)):
                yield self.make(order, now, number)
            batch = 0

    def _generator(self, *place: int | str) -> torch.Generator:
        text = "/".join(map(str, (self.seed, *place)))
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "little", signed=True)
        return torch.Generator().manual_seed(seed)


def _share(length: int, rank: int, world: int) -> tuple[int, int]:
    return length * rank // world, length * (rank + 1) // world


class Loader:
    """Iterates over the rest of the current epoch; then the next epoch is current.

    A loop that is left early goes on where it was when the next one starts. Batches are
    made in a background thread, over the end of an epoch too; `waited` counts the
    seconds that the loop had to wait for them.

    Args:
        batches: which batches; or pass its arguments to `Loader.of`.
        prefetch: batches to keep ready; 0 makes each when it is asked for.
    """

    def __init__(self, batches: Batches, *, prefetch: int = 2) -> None:
        self.batches, self.prefetch = batches, prefetch
        self.epoch, self.batch = 0, 0
        self._waited = 0.0
        self._running: Prefetcher[Sent] | None = None

    @classmethod
    def of(cls, split: Split, *, prefetch: int = 2, **settings: Any) -> "Loader":
        """A loader of `Batches(split=split, **settings)`."""
        return cls(Batches(split=split, **settings), prefetch=prefetch)

    def __len__(self) -> int:
        """Batches in an epoch."""
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        epoch = self.epoch
        while self.epoch == epoch:
            if self._running is None:
                stream = self.batches.stream(self.epoch, self.batch)
                self._running = Prefetcher(stream, self.prefetch)
            item = next(self._running)
            # before the loop's body runs: a checkpoint made there counts this batch
            self._advance()
            yield item.take()

    def _advance(self) -> None:
        self.batch += 1
        if self.batch == len(self):
            self.epoch, self.batch = self.epoch + 1, 0

    @property
    def waited(self) -> float:
        """Seconds spent waiting for batches so far."""
        running = self._running.waited if self._running else 0.0
        return self._waited + running

    def seek(self, epoch: int, batch: int = 0) -> None:
        """Make a batch of an epoch the next one."""
        if epoch < 0 or not 0 <= batch < len(self):
            raise ValueError(
                f"Invalid {epoch=}, {batch=}. Must be >= 0 and in [0, {len(self)})."
            )
        self.close()
        self.epoch, self.batch = epoch, batch

    def state_dict(self) -> dict[str, int]:
        """The position, and what must be the same for it to mean the same."""
        return {"epoch": self.epoch, "batch": self.batch, **self._identity()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from a `state_dict()`; rank and world may differ from then."""
        for key, value in self._identity().items():
            if state[key] != value:
                raise ValueError(
                    f"Invalid {key}={value}. Must be {state[key]} to resume."
                )
        self.seek(state["epoch"], state["batch"])

    def _identity(self) -> dict[str, int]:
        b = self.batches
        return {
            "seed": b.seed,
            "batch_size": b.batch_size,
            "examples": len(b.split),
            "shuffle": b.shuffle,
        }

    def close(self) -> None:
        """Stop the background thread; the position stays."""
        if self._running is not None:
            self._waited = self.waited
            self._running.close()
            self._running = None

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
