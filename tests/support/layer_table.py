"""Every layer kind and option that has a block, one row each, for the tests."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

EXAMPLES = 4
CLASSES = 3
VOCABULARY = 5
NORM_FORMS = ("unit", "diag", "full")


@dataclass(frozen=True, kw_only=True)
class Row:
    """A layer, the shape of one example's input, and options of the optimizer."""

    layer: Callable[[], nn.Module]
    shape: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def is_embedding(self) -> bool:
        return isinstance(self.layer(), nn.Embedding)

    @property
    def norm(self) -> str:
        """The form of a normalisation layer's statistic; empty for others."""
        return self.options.get("norm", "")


class Readout(nn.Module):
    """A layer, a tanh, and a fixed random map to logits."""

    readout: Tensor

    def __init__(self, layer: nn.Module, example: Tensor) -> None:
        super().__init__()
        self.layer = layer
        features = layer.eval()(example).numel()
        self.register_buffer("readout", torch.randn(features, CLASSES) / features**0.5)
        layer.train()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)).flatten(1) @ self.readout


def draw(row: Row, count: int = EXAMPLES) -> tuple[Tensor, Tensor]:
    """Inputs and labels."""
    if row.is_embedding:
        x = torch.randint(VOCABULARY, (count, *row.shape))
    else:
        x = torch.randn(count, *row.shape, dtype=torch.float64)
    return x, torch.randint(CLASSES, (count,))


def build(row: Row, count: int = EXAMPLES) -> tuple[Readout, Tensor, Tensor]:
    """A float64 model around the row's layer, with random weights, and a batch."""
    torch.manual_seed(0)
    x, y = draw(row, count)
    layer = row.layer().double()
    training = layer.training
    model = Readout(layer, x[:1]).double()
    layer.train(training)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn_like(p))
        if getattr(layer, "padding_idx", None) is not None:
            layer.weight[layer.padding_idx] = 0  # pyright: ignore
    return model, x, y


def frozen_bias(layer: nn.Module) -> nn.Module:
    """The layer with a bias that is not trained."""
    layer.bias.requires_grad_(False)  # pyright: ignore
    return layer


def in_eval(layer: nn.Module) -> nn.Module:
    """A batch norm in evaluation mode, with running statistics to use."""
    channels = layer.num_features
    layer.running_mean = torch.randn(channels)  # pyright: ignore
    layer.running_var = torch.rand(channels) + 0.5  # pyright: ignore
    return layer.eval()


def _row(
    layer: Callable[..., nn.Module], *args: Any, shape: tuple[int, ...], **settings: Any
) -> Row:
    options = {k: settings.pop(k) for k in ("sharing", "norm") if k in settings}
    return Row(layer=partial(layer, *args, **settings), shape=shape, options=options)


def hf_conv1d() -> nn.Module:
    """GPT-2's linear layer, whose weight is (inputs, outputs)."""
    utils = pytest.importorskip("transformers.pytorch_utils")
    return utils.Conv1D(2, 3)  # outputs, inputs


def _channels_last(layer: nn.Module) -> nn.Module:
    return layer.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]


LINEAR = {
    "linear": _row(nn.Linear, 3, 2, shape=(3,)),
    "linear-no-bias": _row(nn.Linear, 3, 2, bias=False, shape=(3,)),
    "linear-frozen-bias": Row(layer=lambda: frozen_bias(nn.Linear(3, 2)), shape=(3,)),
    "linear-3d": _row(nn.Linear, 3, 2, shape=(4, 3)),
    "linear-3d-no-bias": _row(nn.Linear, 3, 2, bias=False, shape=(4, 3)),
    "linear-4d": _row(nn.Linear, 3, 2, shape=(2, 3, 3)),
    "linear-reduce": _row(nn.Linear, 3, 2, shape=(3,), sharing="reduce"),
    "linear-3d-reduce": _row(nn.Linear, 3, 2, shape=(4, 3), sharing="reduce"),
    "linear-4d-reduce": _row(nn.Linear, 3, 2, shape=(2, 3, 3), sharing="reduce"),
    "hf-conv1d": _row(hf_conv1d, shape=(3,)),
    "hf-conv1d-3d": _row(hf_conv1d, shape=(4, 3)),
    "hf-conv1d-frozen-bias": Row(layer=lambda: frozen_bias(hf_conv1d()), shape=(3,)),
    "hf-conv1d-3d-reduce": _row(hf_conv1d, shape=(4, 3), sharing="reduce"),
}

