"""A small vision transformer."""

from torch import Tensor, nn

from natgrad_lab.models.init import transformer_
from natgrad_lab.models.transformer import Block, Positions


class ViT(nn.Module):
    """A vision transformer that averages its positions before the last layer.

    Args:
        image_size: height and width of the images, (N, in_channels, size, size).
        patch: side of the square patches; must divide `image_size`.
        in_channels: channels of the images.
        num_classes: size of the output, (N, num_classes).
        width: size of a patch's vector.
        depth: number of blocks.
        heads: attention heads; must divide `width`.
    """

    def __init__(
        self,
        *,
        image_size: int = 32,
        patch: int = 4,
        in_channels: int = 3,
        num_classes: int = 10,
        width: int = 128,
        depth: int = 6,
        heads: int = 4,
    ) -> None:
        super().__init__()
        if image_size % patch:
            raise ValueError(f"Invalid {patch=}. Must divide {image_size=}.")
        self.patches = nn.Conv2d(in_channels, width, patch, patch)
        self.positions = Positions((image_size // patch) ** 2, width)
        self.blocks = nn.ModuleList(
            Block(width, heads, causal=False) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Linear(width, num_classes)
        transformer_(self, depth=depth)

    def forward(self, x: Tensor) -> Tensor:
        x = self.positions(self.patches(x).flatten(2).transpose(1, 2))
        for block in self.blocks:
            x = block(x)
        return self.fc(self.norm(x).mean(1))
