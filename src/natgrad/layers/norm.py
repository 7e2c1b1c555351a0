"""Normalisation layers: scale and shift per channel, from per-example gradients.

The Fisher of ``y = gamma xhat + beta`` is formed from each example's own gradient
``(sum of g xhat, sum of g)`` a channel, kept 2x2 a channel (``unit``: SP-NGD,
eq. 15-17), diagonal (``diag``: Osawa et al. 2019, section 5.4) or ``full``.

Letters: e examples, c channels, t positions, p parameters a channel (1 or 2).
"""

from abc import abstractmethod
from collections.abc import Collection

import torch
from torch import Tensor, nn

from natgrad.layers.block import LayerKind, Layout, Observed, setting
from natgrad.math.statistics import diagonal_moment, full_moment, unit_moment, widen

FORMS = {"unit": unit_moment, "diag": diagonal_moment, "full": full_moment}


class Norm(LayerKind):
    """What the normalisation layers share; each says how it normalises.

    They look at all examples: xhat needs the whole batch, and these statistics are
    cheap.
    """

    is_norm = True

    def refuse(self, module: nn.Module) -> str:
        if self.options.norm == "skip":
            return "normalisation layers are left out (norm='skip')"
        return ""

    def features(self, module: nn.Module) -> int:
        return self.weight(module).numel()

    def layout(self, module: nn.Module) -> Layout:
        channels = self.weight(module).numel()
        each = 1 + (self.bias(module) is not None)
        form = self.options.norm
        if form == "unit":
            return Layout(stack=channels, rows=1, cols=each, right=form)
        return Layout(
            stack=1,
            rows=1,
            cols=channels * each,
            right=form,
            right_diagonal=form == "diag",
        )

    @abstractmethod
    def normalised(
        self, module: nn.Module, x: Tensor, *kept: Tensor
    ) -> tuple[Tensor, Tensor | float]:
        """xhat in a new tensor like ``x``, but for a scale a channel, and that scale.

        ``x`` and ``kept`` are what `observe` kept. A scale that is the same for a whole
        channel is cheaper to apply to the sums.
        """

    def channels_last(self, module: nn.Module, x: Tensor) -> Tensor:
        """``x`` as ``(e, t, c)``: a view in either memory format."""
        return x.movedim(1, -1).flatten(1, -2) if x.dim() > 2 else x.unsqueeze(1)

    def observe(
        self, module: nn.Module, x: Tensor, y: Tensor, want: Collection[str]
    ) -> Observed:
        return Observed(kept=(x,))

    def gradient_moments(
        self,
        module: nn.Module,
        g: Tensor,
        kept: tuple[Tensor, ...],
        want: Collection[str],
    ) -> dict[str, Tensor]:
        if self.options.norm not in want:
            return {}
        xhat, scale = self.normalised(module, widen(kept[0]), *kept[1:])
        xhat = self.channels_last(module, xhat)
        g = self.channels_last(module, widen(g))
        if self.options.loss == "tokens":
            xhat, g = xhat.reshape(-1, 1, xhat.shape[-1]), g.reshape(-1, 1, g.shape[-1])
        parts = [xhat.mul_(g).sum(1).mul_(scale)]
        if self.bias(module) is not None:
            parts.append(g.sum(1))
        per_example = torch.stack(parts, dim=2)
        return {self.options.norm: FORMS[self.options.norm](per_example)}

    def fold(self, module: nn.Module, weight: Tensor, bias: Tensor | None) -> Tensor:
        pairs = [x.flatten() for x in (weight, bias) if x is not None]
        layout = self.layout(module)
        return torch.stack(pairs, dim=-1).reshape(layout.stack, 1, layout.cols)

    def unfold(self, module: nn.Module, stack: Tensor) -> tuple[Tensor, Tensor | None]:
        weight = self.weight(module)
        pairs = stack.reshape(weight.numel(), -1)
        shift = pairs[:, 1].reshape(weight.shape) if pairs.shape[1] == 2 else None
        return pairs[:, 0].reshape(weight.shape), shift


