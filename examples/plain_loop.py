"""KFAC in a plain PyTorch loop: one new line, and the loop stays as it was.

Trains the same small network on scikit-learn's digits with SGD and with SGD plus KFAC,
and prints the test accuracy of both after each epoch.
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import natgrad

EPOCHS, BATCH = 5, 128


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Train and test images and labels, in an order of their own."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(images, dtype=torch.float32)[order] / 16
    y = torch.tensor(labels)[order]
    return x[:1400], y[:1400], x[1400:], y[1400:]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """A loop that knows nothing of natgrad; test accuracy after each epoch."""
    x, y, test_x, test_y = digits()
    accuracy: list[float] = []
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(x)).split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
        with torch.no_grad():
            right = model(test_x).argmax(1) == test_y
        accuracy.append(float(right.double().mean()))
    return accuracy


def main() -> None:
    for name in ("SGD", "SGD + KFAC"):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if name == "SGD + KFAC":
            # fresher than by default: the whole run has only 55 steps
            refresh = natgrad.Every(statistics=1, inverses=5)
            natgrad.KFAC(model, optimizer, damping=0.01, refresh=refresh)
        shown = "  ".join(f"{a:.1%}" for a in train(model, optimizer))
        print(f"{name:10}  test accuracy by epoch: {shown}")


if __name__ == "__main__":
    main()
