"""SP-NGD: Osawa et al. 2020, Algorithms 1 and 2, on one process.

Natural gradient descent with momentum. Each statistic finds by itself how long its
inverse may be kept.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from tests.reference.watched import Watched, watch
from torch import Tensor, nn


@dataclass
class Inverse:
    """The damped inverse of one statistic, and when it is made again."""

    now: Tensor = field(default_factory=lambda: torch.empty(0))
    earlier: list[Tensor] = field(default_factory=lambda: [])
    mean_eigenvalue: float = 0.0
    due: int = 0
    interval: int = 1
    last_interval: int = 1

    def refresh(self, t: int, x: Tensor, damping: float, tolerance: float) -> None:
        """Algorithm 1, lines 4 to 8."""
        identity = torch.eye(x.shape[-1], dtype=x.dtype)
        self.now = torch.linalg.inv(x + damping * identity)
        similar = [
            float((self.now - old).norm() / old.norm()) < tolerance
            for old in self.earlier
        ]
        self.earlier = [self.now, *self.earlier[:1]]
        after = self.acceptable(*[*similar, False, False][:2])
        self.interval, self.last_interval = after, self.interval
        self.due = t + self.interval

    def acceptable(self, like_last: bool, like_before: bool) -> int:
        """Algorithm 2."""
        if not like_last:
            return max(1, self.interval // 2)
        if not like_before:
            return self.interval
        return self.interval + self.last_interval


class Norm:
    """A batch norm: a 2 x 2 Fisher for each channel's scale and shift."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer: Any = layer
        self.x = self.g = torch.empty(0)
        layer.register_forward_hook(self._forward)

    def _forward(self, _: nn.Module, args: tuple[Tensor], y: Tensor) -> None:
        self.x = args[0].detach().reshape(*args[0].shape[:2], -1)
        y.register_hook(self._backward)

    def _backward(self, g: Tensor) -> None:
        self.g = len(g) * g.reshape(*g.shape[:2], -1)

    def fisher(self) -> Tensor:
        """eq. 15 and 16: ``(c, 2, 2)``, of each example's own gradients."""
        mean = self.x.mean((0, 2), keepdim=True)
        variance = self.x.var((0, 2), correction=0, keepdim=True)
        normal = (self.x - mean) / (variance + self.layer.eps).sqrt()
        each = torch.stack([(self.g * normal).sum(2), self.g.sum(2)], 2)
        return torch.einsum("ecp,ecq->cpq", each, each) / len(each)


class SPNGD:
    """A complete optimizer of linear, convolution and batch norm layers."""

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        damping: float = 1e-3,
        tolerance: float = 0.1,
        rescale: bool = False,
    ) -> None:
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        self.damping, self.tolerance, self.rescale = damping, tolerance, rescale
        self.layers, _ = watch(model)
        norms = nn.BatchNorm1d, nn.BatchNorm2d
        self.norms = [Norm(m) for m in model.modules() if isinstance(m, norms)]
        self.a = {name: Inverse() for name in self.layers}
        self.g = {name: Inverse() for name in self.layers}
        self.f = [Inverse() for _ in self.norms]
        self.velocity = {p: torch.zeros_like(p) for p in model.parameters()}
        self.t = 0

    @torch.no_grad()
    def step(self) -> None:
        """Natural gradients of all layers, then eq. 23 and 24."""
        updates: dict[Any, Tensor] = {}
        for name, layer in self.layers.items():
            self.refresh(name, layer)
            gradient = layer.gradient() + self.weight_decay * layer.matrix()
            natural = self.g[name].now @ gradient @ self.a[name].now
            updates |= layer.parts(natural)
        for norm, inverse in zip(self.norms, self.f, strict=True):
            if inverse.due <= self.t:
                inverse.refresh(self.t, norm.fisher(), self.damping, self.tolerance)
            pair: list[Any] = [norm.layer.weight, norm.layer.bias]
            rows = torch.stack([p.grad + self.weight_decay * p for p in pair], 1)
            natural = (inverse.now @ rows.unsqueeze(2)).squeeze(2)  # eq. 17
            updates |= zip(pair, natural.unbind(1), strict=True)
        for p, u in updates.items():
            self.velocity[p] = self.momentum * self.velocity[p] - self.lr * u
            p += self.velocity[p]  # eq. 23
        if self.rescale:
            self.normalise()
        self.t += 1

    def refresh(self, name: str, layer: Watched) -> None:
        """A and G (eq. 10 and 11), each when it is due."""
        a, g = self.a[name], self.g[name]
        estimates = {
            "a": layer.a.T @ layer.a / len(layer.a),
            "g": layer.g.T @ layer.g / layer.examples,
        }
        due = {"a": a.due <= self.t, "g": g.due <= self.t}
        for key, inverse in (("a", a), ("g", g)):
            if due[key]:
                inverse.mean_eigenvalue = float(estimates[key].diagonal().mean())
        pi, root = math.sqrt(a.mean_eigenvalue / g.mean_eigenvalue), self.damping**0.5
        if due["a"]:  # eq. 12
            a.refresh(self.t, estimates["a"], pi * root, self.tolerance)
        if due["g"]:
            g.refresh(self.t, estimates["g"], root / pi, self.tolerance)

    def normalise(self) -> None:
        """eq. 24; the velocity stays the last change of the weight."""
        for layer in self.layers.values():
            weight = layer.parameters[0]
            norm = math.sqrt(2 * len(weight))
            change = weight * (norm / (weight.norm() + 1e-9)) - weight
            weight.add_(change)
            self.velocity[weight].add_(change)
