"""What the length of a layer's step is measured by, and which weights run away.

Note [A length that does not feed on itself]
A step that is a part of the weight's norm *now* lengthens what it is measured by:
without a normalisation layer, or at a constant learning rate, norms grow geometrically.
So a step is a part of the norm at the *start*, which every rank notes in its first
step. And a rule that gives all gradients one length cannot stop: where gradients have
become small, because all examples are learnt, it goes on at full length. So the ranks
that work on a layer also keep the usual size of its gradients, over a long memory, and
steps shorten where the direction is small beside it (`natgrad.math.rules.fading`).
"""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from natgrad.distributed.communicator import Communicator
from natgrad.layers import Block
from natgrad.math import foreach
from natgrad.math.rules import LEAST_ROW
from natgrad.math.shards import local
from natgrad.plan import Plan

RUNAWAY = 100.0
"""A weight of more than so many times its norm at the start is said to run away."""
LOOK_EVERY = 100


@dataclass(kw_only=True)
class Reference:
    """Of one layer.

    Attributes:
        start: the norm of weight and bias together when training began, on every rank.
        usual: the root of the mean squared norm of its gradients, on its workers.
        steps: how many gradients that is made of.
    """

    start: Tensor
    usual: Tensor | None = None
    steps: int = 0


class References:
    """One `Reference` for each matrix.

    See Note [A length that does not feed on itself].
    """

    def __init__(self) -> None:
        self.states: dict[str, Reference] = {}
        self.total: Callable[[Tensor], Tensor] | None = None
        self._warned = False

    def whole(self, norms: Tensor) -> Tensor:
        """Norms of whole weights, from those of what each rank has of them.

        ``total`` sums over ranks if weights are cut; all ranks then ask for the same.
        """
        if self.total is None:
            return norms
        return self.total(norms.double().square()).sqrt().to(norms)

    def weight_norms(self, blocks: Sequence[Block], like: Tensor) -> Tensor:
        """Of each block's weight and bias together, whoever works on the block."""
        return self.whole(weight_norms(blocks, like))

    def begin(self, blocks: Sequence[Block], like: Tensor) -> None:
        """Note the norms of weights that are not known yet, in the first step all."""
        new = [b for b in blocks if b.name not in self.states and has_reference(b)]
        if new:
            norms = self.weight_norms(new, like)
            for block, norm in zip(new, norms.unbind(), strict=True):
                self.states[block.name] = Reference(start=norm)

    def usual(self, names: Sequence[str], sizes: Tensor, memory: float) -> Tensor:
        """Add the norms of this step's gradients; returns the usual ones.

        All gradients count alike until there are more than the memory holds.
        """
        states = [self.states[name] for name in names]
        kept = [min(memory, s.steps / (s.steps + 1)) for s in states]
        zero = sizes.new_zeros(())
        old = stacked([zero if s.usual is None else s.usual for s in states], sizes)
        if len(set(kept)) == 1:  # a number need not be copied to a device
            weights = math.sqrt(kept[0]), math.sqrt(1 - kept[0])
        else:
            found = sizes.new_tensor([kept, [1 - x for x in kept]]).sqrt()
            weights = found[0], found[1]
        new = torch.hypot(weights[0] * old, weights[1] * sizes)  # a square may be lost
        for s, x in zip(states, new.unbind(), strict=True):
            s.usual, s.steps = x, s.steps + 1
        return new

    def grown(self, blocks: Sequence[Block], like: Tensor) -> dict[str, float]:
        """By name, how many times its norm at the start a weight that runs away has."""
        known = [b for b in blocks if b.name in self.states]
        if not known:
            return {}
        starts = stacked([self.states[b.name].start for b in known], like)
        least = like.new_tensor([LEAST_ROW * rows_of(b) ** 0.5 for b in known])
        found = self.weight_norms(known, like) / torch.maximum(starts, least)
        numbers: list[float] = found.tolist()
        ratios = dict(zip([b.name for b in known], numbers, strict=True))
        return {name: x for name, x in ratios.items() if not x <= RUNAWAY}

    def watch(
        self, step: int, blocks: Sequence[Block], like: Tensor, *, warn: bool
    ) -> None:
        """Warn once, when a weight runs away; looks every 100 steps."""
        if self._warned or (step + 1) % LOOK_EVERY:
            return
        grown = self.grown(blocks, like)
        if grown:
            self._warned = True
        if grown and warn:
            worst = max(grown, key=lambda name: grown[name])
            warnings.warn(
                f"The weight of {worst} has {grown[worst]:.3g} times the norm that it "
                f"began with, after step {step}; {len(grown)} layer(s) have more than "
                f"{RUNAWAY:.0f} times theirs. Training may diverge: lower the learning "
                "rate, let it fall to zero, or add weight decay. health() names them.",
                stacklevel=5,
            )

    def save(self) -> dict[str, Any]:
        """Tensors and numbers by block name."""
        return {
            name: {"start": s.start, "usual": s.usual, "steps": s.steps}
            for name, s in self.states.items()
        }

    def load(
        self, saved: Mapping[str, Any], blocks: Iterable[Block], like: Tensor
    ) -> None:
        """Take over what `save` returned; a layer that it does not know begins now."""
        ours = {b.name for b in blocks}
        self.states = {
            name: Reference(
                start=entry["start"].to(like, copy=True),
                usual=None if usual is None else usual.to(like, copy=True),
                steps=int(entry["steps"]),
            )
            for name, entry in saved.items()
            if name in ours
            for usual in [entry["usual"]]
        }

    def gather(self, plan: Plan, comm: Communicator, like: Tensor) -> None:
        """Collective: put the usual sizes of all layers' gradients on every rank."""
        if comm.world == 1 or not self.states:
            return
        mine = [plan.workers[name][0] == comm.rank for name in self.states]
        held = [
            [0.0 if s.usual is None else float(s.usual), float(s.steps)]
            if here
            else [0.0, 0.0]
            for s, here in zip(self.states.values(), mine, strict=True)
        ]
        known = comm.agree(like.new_tensor(held, dtype=torch.float64).flatten())
        usual, steps = known[::2].to(like), known[1::2].tolist()
        for s, x, count in zip(
            self.states.values(), usual.unbind(), steps, strict=True
        ):
            s.usual, s.steps = (x if count else None), round(count)

    def release(self, plan: Plan, rank: int) -> None:
        """Forget the gradients of layers that this rank does not work on."""
        for name, s in self.states.items():
            if rank not in plan.workers[name]:
                s.usual, s.steps = None, 0


