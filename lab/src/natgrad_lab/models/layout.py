"""Which memory layout a model trains fastest in."""

import torch
from torch import nn

from natgrad_lab.models.airbench import Airbench
from natgrad_lab.models.cifar import CifarResNet
from natgrad_lab.models.resnet import ResNet


def fastest_layout(model: nn.Module) -> torch.memory_format:
    """The layout to use by default for a model's weights and images.

    It is channels_last for convolutional networks: GPUs run it on tensor cores with no
    transpose. The others are mostly matrices and stay contiguous. To compare on your
    machine, give `natgrad train` --model.channels-last False and look at ms/step.
    """
    convolutional = isinstance(model, Airbench | CifarResNet | ResNet)
    return torch.channels_last if convolutional else torch.contiguous_format
