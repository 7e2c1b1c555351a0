"""A deep autoencoder of scikit-learn's digits, trained with nothing to set.

Prints the squared error of an image on training and held-out digits.
"""

import sys
from itertools import pairwise

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import natgrad

WIDTHS, BATCH = (64, 128, 64, 32, 8, 32, 64, 128, 64), 512


def network() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for n, m in pairwise(WIDTHS):
        layers += [nn.Linear(n, m), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def error(model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    outputs = model(images)
    return outputs, (outputs - images).square().sum(1).mean()


def main(steps: int) -> None:
    data = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    data = data[torch.randperm(len(data), generator=torch.Generator().manual_seed(0))]
    images, held_out = data[360:], data[:360]
    model = network()
    optimizer = natgrad.SPNGD(model, lr="auto", momentum="auto", damping="auto")
    for step in range(steps):
        batch = images[torch.randperm(len(images))[:BATCH]]
        loss = optimizer.step(lambda batch=batch: error(model, batch))
        if step % 20 == 0 or step == steps - 1:
            with torch.no_grad():
                test = float(error(model, held_out)[1])
            health = optimizer.health()
            shown = " ".join(f"{n} {health[n]:.2g}" for n in ("damping", "lr", "ratio"))
            print(f"step {step}: {float(loss):.3f}, held out {test:.3f} ({shown})")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
