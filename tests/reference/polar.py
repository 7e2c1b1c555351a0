"""Polar: Muon in coordinates that are whitened by the layer's inputs, on one process.

For a layer with weight w (and bias), V the running average of its gradient with
Nesterov's look-ahead, A the second moment of its inputs and a A's mean eigenvalue::

    P  = polar(V (A + damping a I)^-1)
    U  = P / sqrt(S)                     S: the running mean square of each row of P
    w <- w - lr f |w0| U / |U|           w0 is the weight that training began with

A layer that a normalisation follows is brought back to ``|w0|`` after the step, and has
``U = polar(V W) W^T`` with ``W W^T = (A + a I)^-1``.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from tests.reference.muon import Adam, Mean
from tests.reference.watched import Watched, watch
from torch import Tensor, nn


@dataclass
class State:
    """What is kept of one layer."""

    start: Tensor
    mean: Mean = field(default_factory=Mean)
    factor: Tensor | None = None
    inverse: Tensor = field(default_factory=lambda: torch.empty(0))
    rows: Tensor = field(default_factory=lambda: torch.zeros(()))
    usual_square: float = 0.0


# Of each iteration c and w: singular values sigma become sigma (w_0 + w_1 z + ..) with
# z = 1 / (1 + c sigma^2). Each is the best on what is left of [1e-3, 1].
BEST = (
    (16000.251304493006, (0.9843132398189149, 251.0077918108566)),
    (
        8.970723524816902,
        (0.41059791355903813, 6.518549167328615, -7.18276915876782, 8.964465376643844),
    ),
)


def polar(x: Tensor) -> Tensor:
    """``U V^T`` of ``x = U diag(sigma) V^T``, up to 2e-3 in the singular values."""
    if x.shape[0] > x.shape[1]:
        return polar(x.T).T
    y = x / (x @ x.T).norm().sqrt()  # which bounds the largest singular value
    eye = torch.eye(len(y)).to(y)
    for c, weights in BEST:
        z = torch.linalg.inv(eye + c * y @ y.T)
        powers = [torch.linalg.matrix_power(z, i) for i in range(len(weights))]
        y = torch.einsum("i,ijk->jk", y.new_tensor(weights), torch.stack(powers)) @ y
    return y


def start(layer: Watched) -> Tensor:
    """``|w0|``; a weight that begins at zero counts as torch would have begun it."""
    matrix, weight = layer.matrix(), layer.parameters[0]
    usual = matrix.new_tensor(math.sqrt(len(matrix) / 3))
    return usual if not weight.any() else matrix.norm()


class Polar:
    """Whitened, orthogonalised updates at the norm that each weight began with."""

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float = 0.03,
        momentum: float = 0.8,
        weight_decay: float = 0.01,
        damping: float = 0.2,
        decay: float = 0.8,
        every: int = 5,
        rate: float = 0.2,
        beta2: float = 0.999,
        rows_beta2: float = 0.95,
        memory: float = 0.999,
        normalised: Sequence[str] = (),
    ) -> None:
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        self.damping, self.decay, self.every = damping, decay, every
        self.rate, self.beta2, self.memory = rate, beta2, memory
        self.normalised, self.rows_beta2 = normalised, rows_beta2
        self.layers, self.rest = watch(model)
        self.states = {n: State(start(x)) for n, x in self.layers.items()}
        self.adams = {name: Adam() for name in self.rest}
        self.t = 0

    @torch.no_grad()
    def step(self) -> None:
        """Every layer, then what is no matrix at a fifth of the rate."""
        for name, layer in self.layers.items():
            state, gradient = self.states[name], layer.gradient()
            fixed = name in self.normalised
            if self.t % self.every == 0:
                self.refresh(state, layer, fixed)
            v = state.mean.add(gradient, self.momentum)
            u = self.direction(state, v, fixed)
            u *= self.length(state, gradient, v) / u.norm()
            layer.parameters[0].mul_(1 if fixed else 1 - self.lr * self.weight_decay)
            for p, x in layer.parts(u):
                p -= self.lr * x
            ratio = state.start / layer.matrix().norm() if fixed else 1.0
            for p in layer.parameters:
                p *= ratio
        for name, p in self.rest.items():
            assert p.grad is not None
            u = self.adams[name].update(p.grad, self.momentum, self.beta2)
            p -= self.lr * self.rate * u
        self.t += 1

    def refresh(self, state: State, layer: Watched, fixed: bool) -> None:
        new, old = layer.a.T @ layer.a / len(layer.a), state.factor
        a = new if old is None else self.decay * old + (1 - self.decay) * new
        identity = torch.eye(len(a), dtype=a.dtype)
        damping = 1.0 if fixed else self.damping
        damped = a + damping * a.diagonal().mean() * identity
        state.factor = a
        state.inverse = torch.linalg.inv(damped)

    def direction(self, state: State, v: Tensor, fixed: bool) -> Tensor:
        """U, up to its norm. For even rows (NorMuon) a mean with a bias will do."""
        if fixed:  # any root will do: another differs by an orthogonal matrix
            root = torch.linalg.cholesky(state.inverse)
            return polar(v @ root) @ root.T
        p = polar(v @ state.inverse)
        b, square = self.rows_beta2, p.square().mean(1, keepdim=True)
        state.rows = b * state.rows + (1 - b) * square
        return p / state.rows.sqrt()

    def length(self, state: State, gradient: Tensor, v: Tensor) -> Tensor:
        """``f |w0|``: rows count as if they had a norm of at least 0.1.

        f is 1 as long as |V| is at least half of what noise alone would leave of
        gradients of the usual size, and falls with gradients that vanish.
        """
        kept = min(self.memory, self.t / (self.t + 1))
        square = float(gradient.square().sum())
        state.usual_square = kept * state.usual_square + (1 - kept) * square
        m = self.momentum
        noise = (1 - m) * math.sqrt((1 + m) ** 2 + m**4 / (1 - m**2))
        f = (v.norm() / (0.5 * noise * math.sqrt(state.usual_square))).clamp(max=1.0)
        return f * state.start.clamp_min(0.1 * math.sqrt(len(v)))
