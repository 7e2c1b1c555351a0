"""Poisson's equation on a square: -u_xx - u_yy = f inside, u = 0 on the border.

The network carries u, its slopes and its Laplacian from layer to layer, so that each
layer sees them as four inputs and K-FAC's factors are those of the whole residual.
"""

import sys

import torch
from torch import Tensor, nn

import natgrad


class Field(nn.Module):
    """u and its Laplacian at places ``(n, 2)``."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        sizes = ((2, width), (width, width), (width, 1))
        self.layers = nn.ModuleList(nn.Linear(n, m) for n, m in sizes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        slopes = torch.eye(2).expand(len(x), 2, 2)
        rows = torch.cat([x.unsqueeze(1), slopes, torch.zeros(len(x), 1, 2)], dim=1)
        for layer in self.layers:
            z = layer(rows) - layer.bias * torch.tensor([[0.0], [1.0], [1.0], [1.0]])
            t = torch.tanh(z[:, :1])
            first = 1 - t.square()
            bend = -2 * t * first * z[:, 1:3].square().sum(1, keepdim=True)
            rows = torch.cat([t, first * z[:, 1:3], first * z[:, 3:] + bend], dim=1)
        return z[:, 0, 0], z[:, 3, 0]  # the last layer has no activation


def exact(x: Tensor) -> Tensor:
    return torch.sin(torch.pi * x).prod(1)


def main(steps: int) -> None:
    torch.manual_seed(0)
    model, inside, edge = Field(), torch.rand(400, 2), torch.rand(100, 2)
    edge[torch.arange(100), torch.arange(100) % 2] = (torch.arange(100) % 4 > 1).float()
    places = torch.cartesian_prod(*[torch.linspace(0, 1, 41)] * 2)
    source = 2 * torch.pi**2 * exact(inside)
    optimizer = natgrad.SPNGD(model, lr="auto", momentum="auto", damping="auto")

    def closure() -> tuple[tuple[Tensor, Tensor], Tensor]:
        residual, border = model(inside)[1] + source, model(edge)[0]
        loss = residual.square().mean() + 10 * border.square().mean()
        return (residual, border), loss

    for step in range(steps):
        loss = float(optimizer.step(closure))
        if step % 50 == 0 or step == steps - 1:
            wrong = (model(places)[0] - exact(places)).norm() / exact(places).norm()
            print(f"step {step}: loss {loss:.2e}, error {wrong.item():.2e}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 300)
