"""Second moments of gradients: the state of the ``"adaptive"`` rules, on workers.

Note [Second moments and bases]
A block's second moment is kept in the eigenbases of its factors, on every rank that
preconditions the block: all of them have the same gradients and bases, so their
moments are the same. A refresh replaces the bases, and the moment follows: what is kept
is the diagonal of the gradient's second moment in the old basis, and it becomes the
diagonal of that same matrix in the new one (`natgrad.math.rules.moved_moment`). With
``moments="restart"`` it is forgotten instead.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from natgrad.math.rules import mean_of_squares, moved_moment

if TYPE_CHECKING:
    from natgrad.layers import Block
    from natgrad.rules.preconditioner import Stacks

MaybeTensor = TypeVar("MaybeTensor", Tensor, Tensor | None)
Bases = tuple[Tensor, Tensor]
"""Q on the right and on the left; an empty tensor is the identity."""


@dataclass(kw_only=True)
class Moment:
    """``square`` ``(s, m, n)``: the running average of squares, over ``steps``."""

    square: Tensor
    steps: int = 0


class Moments:
    """One `Moment` for each block that an adaptive rule has scaled on this rank."""

    def __init__(self, stacks: "Stacks") -> None:
        self.states: dict[str, Moment] = {}
        self._stacks = stacks

    def steps(self, name: str) -> int:
        """How many gradients a block's moment is made of."""
        return self.states[name].steps if name in self.states else 0

    def update(self, names: Sequence[str], gradients: Tensor, beta2: float) -> Tensor:
        """Add the gradients of blocks in their bases; returns averages without bias.

        ``gradients`` ``(k s, m, n)`` are of blocks whose moments are of as many steps.
        """
        square, steps = self.aged(names, gradients)
        return mean_of_squares(square, gradients, beta2, steps)

    def aged(self, names: Sequence[str], like: Tensor) -> tuple[Tensor, int]:
        """Moments that are to get one more gradient, joined, and of how many then.

        ``like`` ``(k s, ...)`` is what they are moments of.
        """
        square = self._joined(names, like)
        for name in names:
            self.states[name].steps += 1
        return square, self.steps(names[0])

    def _joined(self, names: Sequence[str], like: Tensor) -> Tensor:
        size = len(like) // len(names)
        for name in names:
            if name not in self.states:
                self.states[name] = Moment(square=torch.zeros_like(like[:size]))
        parts = [(self.states[name].square,) for name in names]
        (square,), views = self._stacks.joined(names, parts)
        for name, (view,) in zip(names, views, strict=True):
            self.states[name].square = view
        return square

    def forget(self, names: Iterable[str]) -> None:
        """Begin the moments of some blocks again."""
        for name in names:
            self.states.pop(name, None)

    def follow(self, old: Mapping[str, Bases], new: Mapping[str, Bases]) -> None:
        """Move the moments of blocks whose bases were replaced by a refresh."""
        for name, state in self.states.items():
            if name in old and name in new:
                shape = tuple(state.square.shape)
                state.square = moved(state.square, shape, old[name], new[name])

    def save(self) -> dict[str, Any]:
        """Tensors and numbers by block name."""
        return {
            name: {"square": state.square, "steps": state.steps}
            for name, state in self.states.items()
        }

    @staticmethod
    def loaded(
        saved: Mapping[str, Any],
        blocks: "Iterable[Block]",
        dtype: torch.dtype | None = None,
    ) -> dict[str, Moment]:
        """The states that `save` wrote; raises if they are of other blocks."""
        shapes = {block.name: moment_shape(block) for block in blocks}
        for name, entry in saved.items():
            shape = tuple(entry["square"].shape)
            if shape != shapes.get(name):
                raise ValueError(
                    f"The second moment of {name!r} was saved with shape {shape}. Must "
                    f"be {shapes.get(name) or 'that of a block of this model'}."
                )
        device = {block.name: block.parameters[0].device for block in blocks}
        squares = {name: entry["square"].detach() for name, entry in saved.items()}
        return {
            name: Moment(
                square=square.to(device[name], dtype or square.dtype, copy=True),
                steps=int(saved[name]["steps"]),
            )
            for name, square in squares.items()
        }


def moment_shape(block: "Block") -> tuple[int, int, int]:
    """Of what a block's rule keeps: ``(s, m, n)``, or fewer numbers."""
    return block.rule.moment_shape(block.shape) or block.shape


def moved(
    x: MaybeTensor, shape: tuple[int, ...], old: Bases, new: Bases
) -> MaybeTensor:
    """A second moment of a block of this shape, in any shape, in its new bases."""
    right, left = (_replaced(*pair) for pair in zip(old, new, strict=True))
    if x is None or (right is None and left is None):
        return x
    return moved_moment(x.reshape(shape), right, left).reshape(x.shape)


def is_replaced(old: Bases, new: Bases) -> bool:
    """Whether a refresh has put another basis on either side."""
    return any(_replaced(*pair) is not None for pair in zip(old, new, strict=True))


def _replaced(old: Tensor, new: Tensor) -> Bases | None:
    """Both bases if they differ; None if a side stays as it is."""
    if new is old or not new.numel():
        return None
    if not old.numel():  # the identity, before the first refresh
        old = torch.eye(new.shape[-1], dtype=new.dtype, device=new.device)
        old = old.expand_as(new)
    return old, new
