"""KFAC with activation checkpointing: recomputed forwards are not counted twice."""

import itertools

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import natgrad


class Checkpointed(nn.Module):
    """Keeps the input of each stage only, and runs the stage again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        widths = (64, 48, 48, 32)
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Linear(m, n), nn.ReLU(inplace=True))
            for m, n in itertools.pairwise(widths)
        )
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = checkpoint(stage, x, use_reentrant=False)
        return self.head(x)


def main() -> None:
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels))
    x = torch.tensor(images, dtype=torch.float32)[order] / 16
    y = torch.tensor(labels)[order]
    model = Checkpointed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    natgrad.KFAC(model, optimizer, damping=0.1)
    for _ in range(8):
        for rows in torch.randperm(1500).split(125):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    with torch.no_grad():
        right = model(x[1500:]).argmax(1) == y[1500:]
    print(f"test accuracy {right.float().mean():.1%}")


if __name__ == "__main__":
    main()
