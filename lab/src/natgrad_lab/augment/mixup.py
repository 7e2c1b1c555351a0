"""Running mixup (Osawa et al. 2019, eq. 9-12; SP-NGD, eq. 18-20), read in two ways.

`RunningMixup` is the equations as they are printed, `ImageMixup` what the authors'
published code does (github.com/tyohei/chainerkfac, ``examples/imagenet/models``).
"""

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from natgrad_lab.augment.erasing import RandomErasing

Pair = tuple[Tensor, Tensor]


class RunningMixup:
    """Mix each batch with the virtual batch of the step before.

        x~(t) = lambda x(t) + (1 - lambda) x~(t-1)
        y~(t) = lambda y(t) + (1 - lambda) y~(t-1),      lambda ~ Beta(alpha, alpha)

    The first batch, and any whose shape differs from the one before, passes unmixed.
    lambda follows from the seed and the number of steps alone, so all ranks with one
    seed mix by the same one, each its own slice. A step's batch may come in parts
    (gradient accumulation): each is mixed with the same part of the step before, by the
    same lambda, so that together they are the whole batch mixed at once. The virtual
    batch stays in memory, where its parts are.

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


class ImageMixup(RunningMixup):
    """Mix each forward's images with the virtual images of the forward before.

        x~_i(t) = lambda_i x_i(t) + (1 - lambda_i) x~_i(t-1)

    with lambda_i = max(l, 1 - l), l ~ Beta(alpha, alpha) drawn for each image, so that
    the raw image always has the larger weight. Images are erased after they are mixed,
    and the erased ones are kept. Only one forward's images stay in memory, so the
    result depends on how a batch is cut into forwards. The weights of a forward follow
    from the seed and the number of forwards, for the images of all ranks together.

    Args:
        alpha: parameter of the Beta distribution.
        seed: where the random numbers start from; the same on all ranks.
        erasing: what is erased of the mixed images, if anything.
        rank: this process's number.
        world: number of processes; each has the same number of images.
    """

    def __init__(
        self,
        alpha: float = 0.4,
        *,
        seed: int = 0,
        erasing: RandomErasing | None = None,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        super().__init__(alpha, seed=seed)
        self._erasing, self._rank, self._world = erasing, rank, world

    def _mixed(self, new: Pair) -> Pair:
        x, y = new
        old = self._virtual[0] if self._virtual else None
        if old is not None and _alike(old, new):
            weights = self.weights(self._step, len(x)).to(x)
            x = torch.lerp(old[0].to(x), x, _column(weights, x))
            y = torch.lerp(old[1].to(y), y, _column(weights.to(y), y))
        if self._erasing is not None:
            x = self._erasing(x, self._uniforms(len(x), self._erasing.randoms).to(x))
        return x, y

    def weights(self, forward: int, images: int) -> Tensor:
        """The lambda of each of this rank's images, (images,), in [1/2, 1]."""
        draws = self._random("mix", forward).beta(
            self.alpha, self.alpha, images * self._world
        )
        return torch.from_numpy(np.maximum(draws, 1 - draws)[self._own(images)])

    def _uniforms(self, images: int, columns: int) -> Tensor:
        random = self._random("erase", self._step)
        shape = (images * self._world, columns)
        return torch.from_numpy(random.random(shape, np.float32)[self._own(images)])

    def _own(self, images: int) -> slice:
        return slice(self._rank * images, (self._rank + 1) * images)

    def _random(self, use: str, forward: int) -> np.random.Generator:
        words = random.Random(f"{self.seed}/{use}/{forward}").getrandbits(128)
        return np.random.default_rng(words)


def _column(weights: Tensor, like: Tensor) -> Tensor:
    return weights.view(-1, *[1] * (like.dim() - 1))


def _alike(one: Pair, two: Pair) -> bool:
    return all(a.shape == b.shape for a, b in zip(one, two, strict=True))