CONV = {
    "conv1d": _row(nn.Conv1d, 2, 3, 3, shape=(2, 6)),
    "conv1d-stride-padding": _row(
        nn.Conv1d, 2, 3, 3, stride=2, padding=1, shape=(2, 7)
    ),
    "conv1d-dilation": _row(nn.Conv1d, 2, 3, 3, dilation=2, padding=2, shape=(2, 6)),
    "conv1d-depthwise": _row(nn.Conv1d, 2, 4, 3, groups=2, shape=(2, 5)),
    "conv1d-same-even": _row(nn.Conv1d, 2, 3, 4, padding="same", shape=(2, 5)),
    "conv2d": _row(nn.Conv2d, 2, 3, 3, padding=1, shape=(2, 4, 4)),
    "conv2d-no-bias": _row(nn.Conv2d, 2, 3, 3, bias=False, shape=(2, 4, 4)),
    "conv2d-frozen-bias": Row(
        layer=lambda: frozen_bias(nn.Conv2d(2, 3, 2)), shape=(2, 3, 3)
    ),
    "conv2d-pointwise": _row(nn.Conv2d, 3, 2, 1, shape=(3, 3, 3)),
    "conv2d-pointwise-stride": _row(nn.Conv2d, 3, 2, 1, stride=2, shape=(3, 4, 4)),
    "conv2d-stride": _row(nn.Conv2d, 2, 3, 3, stride=2, padding=1, shape=(2, 5, 6)),
    "conv2d-uneven": _row(
        nn.Conv2d, 2, 3, (3, 2), stride=(1, 2), padding=(0, 1), shape=(2, 4, 5)
    ),
    "conv2d-dilation": _row(nn.Conv2d, 2, 2, 2, dilation=(2, 1), shape=(2, 4, 3)),
    "conv2d-stride-dilation": _row(
        nn.Conv2d, 2, 2, 3, stride=2, dilation=2, padding=2, shape=(2, 6, 5)
    ),
    "conv2d-groups": _row(nn.Conv2d, 4, 6, 2, groups=2, padding=1, shape=(4, 3, 3)),
    "conv2d-depthwise": _row(
        nn.Conv2d, 3, 3, 3, groups=3, padding=1, bias=False, shape=(3, 4, 4)
    ),
    "conv2d-same": _row(nn.Conv2d, 2, 3, 3, padding="same", shape=(2, 4, 4)),
    "conv2d-same-even": _row(nn.Conv2d, 2, 3, (2, 4), padding="same", shape=(2, 4, 5)),
    "conv2d-same-dilation": _row(
        nn.Conv2d, 2, 2, 2, dilation=3, padding="same", shape=(2, 5, 4)
    ),
    "conv2d-valid": _row(nn.Conv2d, 2, 3, 3, padding="valid", shape=(2, 4, 5)),
    **{
        f"conv2d-{mode}": _row(
            nn.Conv2d, 2, 3, 3, padding=(1, 2), padding_mode=mode, shape=(2, 4, 5)
        )
        for mode in ("reflect", "replicate", "circular")
    },
    "conv2d-same-reflect": _row(
        nn.Conv2d, 2, 3, 4, padding="same", padding_mode="reflect", shape=(2, 5, 5)
    ),
    "conv2d-circular-stride-groups": _row(
        nn.Conv2d,
        2,
        4,
        3,
        stride=2,
        groups=2,
        padding=1,
        padding_mode="circular",
        shape=(2, 5, 5),
    ),
    "conv2d-channels-last": Row(
        layer=lambda: _channels_last(nn.Conv2d(2, 3, 3, padding=1)),
        shape=(2, 4, 4),
    ),
    "conv3d": _row(nn.Conv3d, 2, 2, 2, padding=1, shape=(2, 2, 3, 2)),
    "conv3d-stride-groups": _row(
        nn.Conv3d, 2, 4, 2, stride=(2, 1, 2), groups=2, shape=(2, 4, 3, 3)
    ),
    "conv3d-dilation": _row(
        nn.Conv3d, 1, 2, 2, dilation=(1, 2, 1), padding="same", shape=(1, 2, 3, 2)
    ),
}

EMBEDDING = {
    "embedding": _row(nn.Embedding, VOCABULARY, 3, shape=(4,)),
    "embedding-single": _row(nn.Embedding, VOCABULARY, 3, shape=(1,)),
    "embedding-2d": _row(nn.Embedding, VOCABULARY, 2, shape=(2, 3)),
    "embedding-padding": _row(nn.Embedding, VOCABULARY, 3, padding_idx=1, shape=(6,)),
}

_NORMS: dict[str, Row] = {
    "batch-norm-1d": _row(nn.BatchNorm1d, 3, shape=(3,)),
    "batch-norm-1d-3d": _row(nn.BatchNorm1d, 3, shape=(3, 4)),
    "batch-norm-2d": _row(nn.BatchNorm2d, 3, shape=(3, 2, 3)),
    "batch-norm-3d": _row(nn.BatchNorm3d, 2, shape=(2, 2, 1, 3)),
    "batch-norm-untracked": _row(
        nn.BatchNorm2d, 3, track_running_stats=False, shape=(3, 2, 2)
    ),
    "batch-norm-eval": Row(layer=lambda: in_eval(nn.BatchNorm2d(3)), shape=(3, 2, 3)),
    "batch-norm-frozen-bias": Row(
        layer=lambda: frozen_bias(nn.BatchNorm2d(3)), shape=(3, 2, 2)
    ),
    "sync-batch-norm": _row(nn.SyncBatchNorm, 3, shape=(3, 2, 3)),
    "layer-norm": _row(nn.LayerNorm, 4, shape=(4,)),
    "layer-norm-3d": _row(nn.LayerNorm, 4, shape=(3, 4)),
    "layer-norm-2-dims": _row(nn.LayerNorm, (2, 3), shape=(2, 2, 3)),
    "layer-norm-no-bias": _row(nn.LayerNorm, 4, bias=False, shape=(3, 4)),
    "group-norm": _row(nn.GroupNorm, 2, 4, shape=(4, 2, 3)),
    "group-norm-flat": _row(nn.GroupNorm, 2, 4, shape=(4,)),
    "rms-norm": _row(nn.RMSNorm, 4, shape=(3, 4)),
    "rms-norm-eps": _row(nn.RMSNorm, 4, eps=0.1, shape=(4,)),
}

NORM = {
    f"{name}-{form}": Row(layer=row.layer, shape=row.shape, options={"norm": form})
    for name, row in _NORMS.items()
    for form in NORM_FORMS
}

KRONECKER = {**LINEAR, **CONV, **EMBEDDING}
ROWS = {**KRONECKER, **NORM}
