"""SPNGD with its schedules: a convolutional network on scikit-learn's digits.

Prints what is preconditioned, the test accuracy after each epoch, and how many of the
statistics the adaptive refresh has left alone.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import natgrad
from natgrad.schedules import DampingWarmup, PolynomialDecay

EPOCHS, BATCH = 4, 128


def main() -> None:
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels))
    x = torch.tensor(images, dtype=torch.float32)[order].reshape(-1, 1, 8, 8) / 16
    y = torch.tensor(labels)[order]
    x, test_x, y, test_y = x[:1400], x[1400:], y[:1400], y[1400:]
    model = nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(256, 10)),
    )
    steps = len(x) // BATCH + 1
    optimizer = natgrad.SPNGD(
        model,
        lr=0.02,
        momentum=0.9,
        damping=DampingWarmup(initial=0.1, target=0.01, steps=2 * steps),
        refresh=natgrad.Adaptive(tolerance=0.3),
    )
    scheduler = PolynomialDecay(
        optimizer, start=1, end=EPOCHS, power=2.0, steps_per_epoch=steps
    )
    print(optimizer.report())
    for epoch in range(EPOCHS):
        for rows in torch.randperm(len(x)).split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
            scheduler.step()
        model.eval()
        with torch.no_grad():
            right = (model(test_x).argmax(1) == test_y).double().mean()
        model.train()
        print(f"epoch {epoch + 1}: test accuracy {right:.1%}")
    print(f"statistics refreshed: {optimizer.refreshes()['reduction_rate']:.1%}")


if __name__ == "__main__":
    main()
