"""The loader: exact positions, sharding, prefetch."""

import gc
import threading
import time
from typing import Any

import pytest
import torch

from natgrad_lab import data
from natgrad_lab.augment import Chain, RandomCropFlip, RandomErasing
from natgrad_lab.data import Batches, Loader, Prefetcher, TensorSplit

TRANSFORM = Chain([RandomCropFlip(padding=2), RandomErasing()])


def split(count: int = 23) -> TensorSplit:
    g = torch.Generator().manual_seed(0)
    images = torch.randint(1, 256, (count, 2, 6, 6), generator=g, dtype=torch.uint8)
    return TensorSplit(images, torch.arange(count))


def loader(count: int = 23, **settings: Any) -> Loader:
    defaults: dict[str, Any] = {"batch_size": 4, "transform": TRANSFORM, "seed": 5}
    return Loader.of(split(count), **{**defaults, **settings})


def epochs(source: Loader, count: int):
    return [batch for _ in range(count) for batch in source]


def same(one, two) -> bool:
    pairs = list(zip(one, two, strict=True))
    return all(torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in pairs)


def test_an_epoch_visits_each_example_at_most_once_in_a_new_order():
    source = loader()
    orders = [torch.cat([labels for _, labels in source]).tolist() for _ in range(2)]
    assert len(source) == 5
    assert all(len(set(o)) == 20 for o in orders)
    assert orders[0] != orders[1]
    assert orders[0] != sorted(orders[0])


def test_nothing_is_lost_or_shuffled_for_testing():
    source = loader(shuffle=False, drop_last=False)
    assert torch.cat([labels for _, labels in source]).tolist() == list(range(23))
    assert len(source) == 6


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_prefetch_does_not_change_the_batches(prefetch):
    expected = epochs(loader(prefetch=2), 3)
    assert same(epochs(loader(prefetch=prefetch), 3), expected)


def test_every_batch_of_every_epoch_has_its_own_augmentation():
    same_image = TensorSplit(split(1).inputs.expand(8, -1, -1, -1), torch.zeros(8))
    source = Loader.of(same_image, batch_size=4, transform=TRANSFORM)
    seen = [images for images, _ in epochs(source, 2)]
    assert not any(torch.equal(seen[i], seen[j]) for i in range(4) for j in range(i))


def test_seeds_differ():
    assert not same(epochs(loader(seed=5), 1), epochs(loader(seed=6), 1))


@pytest.mark.parametrize("steps", [0, 1, 3, 5, 7, 10])
def test_resume_is_bitwise(steps):
    expected = epochs(loader(), 3)
    first = loader()
    for _ in range(steps):
        next(iter(first))
    second = loader()
    second.load_state_dict(first.state_dict())
    rest = []
    while second.epoch < 3:
        rest += list(second)
    assert same(rest, expected[steps:])


def test_the_position_counts_the_batch_in_hand():
    source = loader()
    states = [source.state_dict() for _ in source]
    assert [(s["epoch"], s["batch"]) for s in states] == [
        *[(0, b) for b in range(1, 5)],
        (1, 0),
    ]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_global_batch_is_the_same_for_every_world(world):
    expected = epochs(loader(), 2)
    ranks = [epochs(loader(rank=r, world=world), 2) for r in range(world)]
    joined = [
        tuple(torch.cat(part) for part in zip(*batch, strict=True))
        for batch in zip(*ranks, strict=True)
    ]
    assert same(joined, expected)


def test_a_position_moves_to_another_world():
    first = loader()
    next(iter(first))
    second = loader(rank=1, world=2)
    second.load_state_dict(first.state_dict())
    whole, part = next(iter(first)), next(iter(second))
    assert torch.equal(part[0], whole[0][2:])


def test_ranks_share_a_short_last_batch():
    settings = {"shuffle": False, "drop_last": False, "batch_size": 20, "world": 4}
    parts = [list(loader(rank=r, **settings))[-1][1].tolist() for r in range(4)]
    assert parts == [[], [20], [21], [22]]


def test_another_batch_size_cannot_resume():
    state = loader().state_dict()
    with pytest.raises(ValueError, match=r"batch_size=2. Must be 4 to resume"):
        loader(batch_size=2).load_state_dict(state)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"batch_size": 0}, r"batch_size=0. Must be >= 1"),
        ({"batch_size": 24}, r"batch_size=24. Must be at most the 23"),
        ({"world": 3}, r"batch_size=4. Must be a multiple of world=3"),
        ({"rank": 1}, r"rank=1. Must be in \[0, 1\)"),
    ],
)
def test_wrong_settings_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        loader(**wrong)


def test_a_position_outside_the_epoch_is_refused():
    with pytest.raises(ValueError, match="batch=5"):
        loader().seek(0, 5)


class SlowSplit:
    """Takes a while for each batch."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.fetched = seconds, 0

    def __len__(self) -> int:
        return 8

    def fetch(self, indices):
        time.sleep(self.seconds)
        self.fetched += 1
        return indices, indices


def test_batches_are_made_while_the_step_runs():
    slow = SlowSplit(0.01)
    source = Loader(Batches(split=slow, batch_size=1), prefetch=2)
    for number, _ in enumerate(source, start=1):
        deadline = time.monotonic() + 30
        while slow.fetched < number + 2 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert slow.fetched >= number + 2
        assert slow.fetched <= number + 3  # two ready, one in the making


def test_without_prefetch_every_batch_is_waited_for():
    source = Loader(Batches(split=SlowSplit(0.01), batch_size=1), prefetch=0)
    list(source)
    assert source.waited >= 8 * 0.01
    source.close()
    assert source.waited >= 8 * 0.01


def test_an_error_in_the_thread_reaches_the_loop():
    def broken():
        yield 1
        raise data.DataError("lost")

    items = Prefetcher(broken(), 2)
    assert next(items) == 1
    with pytest.raises(data.DataError, match="lost"):
        next(items)


def test_a_finite_iterator_ends():
    assert list(Prefetcher(iter([1, 2, 3]), 2)) == [1, 2, 3]


def threads() -> int:
    return sum(t.name == "natgrad-data" for t in threading.enumerate())


def test_the_thread_ends_with_its_loader():
    before = threads()
    source = loader()
    next(iter(source))
    assert threads() == before + 1
    del source
    gc.collect()
    assert threads() == before
    with loader() as other:
        next(iter(other))
    assert threads() == before


def test_the_loaders_of_digits_cover_and_normalise():
    digits = data.load("digits")
    train, test = data.loaders(
        digits, batch_size=64, test_batch_size=100, augment=False, channels_last=True
    )
    images, labels = (torch.cat(part) for part in zip(*train, strict=True))
    assert len(labels) == 64 * 22
    assert images.mean().item() == pytest.approx(0, abs=0.02)
    assert images.std().item() == pytest.approx(1, abs=0.02)
    assert sum(len(labels) for _, labels in test) == 360
    first = next(iter(test))[0]
    assert first.is_contiguous(memory_format=torch.channels_last)


def test_text_goes_through_the_same_loader():
    tokens = torch.arange(41, dtype=torch.uint8)
    source = Loader.of(data.TextSplit(tokens, 4), batch_size=5)
    inputs, labels = next(iter(source))
    assert inputs.shape == (5, 4)
    assert torch.equal(labels, inputs + 1)