def has_reference(block: Block) -> bool:
    """Whether updates of a block get a length, and are ours to give."""
    return rows_of(block) > 0 and not block.is_foreign


def rows_of(block: Block) -> int:
    """How many outputs a weight has whose updates get a length; 0 for another."""
    if block.is_factored:
        return block.spec.stack * block.spec.rows
    dims = [size for size in block.parameters[0].shape if size > 1]
    is_matrix = block.kind is None and len(dims) > 1
    return dims[0] if is_matrix and (block.is_asked or block.rule.adapts) else 0


def weight_norms(blocks: Sequence[Block], like: Tensor) -> Tensor:
    """Of what this rank has of each block's weight and bias together."""
    weights = foreach.norms([local(b.parameters[0]).detach() for b in blocks])
    biases = [local(b.parameters[-1]).detach() for b in blocks if len(b.parameters) > 1]
    found = iter(foreach.norms(biases) if biases else [])
    zero = like.new_zeros(())
    bias = [next(found) if len(b.parameters) > 1 else zero for b in blocks]
    return torch.hypot(stacked(weights, like), stacked(bias, like))


def stacked(numbers: Sequence[Tensor], like: Tensor) -> Tensor:
    """Scalars as one vector."""
    return torch.stack([x.to(like) for x in numbers])
