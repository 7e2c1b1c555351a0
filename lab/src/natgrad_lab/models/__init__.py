"""The models of the experiments, by name or as functions.

`resnet8` to `resnet110` are the CIFAR ResNets, `resnet18` to `resnet152` the ImageNet
ones (with torchvision's parameter names), then `mlp`, `vit`, `gpt`, and two of
speedruns: `gpt_rotary` and `airbench`.
"""

from natgrad_lab.models.airbench import Airbench
from natgrad_lab.models.cifar import CifarResNet
from natgrad_lab.models.gpt import GPT
from natgrad_lab.models.init import he_normal_, spread_norms_
from natgrad_lab.models.layout import fastest_layout
from natgrad_lab.models.mlp import MLP
from natgrad_lab.models.resnet import ResNet
from natgrad_lab.models.rotary import RotaryGPT
from natgrad_lab.models.table import (
    MODELS,
    build,
    build_for,
    gpt,
    mlp,
    names,
    resnet8,
    resnet18,
    resnet20,
    resnet32,
    resnet34,
    resnet44,
    resnet50,
    resnet56,
    resnet101,
    resnet110,
    resnet152,
    vit,
)
from natgrad_lab.models.vit import ViT

__all__ = [
    "GPT",
    "MLP",
    "MODELS",
    "Airbench",
    "CifarResNet",
    "ResNet",
    "RotaryGPT",
    "ViT",
    "build",
    "build_for",
    "fastest_layout",
    "gpt",
    "he_normal_",
    "mlp",
    "names",
    "resnet8",
    "resnet18",
    "resnet20",
    "resnet32",
    "resnet34",
    "resnet44",
    "resnet50",
    "resnet56",
    "resnet101",
    "resnet110",
    "resnet152",
    "spread_norms_",
    "vit",
]
