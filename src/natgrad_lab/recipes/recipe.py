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
        published: the result its source reports; "" when it reports none.
    """

    name: str
    config: TrainConfig
    source: str
    published: str = ""
