"""Experts: a stack of linear layers, each with inputs of its own.

Letters: k experts, t tokens, m outputs, n inputs (the bias last).
"""

from collections.abc import Collection

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from natgrad.layers.block import Layout, Observed
from natgrad.layers.matrices import Kronecker
from natgrad.math.statistics import widen


class Experts(Kronecker):
    """``y = x W_k^T`` for the tokens of expert k, with a weight ``(k, m, n)``.

    The layer is called with tokens sorted by expert ``(t, n)`` and, as the second
    tensor, how many each expert has; or with ``(k, t, n)``, where unused places are
    zero. It returns ``(t, m)``, or ``(k, t, m)``. See Note [Inputs of each matrix].
    """

    name = "experts"

    def layout(self, module: nn.Module) -> Layout:
        experts, rows, cols = self.weight(module).shape
        bias = self.bias(module) is not None
        return Layout(
            stack=experts,
            rows=rows,
            cols=cols + bias,
            right="A",
            left="G",
            counted=True,
        )

    def features(self, module: nn.Module) -> int:
        return self.layout(module).rows

    def examples(self, module: nn.Module, y: Tensor) -> int:
        """Tokens are of any example."""
        return 0

    def observe(
        self, module: nn.Module, x: Tensor, y: Tensor, want: Collection[str]
    ) -> Observed:
        return self.observe_call(module, (x,), y, want)

    def observe_call(
        self,
        module: nn.Module,
        given: tuple[Tensor, ...],
        y: Tensor,
        want: Collection[str],
    ) -> Observed:
        x, sizes = given[0], given[1:2] if given[0].dim() == 2 else ()
        if x.dim() == 2 and not sizes:
            raise ValueError(
                f"{type(module).__name__} was called with tokens {tuple(x.shape)} and "
                "without how many each expert has. Must be its second tensor."
            )
        rows = _by_expert(widen(x), *sizes)
        used = _used(rows, *sizes)
        if self.bias(module) is not None:
            rows = torch.cat((rows, used.unsqueeze(-1).to(rows)), -1)
        return Observed(
            moments={"A": rows.mT @ rows} if "A" in want else {},
            positions=int(used.sum()),
            kept=sizes,
            members=used.sum(1).double(),
        )

    def gradient_moments(
        self,
        module: nn.Module,
        g: Tensor,
        kept: tuple[Tensor, ...],
        want: Collection[str],
    ) -> dict[str, Tensor]:
        if "G" not in want:
            return {}
        rows = _by_expert(widen(g), *kept)
        return {"G": rows.mT @ rows}


def _by_expert(x: Tensor, sizes: Tensor | None = None) -> Tensor:
    """``(k, t, n)``, with zeros where an expert has fewer tokens than another."""
    if x.dim() == 3 or sizes is None:
        return x
    counts: list[int] = sizes.tolist()
    return pad_sequence(list(x[: sum(counts)].split(counts)), batch_first=True)


def _used(rows: Tensor, sizes: Tensor | None = None) -> Tensor:
    """``(k, t)``: whether there is a token at a place."""
    if sizes is None:
        return rows.any(-1)
    places = torch.arange(rows.shape[1], device=rows.device)
    return places < sizes.to(rows.device).unsqueeze(1)