class BatchNorm(Norm):
    """BatchNorm1d/2d/3d: channel dim 1; batch statistics in training mode."""

    name = "batch_norm"
    channel_dim = 1

    def normalised(
        self, module: nn.Module, x: Tensor, *kept: Tensor
    ) -> tuple[Tensor, Tensor | float]:
        rows = x.reshape(*x.shape[:2], -1)  # a view in either memory format
        running: Tensor | None = setting(module, "running_mean")
        if running is not None and not module.training:
            centred = rows - running.to(x.dtype).unsqueeze(1)
            variance = setting(module, "running_var").to(x.dtype)
        else:
            # sums of an example's pixels first: var_mean over dims that are not
            # neighbours takes five times as long on a CPU
            centred = rows - (rows.mean(2).mean(0)).unsqueeze(1)
            variance = torch.linalg.vecdot(centred, centred).mean(0) / rows.shape[2]
        scale = torch.rsqrt(variance + setting(module, "eps"))
        return centred.reshape(x.shape), scale


class SyncBatchNorm(BatchNorm):
    """Statistics over all ranks: those that the layer kept for its own backward."""

    name = "sync_batch_norm"

    def observe(
        self, module: nn.Module, x: Tensor, y: Tensor, want: Collection[str]
    ) -> Observed:
        # SyncBatchNorm's autograd function saves (input, weight, mean, invstd, count).
        # In one process the layer runs plain batch norm, which saves nothing there.
        saved = getattr(y.grad_fn, "saved_tensors", ())
        return Observed(kept=(x, saved[2], saved[3]) if len(saved) > 3 else (x,))

    def normalised(
        self, module: nn.Module, x: Tensor, *kept: Tensor
    ) -> tuple[Tensor, Tensor | float]:
        if not kept:
            return super().normalised(module, x)
        mean, scale = kept
        return x - mean.reshape((1, -1) + (1,) * (x.dim() - 2)), scale


class LayerNorm(Norm):
    """LayerNorm over the trailing ``normalized_shape``."""

    name = "layer_norm"

    def normalised(
        self, module: nn.Module, x: Tensor, *kept: Tensor
    ) -> tuple[Tensor, Tensor | float]:
        dims = tuple(range(-len(setting(module, "normalized_shape")), 0))
        variance, mean = torch.var_mean(x, dims, correction=0, keepdim=True)
        return (x - mean) * torch.rsqrt(variance + setting(module, "eps")), 1.0

    def channels_last(self, module: nn.Module, x: Tensor) -> Tensor:
        rows = x.flatten(-len(setting(module, "normalized_shape")))
        return rows.reshape(len(x) if rows.dim() > 1 else 1, -1, rows.shape[-1])


class RMSNorm(LayerNorm):
    """RMSNorm over the trailing ``normalized_shape``; it has no shift."""

    name = "rms_norm"

    def normalised(
        self, module: nn.Module, x: Tensor, *kept: Tensor
    ) -> tuple[Tensor, Tensor | float]:
        dims = tuple(range(-len(setting(module, "normalized_shape")), 0))
        eps: float | None = setting(module, "eps")
        eps = torch.finfo(x.dtype).eps if eps is None else eps
        return x * torch.rsqrt(x.square().mean(dims, keepdim=True) + eps), 1.0


class GroupNorm(Norm):
    """GroupNorm: channel dim 1, normalised over groups of channels."""

    name = "group_norm"
    channel_dim = 1

    def normalised(
        self, module: nn.Module, x: Tensor, *kept: Tensor
    ) -> tuple[Tensor, Tensor | float]:
        grouped = x.reshape(len(x), setting(module, "num_groups"), -1)
        variance, mean = torch.var_mean(grouped, 2, correction=0, keepdim=True)
        scale = torch.rsqrt(variance + setting(module, "eps"))
        return ((grouped - mean) * scale).reshape(x.shape), 1.0
