"""Momentum: kept of each parameter by the ranks that update it.

A rank keeps the *velocity*: the last change of a parameter, or the running average of
its gradients. Beside an average it keeps its *mass*: the sum of the weights that the
gradients have in it, which a parameter has its own of, because it may get its first
gradient late, and because momentum may change.
"""

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from natgrad.math import foreach
from natgrad.math.rules import averaged_noise
from natgrad.math.shards import local
from natgrad.math.statistics import widen

VELOCITY, MASS = "velocity", "mass"
State = MutableMapping[Tensor, dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Average:
    """What momentum is a running average of.

    Attributes:
        nesterov: look ahead: use the momentum that the next step will have.
    """

    keeps_mass: ClassVar[bool] = False

    nesterov: bool = False

    def velocity(self, state: State, p: Tensor) -> Tensor:
        """That of a parameter, at first zero; in float32 or better."""
        entry, like = state[p], widen(p)
        if VELOCITY not in entry:
            entry[VELOCITY] = torch.zeros_like(like)
            if self.keeps_mass:
                entry[MASS] = 0.0
        # the model may have been converted
        entry[VELOCITY] = entry[VELOCITY].to(like.device, like.dtype)
        return local(entry[VELOCITY])

    def keep_whole(self, state: State, p: Tensor, like: Tensor) -> None:
        """Keep the velocity of a parameter that is cut on the rank that works on it.

        ``like`` is a whole tensor of the parameter's shape.
        """
        if VELOCITY not in state[p]:
            state[p] |= {VELOCITY: torch.zeros_like(like, dtype=widen(p).dtype)}
            state[p] |= {MASS: 0.0} if self.keeps_mass else {}

    def directions(
        self,
        state: State,
        params: Sequence[Tensor],
        gradients: Sequence[Tensor],
        momentum: float,
    ) -> Sequence[Tensor]:
        """What the rule is given, from the gradients of parameters."""
        return gradients

    def noise(self, momentum: float) -> float:
        """What is left in a direction of gradients that are only noise, as a part."""
        return 1.0

    def move(
        self,
        state: State,
        params: Sequence[Tensor],
        updates: Sequence[Tensor],
        lr: float,
        momentum: float,
    ) -> None:
        """Change the parameters by what the rule and the length gave."""
        raise NotImplementedError

    def follow(self, state: State, p: Tensor, change: Tensor) -> None:
        """Learn of a change of a parameter that was no update (a rescaling)."""


@dataclass(frozen=True, kw_only=True)
class AverageUpdates(Average):
    """Momentum after the rule: ``v <- momentum v - lr u``, ``w <- w + v``.

    As SP-NGD (eq. 23) and torch's SGD have it.
    """

    def move(
        self,
        state: State,
        params: Sequence[Tensor],
        updates: Sequence[Tensor],
        lr: float,
        momentum: float,
    ) -> None:
        """eq. 23."""
        velocity = [self.velocity(state, p) for p in params]
        foreach.scale_(velocity, momentum)
        foreach.add_(velocity, updates, -lr)
        params = [local(p) for p in params]
        if self.nesterov:
            foreach.add_(params, velocity, momentum)
            foreach.add_(params, updates, -lr)
        else:
            foreach.add_(params, velocity)

    def follow(self, state: State, p: Tensor, change: Tensor) -> None:
        """The velocity is the last change of the parameter, whatever made it."""
        foreach.add_([self.velocity(state, p)], [change])


@dataclass(frozen=True, kw_only=True)
class AverageGradients(Average):
    """Momentum before the rule, as Muon and Adam have it.

    The average has no bias and weights that add up to 1, so that with momentum m a
    learning rate means 1 - m of what it means for `AverageUpdates`.
    """

    keeps_mass: ClassVar[bool] = True

    def directions(
        self,
        state: State,
        params: Sequence[Tensor],
        gradients: Sequence[Tensor],
        momentum: float,
    ) -> Sequence[Tensor]:
        """Add gradients to their running averages; returns those, without bias."""
        m, velocity = momentum, [self.velocity(state, p) for p in params]
        foreach.scale_(velocity, m)
        foreach.add_(velocity, gradients, 1 - m)
        for p in params:
            state[p][MASS] = m * state[p][MASS] + 1 - m
        masses = [state[p][MASS] for p in params]
        if self.nesterov:
            velocity = foreach.scaled(velocity, m)
            foreach.add_(velocity, gradients, 1 - m)
            masses = [m * mass + 1 - m for mass in masses]
        return foreach.divided(velocity, masses)

    def noise(self, momentum: float) -> float:
        """That of a long average."""
        return averaged_noise(momentum, self.nesterov)

    def move(
        self,
        state: State,
        params: Sequence[Tensor],
        updates: Sequence[Tensor],
        lr: float,
        momentum: float,
    ) -> None:
        """``w <- w - lr u``."""
        foreach.add_([local(p) for p in params], updates, -lr)
