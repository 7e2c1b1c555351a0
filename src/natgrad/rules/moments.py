"""Second moments of gradients: the state of the ``"adaptive"`` rules, on workers.

Note [Second moments and bases]
A block's second moment is kept in the eigenbases of its factors, on every rank that
preconditions the block: all of them have the same gradients and bases, so their
moments are the same. A refresh replaces the bases, and the moment follows: what is kept
is the diagonal of the gradient's second moment in the old basis, and it becomes the
diagonal of that same matrix in the new one (`natgrad.math.rules.moved_moment`). With
``moments="restart"`` it is forgotten instead.

Note [Averages in a basis]
A rule that averages gradients (momentum) and works in bases needs both this step's
gradient and the average there: two projections a step. But a projection is linear, and
the average of this step is that of the last one and a part of this step's gradient. So
the projected average is kept too: it follows the projected gradients, and is projected
itself only in the first step with new bases. It is saved with the second moment, as it
differs by rounding from what another projection would give.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from natgrad.math.rules import moved_moment

if TYPE_CHECKING:
    from natgrad.layers import Block
    from natgrad.rules.preconditioner import Stacks

MaybeTensor = TypeVar("MaybeTensor", Tensor, Tensor | None)
Bases = tuple[Tensor, Tensor]
"""Q on the right and on the left; an empty tensor is the identity."""


@dataclass(kw_only=True)
class Moment:
    """``square`` ``(s, m, n)``: the running average of squares, over ``steps``.

    ``mean``: the running average of gradients in the same bases, if a rule has asked
    for it since those are there. See Note [Averages in a basis].
    """

    square: Tensor
    steps: int = 0
    mean: Tensor | None = None


class Moments:
    """One `Moment` for each block that an adaptive rule has scaled on this rank."""

    def __init__(self, stacks: "Stacks") -> None:
        self.states: dict[str, Moment] = {}
        self._stacks = stacks

    def average(
        self,
        names: Sequence[str],
        newest: Mapping[str, float | None],
        image: Tensor,
        project: Callable[[], Tensor],
    ) -> Tensor:
        """The average of gradients, in their bases, of blocks. See `Matrices.average`.

        ``newest`` is the weight that gradients, ``image`` ``(k s, m, n)``, have in it.
        """
        states = [self.states[name] for name in names if name in self.states]
        weights = {newest.get(name) for name in names}
        weight = weights.pop() if len(weights) == 1 else None
        known = [(s.mean,) for s in states if s.mean is not None]
        if weight is None or len(states) < len(names):
            self.outdate(names)
            return project()
        if len(known) < len(names):
            mean = project()
            views = mean.split(len(mean) // len(names))
        else:
            parts = self._stacks.joined([f"{name}/mean" for name in names], known)
            (mean,), views = parts[0], [view for (view,) in parts[1]]
            mean.lerp_(image, weight)
        for state, view in zip(states, views, strict=True):
            state.mean = view
        return mean

    def outdate(self, names: Iterable[str]) -> None:
        """Forget the averages of blocks that are in other bases now."""
        for state in (self.states[n] for n in names if n in self.states):
            state.mean = None

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
            name: {"square": state.square, "steps": state.steps, "mean": state.mean}
            for name, state in self.states.items()
        }

    @staticmethod
    def loaded(
        saved: Mapping[str, Any],
        blocks: "Iterable[Block]",
        dtype: torch.dtype | None = None,
    ) -> dict[str, Moment]:
        """The states that `save` wrote; raises if they are of other blocks."""
        known = {block.name: block for block in blocks}
        for name, entry in saved.items():
            block, shape = known.get(name), tuple(entry["square"].shape)
            legal = moment_shape(block) if block else "that of a block of this model"
            if shape != legal:
                raise ValueError(
                    f"The second moment of {name!r} was saved with shape {shape}. Must "
                    f"be {legal}."
                )

        def move(name: str, x: Tensor) -> Tensor:
            device = known[name].parameters[0].device
            return x.detach().to(device, dtype or x.dtype, copy=True)

        means = {name: entry.get("mean") for name, entry in saved.items()}
        return {
            name: Moment(
                square=move(name, entry["square"]),
                steps=int(entry["steps"]),
                # states from before it was kept have none
                mean=None if means[name] is None else move(name, means[name]),
            )
            for name, entry in saved.items()
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
