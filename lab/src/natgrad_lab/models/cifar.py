"""The CIFAR ResNets of He et al. (2016), section 4.2: depth 6n + 2, three stages.

Shortcuts that change shape are option A of that paper, as in its CIFAR experiments:
every second pixel, and zeros for the new channels. They have no parameters, so every
weight of the network is a plain convolution, norm or linear layer.

Any image size of at least 4 x 4 works: the stages run at 1, 1/2 and 1/4 of it.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from natgrad_lab.models.init import he_normal_


class Shortcut(nn.Module):
    """Option A: subsample by `stride` and append zero channels."""

    def __init__(self, stride: int, extra: int) -> None:
        super().__init__()
        self.stride, self.extra = stride, extra

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, :, :: self.stride, :: self.stride]
        before = self.extra // 2
        return F.pad(x, (0, 0, 0, 0, before, self.extra - before))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut without parameters."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else Shortcut(stride, outputs - inputs)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


class CifarResNet(nn.Module):
    """A ResNet of `depth` layers for small images.

    Args:
        depth: 6n + 2 for a whole n >= 1.
        in_channels: channels of the images, (N, in_channels, H, W).
        num_classes: size of the output, (N, num_classes).
        width: channels of the first stage; the others have 2 and 4 times as many.
    """

    def __init__(
        self,
        depth: int,
        *,
        in_channels: int = 3,
        num_classes: int = 10,
        width: int = 16,
    ) -> None:
        super().__init__()
        if depth < 8 or depth % 6 != 2:
            raise ValueError(f"Invalid {depth=}. Must be 6n + 2 with n >= 1.")
        blocks = (depth - 2) // 6
        self.conv1 = nn.Conv2d(in_channels, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = _stage(width, width, blocks, stride=1)
        self.layer2 = _stage(width, 2 * width, blocks, stride=2)
        self.layer3 = _stage(2 * width, 4 * width, blocks, stride=2)
        self.fc = nn.Linear(4 * width, num_classes)
        he_normal_(self)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.fc(x.mean((2, 3)))


def _stage(inputs: int, outputs: int, blocks: int, stride: int) -> nn.Sequential:
    first = BasicBlock(inputs, outputs, stride)
    rest = (BasicBlock(outputs, outputs, 1) for _ in range(blocks - 1))
    return nn.Sequential(first, *rest)
