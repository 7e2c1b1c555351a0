"""Bring batches to a device ahead of need, and augment them there.

Note [Copies under the training]
The loader's thread sends a batch on a stream of its own, from pinned memory: pixels of
one byte, a quarter of what the numbers made of them would be. What is left of the
augmentation runs on that stream as well. The training's stream waits for the batch when
it takes it, and only then; and its memory is given to nobody else before that stream
has used it. Two batches are on their way at a time: the loader's depth.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from natgrad_lab.augment import Transform


@dataclass(frozen=True)
class Sent:
    """A batch on its way; ``arrived`` is an event of the stream it travels on."""

    inputs: Tensor
    labels: Tensor
    arrived: Any = None

    def take(self) -> tuple[Tensor, Tensor]:
        """The batch, for the stream that is current now."""
        if self.arrived is not None:
            stream = torch.cuda.current_stream(self.inputs.device)
            stream.wait_event(self.arrived)
            for x in (self.inputs, self.labels):
                x.record_stream(stream)
        return self.inputs, self.labels


class Placement:
    """Sends batches to a device.

    Args:
        device: where to.
        transform: applied there; it must be made for that device.
    """

    def __init__(self, device: torch.device, transform: Transform | None) -> None:
        self.device, self.transform = device, transform
        cuda = device.type == "cuda"
        self._stream: Any = torch.cuda.Stream(device) if cuda else None

    @property
    def randoms(self) -> int:
        """Uniform numbers it needs for each example."""
        return 0 if self.transform is None else self.transform.randoms

    def send(self, inputs: Tensor, labels: Tensor, uniforms: Tensor) -> Sent:
        """Start to bring a batch there."""
        if self._stream is None:
            return Sent(*self._place(inputs, labels, uniforms))
        with torch.cuda.stream(self._stream):
            placed = self._place(inputs, labels, uniforms)
            return Sent(*placed, self._stream.record_event())

    def _place(
        self, inputs: Tensor, labels: Tensor, uniforms: Tensor
    ) -> tuple[Tensor, Tensor]:
        inputs = inputs.to(self.device, non_blocking=True)
        labels = labels.to(self.device, non_blocking=True)
        if self.transform is not None:
            inputs = self.transform(inputs, uniforms.to(self.device))
        return inputs, labels
