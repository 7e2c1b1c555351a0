"""The precision of forward and backward: float32, or half of it by autocast."""

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from natgrad_lab.train.config import Precision

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_DTYPES["float16"] = torch.float16


class Mixed:
    """Autocast, and for float16 a scaler; in float32 neither does anything.

    Weights, statistics, inverses and updates are float32 in any case.

    Args:
        precision: of products in forward and backward.
        device: where they are.
    """

    def __init__(self, precision: Precision, device: torch.device) -> None:
        self._dtype, self._device = _DTYPES[precision], device.type
        scaled = precision == "float16"
        self._scaler = torch.amp.GradScaler(device.type, enabled=scaled)
        if scaled:
            # the scale is found by overflows, so the first steps are often skipped
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler")

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """For whoever must undo the loss scale."""
        return self._scaler if self._scaler.is_enabled() else None

    def autocast(self) -> torch.autocast:
        """Around a forward."""
        enabled = self._dtype != torch.float32
        return torch.autocast(self._device, dtype=self._dtype, enabled=enabled)

    def backward(self, loss: Tensor) -> None:
        """The backward of a loss."""
        self._scaler.scale(loss).backward()

    def step(self, optimizer: Optimizer) -> None:
        """The optimizer's step, unless a gradient has overflowed on any rank."""
        self._scaler.step(optimizer)
        self._scaler.update()

    def facts(self) -> dict[str, float]:
        """What a training record tells."""
        return {} if self.scaler is None else {"loss_scale": self._scaler.get_scale()}

    def state_dict(self) -> dict[str, Any]:
        """The scale and how long it has held."""
        return self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo `state_dict`; one of another precision is left out."""
        if state and self.scaler is not None:
            self._scaler.load_state_dict(state)
