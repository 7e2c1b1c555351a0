"""The loaders a dataset is trained and tested with."""

from natgrad_lab.augment import (
    CenterCrop,
    Chain,
    Normalize,
    RandomCropFlip,
    RandomErasing,
    Transform,
)
from natgrad_lab.data.dataset import Dataset
from natgrad_lab.data.loader import Loader


def train_transform(
    dataset: Dataset,
    *,
    augment: bool = True,
    erasing: float = 0.0,
    channels_last: bool = False,
) -> Chain | None:
    """How training inputs are varied and normalised; None for text.

    Args:
        dataset: tells its padding, whether it flips, its mean and deviation.
        augment: random crops and flips.
        erasing: probability of random erasing.
        channels_last: lay images out in channels_last.
    """
    if dataset.is_text:
        return None
    if not augment:
        steps = [CenterCrop(dataset.shape[-1])]
    else:
        steps = [_random_crop(dataset)]
    steps += [_normalize(dataset, channels_last)]
    if erasing:
        steps += [RandomErasing(probability=erasing)]
    return Chain(steps)


def eval_transform(dataset: Dataset, *, channels_last: bool = False) -> Chain | None:
    """How test inputs are normalised: the middle crop; None for text."""
    return train_transform(dataset, augment=False, channels_last=channels_last)


def _random_crop(dataset: Dataset) -> Transform:
    return RandomCropFlip(
        size=dataset.shape[-1], padding=dataset.padding, flip=dataset.flip
    )


def _normalize(dataset: Dataset, channels_last: bool) -> Transform:
    assert dataset.mean is not None
    assert dataset.std is not None
    return Normalize(dataset.mean, dataset.std, channels_last=channels_last)


def loaders(
    dataset: Dataset,
    *,
    batch_size: int,
    test_batch_size: int = 1000,
    augment: bool = True,
    erasing: float = 0.0,
    channels_last: bool = False,
    seed: int = 0,
    rank: int = 0,
    world: int = 1,
    prefetch: int = 2,
) -> tuple[Loader, Loader]:
    """The training and the test loader of a dataset, for one rank.

    Batch sizes are global, over all ranks. The test loader goes once over all examples
    in order; its last batch may be smaller, and empty on some ranks. The other
    arguments are those of `train_transform` and of `Batches`.
    """
    train = Loader.of(
        dataset.train,
        batch_size=batch_size,
        transform=train_transform(
            dataset, augment=augment, erasing=erasing, channels_last=channels_last
        ),
        seed=seed,
        rank=rank,
        world=world,
        prefetch=prefetch,
    )
    test = Loader.of(
        dataset.test,
        batch_size=test_batch_size,
        transform=eval_transform(dataset, channels_last=channels_last),
        rank=rank,
        world=world,
        shuffle=False,
        drop_last=False,
        prefetch=prefetch,
    )
    return train, test
