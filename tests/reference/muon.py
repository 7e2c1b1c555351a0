"""Muon: Jordan et al. 2024, on one process.

The averaged gradient of a matrix, its singular values set to 1. Instead of one quintic
five times, each iteration has the odd quintic that is nearest to 1 on the interval
which the ones before it have left of [1e-3, 1].
"""

import math

import torch
from tests.reference.watched import watch
from torch import Tensor, nn

QUINTICS = (
    (8.386893124345951, -24.371310642828803, 17.726411655627892),
    (4.143011984362455, -3.018617766934752, 0.5526501809738612),
    (3.931188432778587, -2.874113397588836, 0.5367222643924116),
    (3.2827976652058557, -2.416553706474269, 0.48653088918810883),
    (2.2849749755036135, -1.632360155995662, 0.40306608698130825),
    (1.8822789621966394, -1.2485297035731178, 0.3665558753113533),
)


def polar(x: Tensor) -> Tensor:
    """``U V^T`` of ``x = U diag(sigma) V^T``, up to 2e-3 in the singular values."""
    if x.shape[0] > x.shape[1]:
        return polar(x.T).T
    y = x / (x @ x.T).norm().sqrt()  # which bounds the largest singular value
    for a, b, c in QUINTICS:
        gram = y @ y.T
        y = a * y + (b * gram + c * gram @ gram) @ y
    return y


class Mean:
    """A running average of gradients without bias, with Nesterov's look-ahead."""

    def __init__(self) -> None:
        self.sum, self.mass = torch.zeros(()), 0.0

    def add(self, gradient: Tensor, m: float, *, nesterov: bool = True) -> Tensor:
        """The average with this gradient; the weights of all gradients add up to 1."""
        self.sum = m * self.sum + (1 - m) * gradient
        self.mass = m * self.mass + (1 - m)
        if not nesterov:
            return self.sum / self.mass
        ahead = m * self.sum + (1 - m) * gradient
        return ahead / (m * self.mass + (1 - m))


class Adam:
    """Adam's rule for what is no matrix: biases without a layer, norms."""

    def __init__(self) -> None:
        self.mean, self.square, self.t = Mean(), torch.zeros(()), 0

    def update(
        self, g: Tensor, m: float, beta2: float, *, nesterov: bool = True
    ) -> Tensor:
        """Its epsilon is a thousandth of the root mean square."""
        self.t += 1
        self.square = beta2 * self.square + (1 - beta2) * g**2
        second = self.square / (1 - beta2**self.t)
        root = second.sqrt() + 1e-3 * second.mean().sqrt()
        return self.mean.add(g, m, nesterov=nesterov) / root


class Muon:
    """Muon for linear and convolution layers, Adam for all other parameters."""

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        beta2: float = 0.95,
    ) -> None:
        self.lr, self.momentum, self.beta2 = lr, momentum, beta2
        self.weight_decay = weight_decay
        self.layers, self.rest = watch(model)
        self.means = {name: Mean() for name in self.layers}
        self.adams = {name: Adam() for name in self.rest}

    @torch.no_grad()
    def step(self) -> None:
        """``w <- (1 - lr weight_decay) w - lr sqrt(max(1, m / n)) polar(v)``."""
        for name, layer in self.layers.items():
            v = self.means[name].add(layer.gradient(), self.momentum)
            u, (rows, columns) = polar(v), v.shape
            u *= math.sqrt(min(u.shape)) / u.norm()  # exactly as long as U V^T
            u *= math.sqrt(max(1.0, rows / columns))
            layer.parameters[0].mul_(1 - self.lr * self.weight_decay)
            for p, x in layer.parts(u):
                p -= self.lr * x
        for name, p in self.rest.items():
            assert p.grad is not None
            p -= self.lr * self.adams[name].update(p.grad, self.momentum, self.beta2)
