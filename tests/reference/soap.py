"""SOAP: Vyas et al. 2024, Algorithm 3, on one process.

Adam in the eigenbases of Shampoo's factors. The factors have this step's gradient in
them when it is preconditioned (the paper's have it from the next step on), and Adam's
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

    left: Tensor | None = None
    right: Tensor | None = None
    q_left: Tensor = field(default_factory=lambda: torch.empty(0))
    q_right: Tensor = field(default_factory=lambda: torch.empty(0))
    mean: Mean = field(default_factory=Mean)
    square: Tensor = field(default_factory=lambda: torch.zeros(()))


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
        self.layers, self.rest = watch(model)
        self.states = {name: State() for name in self.layers}
        self.adams = {name: Adam() for name in self.rest}
        self.t = 0

    @torch.no_grad()
    def step(self) -> None:
        """Algorithm 3 for each matrix."""
        for name, layer in self.layers.items():
            u = self.update(self.states[name], layer.gradient())
            layer.parameters[0].mul_(1 - self.lr * self.weight_decay)
            for p, x in layer.parts(u):
                p -= self.lr * x
        for name, p in self.rest.items():
            assert p.grad is not None
            adam = self.adams[name]
            p -= self.lr * adam.update(p.grad, self.beta1, self.beta2, nesterov=False)
        self.t += 1

    def update(self, s: State, g: Tensor) -> Tensor:
        """N of Algorithm 3."""
        s.left = self.averaged(s.left, g @ g.T)
        s.right = self.averaged(s.right, g.T @ g)
        if self.t % self.frequency == 0:
            s.q_left = torch.linalg.eigh(s.left).eigenvectors
            s.q_right = torch.linalg.eigh(s.right).eigenvectors
        rotated = s.q_left.T @ g @ s.q_right
        s.square = self.beta2 * s.square + (1 - self.beta2) * rotated**2
        second = s.square / (1 - self.beta2 ** (self.t + 1))
        mean = s.mean.add(g, self.beta1, nesterov=False)
        root = second.sqrt() + self.damping * second.mean().sqrt()
        return s.q_left @ (s.q_left.T @ mean @ s.q_right / root) @ s.q_right.T

    def averaged(self, old: Tensor | None, new: Tensor) -> Tensor:
        """L and R."""
        beta = self.shampoo_beta
        return new if old is None else beta * old + (1 - beta) * new
