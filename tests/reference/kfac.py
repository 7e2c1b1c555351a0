"""K-FAC as a preconditioner: Pauloski et al. 2020, Algorithm 1, on one process.

Used between ``loss.backward()`` and ``optimizer.step()``. The bound on the KL
divergence is that of eq. 18, with one thing added: the product of update and gradient
stands for ``u^T F u`` only as long as F is the one that was inverted, so it is
multiplied by how much more curvature today's factors have along the update.
"""

import math
from dataclasses import dataclass, field

import torch
from tests.reference.watched import Watched, watch
from torch import Tensor, nn


@dataclass
class Factor:
    """A or G: its running average, and what was decomposed."""

    average: Tensor | None = None
    inverted: Tensor = field(default_factory=lambda: torch.empty(0))
    values: Tensor = field(default_factory=lambda: torch.empty(0))
    vectors: Tensor = field(default_factory=lambda: torch.empty(0))

    def estimate(self, new: Tensor, decay: float) -> None:
        """eq. 16 and 17."""
        old = self.average
        self.average = new if old is None else decay * old + (1 - decay) * new

    def decompose(self) -> None:
        """X = Q diag(v) Q^T."""
        assert self.average is not None
        self.inverted = self.average
        self.values, self.vectors = torch.linalg.eigh(self.average)
        self.values = self.values.clamp_min(0)

    def growth(self, rows: Tensor, damping: float) -> float:
        """``tr(U X U^T)`` of today's X over that of the X inverted, both damped."""
        assert self.average is not None
        damped = damping * rows.square().sum()
        now = (rows @ self.average * rows).sum() + damped
        then = (rows @ self.inverted * rows).sum() + damped
        return max(1.0, float(now / then))

    @property
    def mean_eigenvalue(self) -> float:
        """That of the running average."""
        assert self.average is not None
        return float(self.average.diagonal().mean())


class KFAC:
    """Preconditions the gradients of linear and convolution layers."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        damping: float = 1e-3,
        kappa: float = 1e-3,
        decay: float = 0.95,
        statistics: int = 10,
        inverses: int = 100,
    ) -> None:
        self.optimizer, self.damping, self.kappa = optimizer, damping, kappa
        self.decay, self.statistics, self.inverses = decay, statistics, inverses
        self.layers, _ = watch(model)
        self.a = {name: Factor() for name in self.layers}
        self.g = {name: Factor() for name in self.layers}
        self.t = 0

    @torch.no_grad()
    def step(self) -> None:
        """Algorithm 1, and the clip of eq. 18."""
        updates: dict[str, Tensor] = {}
        divergence = 0.0
        for name, layer in self.layers.items():
            self.refresh(name, layer)
            gradient = layer.gradient()
            updates[name] = u = self.preconditioned(name, gradient)
            divergence += float((u * gradient).sum().abs()) * self.growth(name, u)
        lr = max(group["lr"] for group in self.optimizer.param_groups)
        nu = min(1.0, math.sqrt(self.kappa / (lr**2 * divergence)))  # eq. 18
        for name, layer in self.layers.items():
            for p, u in layer.parts(updates[name]):
                p.grad = nu * u
        self.t += 1

    def refresh(self, name: str, layer: Watched) -> None:
        """Update decoupling (section V-C): estimates more often than inversions."""
        a, g = self.a[name], self.g[name]
        if self.t % self.statistics == 0:
            a.estimate(layer.a.T @ layer.a / len(layer.a), self.decay)
            # G sums over positions and averages over examples (SP-NGD, eq. 11)
            g.estimate(layer.g.T @ layer.g / layer.examples, self.decay)
        if self.t % self.inverses == 0:
            a.decompose()
            g.decompose()

    def preconditioned(self, name: str, gradient: Tensor) -> Tensor:
        """``(G kron A + damping I)^-1 V``."""
        a, g = self.a[name], self.g[name]
        v1 = g.vectors.T @ gradient @ a.vectors  # eq. 13
        v2 = v1 / (g.values.outer(a.values) + self.damping)  # eq. 14
        return g.vectors @ v2 @ a.vectors.T  # eq. 15

    def growth(self, name: str, u: Tensor) -> float:
        """That of both factors, each with its part of the damping (SP-NGD, eq. 12).

        The library looks at the 32 longest rows and columns of u alone.
        """
        a, g = self.a[name], self.g[name]
        pi, root = math.sqrt(a.mean_eigenvalue / g.mean_eigenvalue), self.damping**0.5
        return a.growth(u, pi * root) * g.growth(u.T, root / pi)
