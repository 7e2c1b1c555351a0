"""A small GPT over characters."""

from torch import Tensor, nn

from natgrad_lab.models.init import transformer_
from natgrad_lab.models.transformer import Block, Positions


class GPT(nn.Module):
    """A decoder-only transformer, (B, T) token numbers -> (B, T, vocabulary) logits.

    Args:
        vocabulary: number of different tokens.
        context: longest sequence it takes.
        width: size of a token's vector.
        depth: number of blocks.
        heads: attention heads; must divide `width`.
    """

    def __init__(
        self,
        *,
        vocabulary: int = 128,
        context: int = 128,
        width: int = 128,
        depth: int = 4,
        heads: int = 4,
    ) -> None:
        super().__init__()
        self.context = context
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = Positions(context, width)
        self.blocks = nn.ModuleList(
            Block(width, heads, causal=True) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        # Not tied to the embedding: a shared weight would be two blocks of the Fisher.
        self.head = nn.Linear(width, vocabulary, bias=False)
        transformer_(self, depth=depth)

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.shape[1] > self.context:
            length, context = tokens.shape[1], self.context
            raise ValueError(f"Invalid sequence {length=}. Must be <= {context=}.")
        x = self.positions(self.tokens(tokens))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
