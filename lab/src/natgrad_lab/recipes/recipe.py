"""What a recipe is."""

from dataclasses import dataclass

from natgrad_lab.train.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A named, complete setting of a run.

    Attributes:
        name: what `natgrad train` is given.
        config: every setting.
        source: where the settings come from.
        published: the result its source reports, "not printed" when it reports none
            for these settings; "" for our own recipes.
        measured: the result in this tree, and in how many epochs; None when nobody
            has run it.
    """

    name: str
    config: TrainConfig
    source: str
    published: str = ""
    measured: str | None = None


def in_epochs(best: str | None, epochs: float, where: str = "") -> str | None:
    """How a measured accuracy is shown: ``50.6 % in 1 epoch of CIFAR-10 (JPEG)``."""
    unit = "epoch" if epochs <= 1 else "epochs"
    return None if best is None else f"{best} % in {epochs:g} {unit}{where}"
