"""Muon: Jordan et al. 2024, on one process.

The averaged gradient of a matrix, its singular values set to about 1 by five iterations
of Newton and Schulz' method with the published coefficients. Biases are no part of it.
"""

import math

import torch
from tests.reference.watched import watch
from torch import Tensor, nn

A, B, C = 3.4445, -4.7750, 2.0315


def newton_schulz(x: Tensor) -> Tensor:
    """Nearly ``U V^T`` of ``x = U diag(sigma) V^T``: singular values of 0.7 to 1.2."""
    if x.shape[0] > x.shape[1]:
        return newton_schulz(x.T).T
    y = x / x.norm()
    for _ in range(5):
        gram = y @ y.T
        y = A * y + (B * gram + C * gram @ gram) @ y
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
        self.layers, self.rest = watch(model, biases=False)
        self.means = {name: Mean() for name in self.layers}
        self.adams = {name: Adam() for name in self.rest}

    @torch.no_grad()
    def step(self) -> None:
        """``w <- (1 - lr weight_decay) w - lr sqrt(max(1, m / n)) NS(v)``."""
        for name, layer in self.layers.items():
            v = self.means[name].add(layer.gradient(), self.momentum)
            u = newton_schulz(v) * math.sqrt(max(1.0, v.shape[0] / v.shape[1]))
            layer.parameters[0].mul_(1 - self.lr * self.weight_decay)
            for p, x in layer.parts(u):
                p -= self.lr * x
        for name, p in self.rest.items():
            assert p.grad is not None
            p -= self.lr * self.adams[name].update(p.grad, self.momentum, self.beta2)
