"""SOAP: Vyas et al. 2024, Algorithm 3, on one process.

Adam in the eigenbases of Shampoo's factors. Biases are no part of a matrix, and Adam's
epsilon is relative to the root mean square.
"""

from dataclasses import dataclass, field

import torch
from tests.reference.muon import Adam, Mean
from tests.reference.watched import watch
from torch import Tensor, nn


@dataclass
class State:
    """What is kept of one matrix ``(m, n)``: L and Q_L are ``(m, m)``, R ``(n, n)``."""

    left: Tensor = field(default_factory=lambda: torch.zeros(()))
    right: Tensor = field(default_factory=lambda: torch.zeros(()))
    bases: tuple[Tensor, Tensor] | None = None
    mean: Mean = field(default_factory=Mean)
    square: Tensor = field(default_factory=lambda: torch.zeros(()))


def turned(x: Tensor, q: Tensor) -> Tensor:
    """Algorithm 4: one step of the power method from a basis, and QR.

    The largest eigenvalue comes first, but every column goes back to its place, where
    the second moment has its own.
    """
    product = x @ q
    order = (q * product).sum(0).argsort(descending=True)
    return torch.linalg.qr(product[:, order])[0][:, order.argsort()]


class SOAP:
    """SOAP for linear and convolution layers, Adam for all other parameters."""

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float,
        beta1: float = 0.95,
        beta2: float = 0.95,
        shampoo_beta: float = 0.95,
        weight_decay: float = 0.0,
        damping: float = 1e-3,
        frequency: int = 10,
    ) -> None:
        self.lr, self.beta1, self.beta2, self.damping = lr, beta1, beta2, damping
        self.shampoo_beta, self.frequency = shampoo_beta, frequency
        self.weight_decay = weight_decay
        self.layers, self.rest = watch(model, biases=False)
        self.states = {name: State() for name in self.layers}
        self.adams = {name: Adam() for name in self.rest}
        self.t = 0

    @torch.no_grad()
    def step(self) -> None:
        """Algorithm 3 for each matrix; in the first step only its last lines."""
        for name, layer in self.layers.items():
            g, s = layer.gradient(), self.states[name]
            if s.bases is not None:
                u = self.update(s, g, *s.bases)
                layer.parameters[0].mul_(1 - self.lr * self.weight_decay)
                for p, x in layer.parts(u):
                    p -= self.lr * x
            self.learn(s, g)
        for name, p in self.rest.items():
            assert p.grad is not None
            adam = self.adams[name]
            p -= self.lr * adam.update(p.grad, self.beta1, self.beta2, nesterov=False)
        self.t += 1

    def update(self, s: State, g: Tensor, left: Tensor, right: Tensor) -> Tensor:
        """N of Algorithm 3, by the bases of the steps before."""
        s.square = self.beta2 * s.square + (1 - self.beta2) * (left.T @ g @ right) ** 2
        second = s.square / (1 - self.beta2**self.t)
        mean = s.mean.add(g, self.beta1, nesterov=False)
        root = second.sqrt() + self.damping * second.mean().sqrt()
        return left @ (left.T @ mean @ right / root) @ right.T

    def learn(self, s: State, g: Tensor) -> None:
        """L, R and, every ``frequency`` steps, their bases."""
        beta = self.shampoo_beta
        s.left = beta * s.left + (1 - beta) * g @ g.T
        s.right = beta * s.right + (1 - beta) * g.T @ g
        if s.bases is None:
            first = [torch.linalg.eigh(x).eigenvectors for x in (s.left, s.right)]
            s.bases = first[0], first[1]
        elif self.t % self.frequency == 0:
            s.bases = turned(s.left, s.bases[0]), turned(s.right, s.bases[1])
