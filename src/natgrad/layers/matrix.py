"""Matrices that no known layer uses: of a bare parameter, an LSTM, experts."""

from collections.abc import Collection

from torch import Tensor, nn

from natgrad.layers.kind import LayerKind, LayerOptions, Layout, Observed


class Matrix(LayerKind):
    """A parameter of two or more dims, known by its own gradient alone.

    Two dims are one matrix. Of three dims the first counts matrices, as the experts of
    ``[E, out, in]``. Of more, the first is the outputs, as a convolution's.
    """

    name = "matrix"
    rescaled = True

    def __init__(self, options: LayerOptions, shape: tuple[int, ...]) -> None:
        super().__init__(options)
        self._shape = shape

    @staticmethod
    def fits(p: Tensor) -> bool:
        """Whether a parameter has at least two dims that are no ones."""
        return p.dim() >= 2 and sum(size > 1 for size in p.shape) >= 2

    def layout(self, module: nn.Module) -> Layout:
        """From the parameter's shape."""
        shape = self._shape
        stack, rows = shape[:2] if len(shape) == 3 else (1, shape[0])
        cols = 1
        for size in shape:
            cols *= size
        cols //= stack * rows
        return Layout(stack=stack, rows=rows, cols=cols, right="A", left="G")

    def observe(
        self, module: nn.Module, x: Tensor, y: Tensor, want: Collection[str]
    ) -> Observed:
        """Nothing: no layer is known."""
        return Observed()

    def gradient_moments(
        self,
        module: nn.Module,
        g: Tensor,
        kept: tuple[Tensor, ...],
        want: Collection[str],
    ) -> dict[str, Tensor]:
        """Nothing: no layer is known."""
        return {}

    def fold(self, module: nn.Module, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The parameter as ``(s, m, n)``."""
        layout = self.layout(module)
        return weight.reshape(layout.stack, layout.rows, layout.cols)

    def unfold(self, module: nn.Module, stack: Tensor) -> tuple[Tensor, Tensor | None]:
        """The inverse of `fold`."""
        return stack.reshape(self._shape), None
