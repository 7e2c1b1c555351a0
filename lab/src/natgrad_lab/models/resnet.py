"""The ImageNet ResNets of He et al. (2016), with torchvision's parameter names.

State dicts load across to and from `torchvision.models.resnet50` and its siblings. As
there, a bottleneck's stride is in its 3x3 convolution.
"""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from natgrad_lab.models.init import he_normal_


class BasicBlock(nn.Module):
    """Two 3x3 convolutions."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _downsample(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return F.relu(out + (x if self.downsample is None else self.downsample(x)))


class Bottleneck(nn.Module):
    """1x1 down, 3x3, 1x1 up to four times the width."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample = _downsample(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = F.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        return F.relu(out + (x if self.downsample is None else self.downsample(x)))


Block = type[BasicBlock] | type[Bottleneck]


class ResNet(nn.Module):
    """A ResNet for images of 224 x 224 (any size of at least 32 works).

    Args:
        block: `BasicBlock` or `Bottleneck`.
        blocks: how many in each of the four stages.
        in_channels: channels of the images, (N, in_channels, H, W).
        num_classes: size of the output, (N, num_classes).
    """

    def __init__(
        self,
        block: Block,
        blocks: Sequence[int],
        *,
        in_channels: int = 3,
        num_classes: int = 1000,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        grow = block.expansion
        self.layer1 = _stage(block, 64, 64, blocks[0], stride=1)
        self.layer2 = _stage(block, 64 * grow, 128, blocks[1], stride=2)
        self.layer3 = _stage(block, 128 * grow, 256, blocks[2], stride=2)
        self.layer4 = _stage(block, 256 * grow, 512, blocks[3], stride=2)
        self.fc = nn.Linear(512 * grow, num_classes)
        he_normal_(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(F.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean((2, 3)))


def _stage(
    block: Block, inputs: int, width: int, blocks: int, stride: int
) -> nn.Sequential:
    first = block(inputs, width, stride)
    rest = (block(width * block.expansion, width, 1) for _ in range(blocks - 1))
    return nn.Sequential(first, *rest)


def _downsample(inputs: int, outputs: int, stride: int) -> nn.Sequential | None:
    if stride == 1 and inputs == outputs:
        return None
    conv = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs))
