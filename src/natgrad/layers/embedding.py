"""Embeddings: a linear layer on one-hot inputs, so A is diagonal."""

from collections.abc import Collection

from torch import Tensor, nn

from natgrad.layers.block import LayerKind, Layout, Observed
from natgrad.math.examples import table_squares
from natgrad.math.statistics import gram, index_counts, widen


class Embedding(LayerKind):
    """``y = W[index]``: A counts how often each row is read, G is (dim, dim)."""

    name = "embedding"

    def refuse(self, module: nn.Module) -> str:
        if getattr(module, "sparse", False):
            return "its gradient is sparse"
        if getattr(module, "scale_grad_by_freq", False):
            return "its gradient is scaled by frequency"
        return ""

    def layout(self, module: nn.Module) -> Layout:
        vocabulary, dim = self.weight(module).shape
        return Layout(
            stack=1, rows=dim, cols=vocabulary, right="A", left="G", right_diagonal=True
        )

    def observe(
        self, module: nn.Module, x: Tensor, y: Tensor, want: Collection[str]
    ) -> Observed:
        # autograd keeps the indices for this layer's backward, so keeping them is free
        observed = Observed(kept=(x,))
        if "A" in want:
            read = self._read(module, x)
            like = widen(y.new_empty(0))
            size = len(self.weight(module))
            observed.moments = {"A": index_counts(read, size, like.dtype)}
            observed.positions = x.numel()
        return observed

    def gradient_moments(
        self,
        module: nn.Module,
        g: Tensor,
        kept: tuple[Tensor, ...],
        want: Collection[str],
    ) -> dict[str, Tensor]:
        if "G" not in want:
            return {}
        padding: int | None = getattr(module, "padding_idx", None)
        rows = g.reshape(-1, g.shape[-1])
        if padding is not None:
            rows = rows * (kept[0].reshape(-1, 1) != padding)
        return {"G": gram(rows, self.part_size(module, "left"))}

    def scale_moment(
        self, module: nn.Module, x: Tensor, g: Tensor, right: Tensor, left: Tensor
    ) -> Tensor:
        g = widen(g)
        padding: int | None = getattr(module, "padding_idx", None)
        if padding is not None:
            g = g * (x != padding).unsqueeze(-1)
        vocabulary = len(self.weight(module))
        whole = self.options.loss != "tokens" and x.dim() > 1
        x, g = (
            t.flatten(1, end) if whole else t.flatten(0, end).unsqueeze(1)
            for t, end in ((x, -1), (g, -2))
        )
        return table_squares(x, g, vocabulary, left)

    def fold(self, module: nn.Module, weight: Tensor, bias: Tensor | None) -> Tensor:
        return weight.T.unsqueeze(0)

    def unfold(self, module: nn.Module, stack: Tensor) -> tuple[Tensor, Tensor | None]:
        return stack[0].T, None

    def _read(self, module: nn.Module, x: Tensor) -> Tensor:
        """The indices without padding, whose rows get no gradient."""
        padding: int | None = getattr(module, "padding_idx", None)
        return x if padding is None else x[x != padding]
