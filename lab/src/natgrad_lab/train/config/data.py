"""What is trained on what: model and data."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from natgrad_lab.train.config.checks import LATER, checks

Crop = Literal["stretched", "resized"]
MixupKind = Literal["step", "image"]
IMAGES = ("crop", "size", "cache", "workers")
"""Settings of images that are decoded when they are asked for."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The network: a name known to `natgrad_lab.models.build`."""

    name: str = "resnet8"
    """Model name, for example resnet20, resnet50, airbench, mlp, vit, gpt; for values
    autoencoder, sines, field."""
    width: int | None = None
    """Width of the CIFAR ResNets, airbench, vit, gpt and the models of values. None:
    the model's own."""
    channels_last: bool | None = None
    """Memory layout of images. None: channels_last for ResNets."""
    norm_deviation: float = field(default=0.0, metadata=LATER)
    """Deviation, around 1, of the weights that normalisation layers begin with. (The
    published code of Osawa et al. has 0.05; their papers do not say.)"""

    def __post_init__(self) -> None:
        check, width = checks(self, "model."), self.width
        check("width", width is None or width >= 1, ">= 1 or none")
        check("norm_deviation", self.norm_deviation >= 0, ">= 0")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The data set and how a training batch is varied."""

    name: str = "digits"
    """Data set name: digits, cifar10, fashion_mnist, imagenet, text; of values, learnt
    by squared error: autoencoder, picture, poisson."""
    root: Path | None = None
    """Folder of all data sets. None: $NATGRAD_DATA, or the user's cache."""
    folder: Path | None = field(default=None, metadata=LATER)
    """text: folder of text files (.txt, .md, .py, .rst, at any depth). None: the folder
    text in the root, or without one the sources of Python's standard library."""
    crop: Crop = field(default="stretched", metadata=LATER)
    """imagenet: what training sees of an image. stretched: a window of the image
    stretched to 256 x 256 (Osawa et al. 2020, 6.1). resized: a part of random area and
    aspect, resized (torchvision's RandomResizedCrop)."""
    size: int = field(default=224, metadata=LATER)
    """imagenet: side of the images that the model sees; 256 scales with it."""
    cache: Path | None = field(default=None, metadata=LATER)
    """imagenet: folder that `natgrad data cache` has written. None: the originals."""
    workers: int | None = field(default=None, metadata=LATER)
    """imagenet: threads a process that decode. None: its share of the cores."""
    on_device: bool | None = field(default=None, metadata=LATER)
    """Normalise, erase and mix on the device, where batches are sent ahead as pixels.
    False: on the host. None: on the device if that is a GPU."""
    augment: bool = True
    """Random crops and flips, where the data set has them."""
    mixup: float = 0.0
    """alpha of running mixup (Osawa et al. 2019, eq. 9-12); 0 turns it off."""
    mixup_kind: MixupKind = field(default="image", metadata=LATER)
    """image: one lambda per image, max(lambda, 1 - lambda); erased after mixing; only
    the last forward is kept, as in the authors' code. step: one lambda per step, as it
    is printed; erased before mixing; a process keeps its share of the last batch."""
    erasing: float = 0.0
    """Probability that a zero rectangle is put on an image (Osawa et al. 2019, 4.1)."""
    label_smoothing: float = 0.0
    """Share of the label spread evenly over all classes."""

    def __post_init__(self) -> None:
        check, text = checks(self, "data."), self.name == "text"
        check("mixup", self.mixup >= 0, ">= 0")
        check("mixup", not (text and self.mixup), "0 for text")
        check("folder", text or self.folder is None, "none unless data.name is text")
        for name in IMAGES:
            usual = getattr(self, name) == getattr(type(self), name)
            ok = self.name == "imagenet" or usual
            check(name, ok, "unset unless data.name is imagenet")
        check("size", self.size >= 8, ">= 8")
        check("workers", self.workers is None or self.workers >= 1, ">= 1")
        check("erasing", 0 <= self.erasing <= 1, "in [0, 1]")
        check("label_smoothing", 0 <= self.label_smoothing < 1, "in [0, 1)")

    @property
    def options(self) -> dict[str, Any]:
        """What `natgrad_lab.data.load` is given beside name and root."""
        if self.name == "imagenet":
            images = {name: getattr(self, name) for name in IMAGES}
            threads = images.pop("workers")
            return {**images, "threads": threads}
        return {} if self.folder is None else {"folder": self.folder}
