"""The loaders a dataset is trained and tested with."""

from dataclasses import dataclass

import torch

from natgrad_lab.augment import (
    CenterCrop,
    Chain,
    Finish,
    Normalize,
    RandomCropFlip,
    RandomErasing,
    Transform,
)
from natgrad_lab.data.dataset import Dataset
from natgrad_lab.data.images import View
from natgrad_lab.data.loader import Loader
from natgrad_lab.data.placement import Placement


@dataclass(frozen=True, kw_only=True)
class Steps:
    """What happens to the inputs of a batch, and where; see `Batches`."""

    view: View | None = None
    transform: Transform | None = None
    placement: Placement | None = None


def steps(
    dataset: Dataset,
    *,
    augment: bool = True,
    erasing: float = 0.0,
    channels_last: bool = False,
    device: torch.device | None = None,
) -> Steps:
    """How a dataset's inputs are varied and normalised.

    Args:
        dataset: tells its windows or padding, whether it flips, its mean and deviation.
        augment: random crops and flips.
        erasing: probability of random erasing.
        channels_last: lay images out in channels_last.
        device: send batches there, and do there what is not cutting of encoded images.
            None: everything is done here, and batches stay here.
    """
    if dataset.is_text or dataset.values:
        return Steps(placement=None if device is None else Placement(device, None))
    normalize = _normalize(dataset, channels_last, device)
    erase = RandomErasing(probability=erasing) if erasing else None
    window = dataset.window if augment else dataset.middle
    if window is not None and device is None:
        finish = Finish(normalize, erase)
        view = View(window=window, finish=finish, channels_last=channels_last)
        return Steps(view=view)
    rest = [normalize] if erase is None else [normalize, erase]
    if window is not None and device is not None:
        view = View(window=window, pin=device.type == "cuda")
        return Steps(view=view, placement=Placement(device, Chain(rest)))
    whole = Chain([_crop(dataset, augment), *rest])
    if device is None:
        return Steps(transform=whole)
    return Steps(placement=Placement(device, whole))


def _crop(dataset: Dataset, augment: bool) -> Transform:
    size = dataset.shape[-1]
    if not augment:
        return CenterCrop(size)
    return RandomCropFlip(size=size, padding=dataset.padding, flip=dataset.flip)


def _normalize(
    dataset: Dataset, channels_last: bool, device: torch.device | None
) -> Normalize:
    assert dataset.mean is not None
    assert dataset.std is not None
    mean, std = dataset.mean.to(device), dataset.std.to(device)
    return Normalize(mean, std, channels_last=channels_last)


def loaders(
    dataset: Dataset,
    *,
    batch_size: int,
    test_batch_size: int = 1000,
    augment: bool = True,
    erasing: float = 0.0,
    channels_last: bool = False,
    device: torch.device | None = None,
    seed: int = 0,
    rank: int = 0,
    world: int = 1,
    prefetch: int = 2,
) -> tuple[Loader, Loader]:
    """The training and the test loader of a dataset, for one rank.

    Batch sizes are global, over all ranks. The test loader goes once over all examples
    in order; its last batch may be smaller, and empty on some ranks. The other
    arguments are those of `steps` and of `Batches`.
    """
    how = steps(
        dataset,
        augment=augment,
        erasing=erasing,
        channels_last=channels_last,
        device=device,
    )
    train = Loader.of(
        dataset.train,
        batch_size=batch_size,
        view=how.view,
        transform=how.transform,
        placement=how.placement,
        seed=seed,
        rank=rank,
        world=world,
        prefetch=prefetch,
    )
    plain = steps(dataset, augment=False, channels_last=channels_last, device=device)
    test = Loader.of(
        dataset.test,
        batch_size=test_batch_size,
        view=plain.view,
        transform=plain.transform,
        placement=plain.placement,
        rank=rank,
        world=world,
        shuffle=False,
        drop_last=False,
        prefetch=prefetch,
    )
    return train, test
