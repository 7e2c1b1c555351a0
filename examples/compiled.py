"""KFAC with torch.compile: make KFAC as usual, compile as usual, in either order.

Steps that estimate statistics run the model as written; all others run the compiled
graph, which is that of the model alone.
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn

import natgrad


def main(backend: str = "inductor") -> None:
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels))
    x = torch.tensor(images, dtype=torch.float32)[order] / 16
    y = torch.tensor(labels)[order]
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(inplace=True), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    refresh = natgrad.Every(statistics=5, inverses=10)
    kfac = natgrad.KFAC(model, optimizer, damping=0.1, refresh=refresh)
    compiled = torch.compile(model, backend=backend)
    for _ in range(5):
        for rows in torch.randperm(1500).split(125):
            optimizer.zero_grad()
            nn.functional.cross_entropy(compiled(x[rows]), y[rows]).backward()
            optimizer.step()
    kfac.close()  # from here on everything runs compiled
    with torch.no_grad():
        right = compiled(x[1500:]).argmax(1) == y[1500:]
    print(f"test accuracy {right.float().mean():.1%}")


if __name__ == "__main__":
    main(*sys.argv[1:])
