"""Running mixup (Osawa et al. 2019, eq. 9-12; SP-NGD, eq. 18-20)."""

import random
from typing import Any

import torch
from torch import Tensor


class RunningMixup:
    """Mix each batch with the virtual batch of the step before.

        x~(t) = lambda x(t) + (1 - lambda) x~(t-1)
        y~(t) = lambda y(t) + (1 - lambda) y~(t-1),      lambda ~ Beta(alpha, alpha)

    The first batch, and any whose shape differs from the one before, passes unmixed.
    lambda follows from the seed and the number of steps alone, so all ranks with one
    seed mix alike, each its own slice.

    Args:
        alpha: parameter of the Beta distribution; the papers use about 0.4.
        seed: where lambda starts from; the same on all ranks.
    """

    def __init__(self, alpha: float = 0.4, *, seed: int = 0) -> None:
        if alpha <= 0:
            raise ValueError(f"Invalid {alpha=}. Must be > 0.")
        self.alpha, self.seed = alpha, seed
        self._step = 0
        self._virtual: tuple[Tensor, Tensor] | None = None

    def __call__(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Mix inputs (N, ...) and probabilities (N, classes) with the last result."""
        if not targets.is_floating_point():
            raise ValueError(
                f"Invalid targets of {targets.dtype}. Must be probabilities: "
                "see soft_targets()."
            )
        weight = self.weight(self._step)
        virtual = (inputs.detach(), targets.detach())
        if self._virtual is not None and _alike(self._virtual, virtual):
            old = self._virtual
            virtual = tuple(
                torch.lerp(o.to(v), v, weight)
                for o, v in zip(old, virtual, strict=True)
            )
        self._step, self._virtual = self._step + 1, (virtual[0], virtual[1])
        return self._virtual

    def weight(self, step: int) -> float:
        """The lambda of a step."""
        # seeding with a string hashes it: neighbouring steps are unrelated
        return random.Random(f"{self.seed}/{step}").betavariate(self.alpha, self.alpha)

    def state_dict(self) -> dict[str, Any]:
        """The step and this rank's virtual batch (None before the first step)."""
        inputs, targets = self._virtual or (None, None)
        return {"step": self._step, "inputs": inputs, "targets": targets}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict()`."""
        self._step = int(state["step"])
        inputs, targets = state["inputs"], state["targets"]
        self._virtual = None if inputs is None else (inputs, targets)


def _alike(one: tuple[Tensor, Tensor], two: tuple[Tensor, Tensor]) -> bool:
    return all(a.shape == b.shape for a, b in zip(one, two, strict=True))
