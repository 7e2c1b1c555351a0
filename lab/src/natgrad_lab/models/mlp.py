"""A multi-layer perceptron."""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from natgrad_lab.models.init import he_normal_


class MLP(nn.Module):
    """Linear layers with ReLU between them; the input is flattened.

    Args:
        in_features: values in one example, whatever its shape: (N, ...).
        hidden: widths of the hidden layers.
        num_classes: size of the output, (N, num_classes).
    """

    def __init__(
        self,
        *,
        in_features: int = 64,
        hidden: Sequence[int] = (128, 128),
        num_classes: int = 10,
    ) -> None:
        super().__init__()
        pairs = list(pairwise((in_features, *hidden, num_classes)))
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in pairs)
        he_normal_(self)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for layer in list(self.layers)[:-1]:
            x = layer(x).relu()
        return self.layers[-1](x)
