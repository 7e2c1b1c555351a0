"""The options that change what a layer computes, and which statistics it has."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LayerOptions:
    """The options that change what a layer computes.

    Attributes:
        norm, sharing, loss: as in `natgrad.Options`.
        sides, source, corrected: which statistics the rule needs; see `natgrad.Rule`.
        plain: why layers have no statistics, if the rule is one without.
        group: tells parameters of different groups apart.
        bias: whether a layer's bias is part of its matrix.
        matrices: how many matrices a linear weight is; None: as its kind says.
        gather_inputs: as in `natgrad.Options`.
    """

    norm: str = "unit"
    sharing: str = "expand"
    loss: str = "mean"
    sides: str = "both"
    source: str = "activations"
    corrected: bool = False
    largest_factor: int | None = None
    plain: str = ""
    group: int = 0
    bias: bool = True
    matrices: int | None = None
    gather_inputs: bool = True

    @property
    def any_matrix(self) -> bool:
        """Whether the rule can do without a layer: a parameter is enough."""
        own = self.source == "gradients" or self.sides == "none"
        return own and not self.plain


# The sides of a matrix whose factors each choice has.
SIDES = {
    "both": ("right", "left"),
    "inputs": ("right",),
    "outputs": ("left",),
    "none": (),
}


# The names of the factors of the weight's own gradient, by side.
OWN = {"right": "R", "left": "L"}
