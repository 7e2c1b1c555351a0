"""Running mixup of a batch that comes in parts, on one rank and on several."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from natgrad_lab import data, models
from natgrad_lab.train.config import DataConfig, TrainConfig
from natgrad_lab.train.feed import Feed
from natgrad_lab.train.processes import World

BATCH, STEPS = 64, 4
CUTS = [(1, 16), (2, 32), (2, 8), (4, 16), (4, 4)]
"""Ranks, and examples a forward: 64 in one to sixteen parts."""


def feeds(ranks: int, micro: int) -> list[Feed]:
    """The feeds of all ranks, without augmentation: it is drawn for each forward."""
    settings = DataConfig(
        augment=False, mixup=0.4, mixup_kind="step", label_smoothing=0.1
    )
    config = TrainConfig(batch=BATCH, micro_batch=micro, data=settings)
    digits = data.load("digits")
    worlds = [World(rank=rank, size=ranks) for rank in range(ranks)]
    return [Feed(digits, config, world, micro=micro) for world in worlds]


def step(all_ranks: list[Feed], micro: int) -> list[tuple[Tensor, Tensor]]:
    """One step's batches in their order: all ranks' first forwards, then the second."""
    forwards = BATCH // (micro * len(all_ranks))
    return [feed.next() for _ in range(forwards) for feed in all_ranks]


def joined(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    inputs, targets = zip(*parts, strict=True)
    return torch.cat(inputs), torch.cat(targets)


def close(all_ranks: list[Feed]) -> None:
    for feed in all_ranks:
        feed.close()


@pytest.mark.parametrize(("ranks", "micro"), CUTS)
def test_parts_are_mixed_as_the_whole_batch_is(ranks: int, micro: int) -> None:
    whole, cut = feeds(1, BATCH), feeds(ranks, micro)
    for _ in range(STEPS):
        expected, found = whole[0].next(), joined(step(cut, micro))
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])
    close(whole + cut)


@pytest.mark.parametrize(("ranks", "micro"), CUTS)
def test_accumulated_gradients_are_those_of_the_whole_batch(
    ranks: int, micro: int
) -> None:
    whole, cut = feeds(1, BATCH), feeds(ranks, micro)
    model = models.mlp().double()
    for _ in range(STEPS):
        expected = gradient(model, [whole[0].next()])
        found = gradient(model, step(cut, micro))
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    close(whole + cut)


def gradient(model: torch.nn.Module, parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Of the mean loss, accumulated over parts of equal size."""
    model.zero_grad()
    for inputs, targets in parts:
        loss = F.cross_entropy(model(inputs.double()), targets.double())
        (loss / len(parts)).backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return torch.cat([grad.flatten() for grad in grads])


def checkpoint(all_ranks: list[Feed]) -> dict[str, Any]:
    """What a checkpoint of all ranks gives back: rows laid one after the other."""
    states = [feed.state_dict() for feed in all_ranks]
    mixup = {
        name: torch.cat([state["mixup"][name].local for state in states])
        for name in ("inputs", "targets")
    }
    return {**states[0], "mixup": {**states[0]["mixup"], **mixup}}


@pytest.mark.parametrize(("ranks", "micro"), CUTS)
@pytest.mark.parametrize(("later", "then"), [(1, 64), (1, 16), (2, 16), (4, 16)])
def test_a_step_goes_on_in_other_parts(
    ranks: int, micro: int, later: int, then: int
) -> None:
    whole, cut = feeds(1, BATCH), feeds(ranks, micro)
    for _ in range(2):
        whole[0].next()
        step(cut, micro)
    again = feeds(later, then)
    for feed in again:
        feed.load_state_dict(checkpoint(cut))
    for _ in range(2):
        expected, found = whole[0].next(), joined(step(again, then))
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])
    close(whole + cut + again)


def test_a_checkpoint_before_the_first_step_has_no_virtual_batch() -> None:
    (first,), (second,) = feeds(1, 16), feeds(1, 16)
    second.load_state_dict(first.state_dict())
    assert torch.equal(second.next()[0], first.next()[0])
    close([first, second])


def by_image(ranks: int, micro: int) -> list[Feed]:
    settings = DataConfig(augment=False, mixup=0.4, mixup_kind="image", erasing=0.5)
    config = TrainConfig(batch=BATCH, micro_batch=micro, data=settings)
    digits = data.load("digits")
    worlds = [World(rank=rank, size=ranks) for rank in range(ranks)]
    return [Feed(digits, config, world, micro=micro) for world in worlds]


@pytest.mark.parametrize(("ranks", "micro"), [(2, 16), (4, 8)])
def test_mixing_by_image_does_not_depend_on_the_ranks(ranks: int, micro: int) -> None:
    """A forward of all ranks has 32 images, on however many ranks."""
    whole, cut = by_image(1, 32), by_image(ranks, micro)
    for _ in range(STEPS):
        expected, found = joined(step(whole, 32)), joined(step(cut, micro))
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])
    close(whole + cut)


def test_mixing_by_image_keeps_one_forward() -> None:
    (feed,) = by_image(1, 16)
    step([feed], 16)
    assert len(feed.state_dict()["mixup"]["inputs"].local) == 16
    close([feed])


def test_mixing_by_image_goes_on_with_other_ranks() -> None:
    """The same images a forward: to the last bit. Others: the first is not mixed."""
    (first,) = by_image(1, 32)
    step([first], 32)
    saved = checkpoint([first])
    for ranks, micro, same in ((2, 16, True), (1, 64, False)):
        again = by_image(ranks, micro)
        for feed in again:
            feed.load_state_dict(saved)
        _, targets = joined(step(again, micro))
        mixed = ((targets > 0) & (targets < 1)).any(1)
        assert bool(mixed[: micro * ranks].any()) is same
        close(again)
    close([first])


def test_erasing_by_image_is_after_mixing() -> None:
    """Nothing is erased twice: the loader leaves it to the mixup."""
    (feed,) = by_image(1, BATCH)
    inputs, _ = feed.next()
    plain = Feed(
        data.load("digits"),
        TrainConfig(batch=BATCH, data=DataConfig(augment=False)),
        World(),
        micro=BATCH,
    )
    whole, _ = plain.next()
    differs = (inputs != whole).flatten(1).any(1)
    assert 16 < int(differs.sum()) < 48
    close([feed, plain])
