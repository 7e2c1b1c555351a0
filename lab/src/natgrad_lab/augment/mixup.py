"""Running mixup (Osawa et al. 2019, eq. 9-12; SP-NGD, eq. 18-20)."""

import random
from typing import Any

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]


class RunningMixup:
    """Mix each batch with the virtual batch of the step before.

        x~(t) = lambda x(t) + (1 - lambda) x~(t-1)
        y~(t) = lambda y(t) + (1 - lambda) y~(t-1),      lambda ~ Beta(alpha, alpha)

    The first batch, and any whose shape differs from the one before, passes unmixed.
    lambda follows from the seed and the number of steps alone, so all ranks with one
    seed mix alike, each its own slice. A step's batch may come in parts (gradient
    accumulation): each is mixed with the same part of the step before, by the same
    lambda, so that together they are the whole batch mixed at once. The virtual batch
    stays in memory, where its parts are.

    Args:
        alpha: parameter of the Beta distribution; the papers use about 0.4.
        seed: where lambda starts from; the same on all ranks.
        parts: calls that make up a step.
    """

    def __init__(self, alpha: float = 0.4, *, seed: int = 0, parts: int = 1) -> None:
        if alpha <= 0:
            raise ValueError(f"Invalid {alpha=}. Must be > 0.")
        if parts < 1:
            raise ValueError(f"Invalid {parts=}. Must be >= 1.")
        self.alpha, self.seed, self.parts = alpha, seed, parts
        self._step, self._part = 0, 0
        self._virtual: list[Pair] = []

    def __call__(self, inputs: Tensor, targets: Tensor) -> Pair:
        """Mix inputs (N, ...) and probabilities (N, classes) with the last result."""
        if not targets.is_floating_point():
            raise ValueError(
                f"Invalid targets of {targets.dtype}. Must be probabilities: "
                "see soft_targets()."
            )
        mixed = self._mixed((inputs.detach(), targets.detach()))
        self._virtual[self._part : self._part + 1] = [mixed]
        self._part += 1
        if self._part == self.parts:
            self._step, self._part = self._step + 1, 0
        return mixed

    def _mixed(self, new: Pair) -> Pair:
        first = self._part == len(self._virtual)
        old = new if first else self._virtual[self._part]
        if first or not _alike(old, new):
            return new
        weight = self.weight(self._step)
        x, y = (torch.lerp(o.to(n), n, weight) for o, n in zip(old, new, strict=True))
        return x, y

    def weight(self, step: int) -> float:
        """The lambda of a step."""
        # seeding with a string hashes it: neighbouring steps are unrelated
        return random.Random(f"{self.seed}/{step}").betavariate(self.alpha, self.alpha)

    def state_dict(self) -> dict[str, Any]:
        """The position, and this rank's virtual batch: as many parts as there were."""
        return {
            "step": self._step,
            "part": self._part,
            "inputs": [inputs for inputs, _ in self._virtual],
            "targets": [targets for _, targets in self._virtual],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict()` made with as many parts."""
        self._step, self._part = int(state["step"]), int(state["part"])
        pairs = zip(state["inputs"], state["targets"], strict=True)
        self._virtual = [(inputs, targets) for inputs, targets in pairs]


def _alike(one: Pair, two: Pair) -> bool:
    return all(a.shape == b.shape for a, b in zip(one, two, strict=True))
