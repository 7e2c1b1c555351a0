"""Brute force: the Gauss-Newton matrix of a small model, dense, in float64.

Nothing here uses natgrad. A *part* is a function from weights by name to outputs, and
the loss of those outputs; the objective is the mean of all parts.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, hessian, jacrev

Outputs = tuple[Tensor, ...]


@dataclass(kw_only=True)
class Part:
    """Inputs of a model, the loss of its outputs, and H at them if not the loss's."""

    inputs: Tensor
    loss: Callable[[Outputs], Tensor]
    curvature: Callable[[Outputs], Tensor] | None = None


def as_tuple(x: Any) -> Outputs:
    """Outputs are a tensor, or a tuple of tensors."""
    return x if isinstance(x, tuple) else (x,)


def followed(
    old: tuple[float, float], best: Sequence[float], trust: float
) -> tuple[float, float]:
    """Rates between the old and a batch's best, the first at most the best."""
    (a, b), (x, y) = old, best
    log = (1 - trust) * math.log(a) + trust * math.log(x) if a else math.log(x)
    return min(math.exp(log), x), (1 - trust) * b + trust * y


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """One vector."""
    return torch.cat([x.reshape(-1) for x in tensors])


class Dense:
    """Loss, gradient and Gauss-Newton matrix at any weights, as functions of them.

    The matrix has the first ``kept`` of each part's examples, at the size of all.
    """

    def __init__(
        self,
        model: nn.Module,
        parts: Sequence[Part],
        decay: float,
        kept: int | None = None,
    ) -> None:
        self.model, self.parts, self.decay = model, parts, decay
        self.kept = kept
        self.names = [n for n, _ in model.named_parameters()]
        self.shapes = [p.shape for p in model.parameters()]

    def _weights(self, theta: Tensor) -> dict[str, Tensor]:
        sizes = [s.numel() for s in self.shapes]
        split = zip(self.names, theta.split(sizes), self.shapes, strict=True)
        return {name: x.reshape(shape) for name, x, shape in split}

    def _outputs(self, theta: Tensor, part: Part) -> Outputs:
        buffers = {n: b.clone() for n, b in self.model.named_buffers()}
        inside = {**self._weights(theta), **buffers}
        return as_tuple(functional_call(self.model, inside, (part.inputs,)))

    def objective(self, theta: Tensor) -> Tensor:
        """The mean loss, and half of decay times the square of the weights."""
        losses = [part.loss(self._outputs(theta, part)) for part in self.parts]
        return torch.stack(losses).mean() + self.decay * theta.square().sum() / 2

    def gradient(self, theta: Tensor) -> Tensor:
        """Of the objective."""
        theta = theta.clone().requires_grad_()
        return torch.autograd.grad(self.objective(theta), theta)[0]

    def _weighed(self, output: Tensor) -> Tensor:
        weight = torch.zeros_like(output)
        assert self.kept is not None
        weight[: self.kept] = math.sqrt(len(output) / self.kept)
        return weight

    def matrix(self, theta: Tensor) -> Tensor:
        """``J^T H J`` and decay."""
        total = self.decay * torch.eye(len(theta), dtype=theta.dtype)
        for part in self.parts:
            j = jacrev(lambda t, p=part: flat(self._outputs(t, p)))(theta)
            outputs = self._outputs(theta, part)
            if self.kept is not None:
                j = flat([self._weighed(x) for x in outputs]).unsqueeze(1) * j
            sizes, shapes = [x.numel() for x in outputs], [x.shape for x in outputs]

            def of_vector(v: Tensor, p: Part, sizes: Any, shapes: Any) -> Tensor:
                pieces = zip(v.split(sizes), shapes, strict=True)
                return p.loss(tuple(x.reshape(s) for x, s in pieces))

            h = (
                hessian(lambda v, a=(part, sizes, shapes): of_vector(v, *a))(
                    flat(outputs)
                )
                if part.curvature is None
                else part.curvature(outputs)
            )
            total = total + j.T @ h @ j / len(self.parts)  # pyright: ignore
        return total
