"""Micro-batches: which forwards one loss is of, its terms, and the sums of a step.

Note [Micro-batches]
A micro-batch is what one loss is of: mostly one forward of the model. Several forwards
that came before the first backward through any of them are under one loss (a Siamese
network, the steps of an episode). A forward whose graph is gone by then was never meant
to be learned from. Layers that are called without their model are one forward until the
next backward.

Note [Terms]
The loss says nothing about itself, so the number of its terms is read from the
forward. It is the first dim of the model's output, if an argument or a layer has it
too; else the first dim that most layers have among those of the arguments. For a mean
over tokens it is the positions of the output, or of the layer that ran last. Forwards
under one loss that have equally many examples, and more than one, look at the same
examples; the terms of others add up. A user who knows better says so: `set_loss_terms`.
"""

import math
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from natgrad.capture.sink import INPUTS, Sent, Sink
from natgrad.layers import Block, Observed
from natgrad.math.packing import flatten, trace
from natgrad.math.shards import local
from natgrad.math.statistics import Rows, widen

if TYPE_CHECKING:
    from natgrad.plan.spec import StatisticSpec

Leaf = Callable[[], Tensor]
Use = Literal["learned", "asked"]
"""A backward whose gradients are kept, or one that asks for them by name."""
POSITION_KINDS = (INPUTS,)
"""Statistics averaged over positions; all others are averaged over examples."""


class Token:
    """Held by what waits for a backward, so that it lives as long as the graph."""


@dataclass(kw_only=True, eq=False)
class Forward:
    """The sizes seen in one forward, which tell the number of terms of its loss.

    Attributes:
        arguments: the first dims of the tensors among the model's arguments.
        lists: the lengths of the lists of tensors there.
        output: the shape of the model's output, if it has a tensor with dims.
        layers: the batch sizes that layers saw, and how many; 0: none to be seen.
        last: elements and features of the output of the last layer, and which dim
            of it has the features.
        batch: the micro-batch that it is part of, once its backward has begun.
        is_aside: whether a backward that does not count came through it.
        is_expected: whether its backward counts, whatever layers are due.
    """

    arguments: Counter[int] = field(default_factory=Counter[int])
    lists: set[int] = field(default_factory=set[int])
    output: tuple[int, ...] = ()
    layers: Counter[int] = field(default_factory=Counter[int])
    last: tuple[int, int, int] = (0, 1, -1)
    batch: "MicroBatch | None" = None
    is_aside: bool = False
    is_expected: bool = False
    _token: "weakref.ref[Token] | None" = None

    def token(self) -> Token:
        """What a call of a layer keeps until its backward."""
        token = self._token() if self._token is not None else None
        if token is None:
            token = Token()
            self._token = weakref.ref(token)
        return token

    @property
    def is_awaited(self) -> bool:
        """Whether there is a graph that a backward may still go through."""
        return self._token is not None and self._token() is not None

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the arguments of the model."""
        for argument in (*args, *kwargs.values()):
            for leaf in _leaves(argument):
                if isinstance(leaf, Tensor):
                    self.arguments.update(leaf.shape[:1])
                else:
                    self.lists.add(leaf)

    def returns(self, output: Any) -> None:
        """Note the model's output: the first that is more than a number."""
        found = (x for x in _leaves(output) if isinstance(x, Tensor))
        shapes = (tuple(x.shape) for x in found if x.requires_grad and x.numel() != 1)
        self.output = next(shapes, ())

    def passes(self, block: Block, module: nn.Module, output: Tensor) -> None:
        """Note the output of a layer."""
        assert block.kind is not None
        self.layers[block.kind.examples(module, output)] += 1
        features = block.kind.features(module)
        self.last = output.numel(), features, block.kind.channel_dim

    def examples(self) -> int:
        """See Note [Terms]."""
        whole = self.output[0] if self.output else 0
        if set(self.layers) == {0} and self.output[:1] == (0,):
            return 0
        if set(self.layers) == {0}:
            return whole if whole in self.lists else 1
        known = {*self.arguments, *self.lists}
        if whole and (whole in known or whole in self.layers):
            return whole
        likely = [n for n, _ in self.layers.most_common() if n]
        likely = [n for n in likely if n in known or not known]
        if not likely:
            raise RuntimeError(
                "natgrad cannot tell how many examples the loss is over: first dims "
                f"are {_listed(self.arguments)} of the model's arguments, "
                f"{_listed(n for n in self.layers if n)} of its layers and "
                f"{whole or 'unknown'} of its output. Call set_loss_terms(examples) of "
                "the optimizer before each backward."
            )
        return likely[0]

    def positions(self) -> int:
        """See Note [Terms]."""
        elements, features, dim = self.last
        shape = self.output
        if len(shape) > 1 and shape[dim] == features:
            elements = math.prod(shape)
        return elements // features


@dataclass(kw_only=True, eq=False)
class MicroBatch:
    """The forwards under one loss. See Note [Micro-batches]."""

    forwards: Sequence[Forward]
    owner: "Forwards"
    given: int | None = None
    _terms: int | None = None

    @property
    def terms(self) -> int:
        """Over how many the loss is a mean or a sum; those that were given first."""
        self.settle()
        assert self._terms is not None
        return self._terms

    def settle(self) -> None:
        """Find out how many; raises if nobody can tell."""
        if self._terms is None:
            self._terms = self._find() if self.given is None else self.given

    def _find(self) -> int:
        if self.owner.tokens:
            return sum(f.positions() for f in self.forwards)
        sizes = [f.examples() for f in self.forwards]
        if len(sizes) == 1:
            return sizes[0]
        same = set(sizes) != {1} and len(set(sizes)) == 1
        found = sizes[0] if same else sum(sizes)
        again = ", each in every forward" if same else ""
        self.owner.warn_once(
            f"{len(sizes)} forwards of the model are under one loss: natgrad takes "
            f"them for {found} examples{again}. If the loss is over another number of "
            "terms, call set_loss_terms(terms) of the optimizer before its backward."
        )
        return found


class Forwards:
    """The forwards since the last backward, and how they make micro-batches."""

    def __init__(self, *, tokens: bool) -> None:
        self.tokens = tokens
        self._warned = False
        self._waiting: list[Forward] = []
        self._learned: tuple[int, MicroBatch] | None = None
        self._asked: tuple[int, MicroBatch] | None = None
        self.current = Forward()

    def begin(self) -> Forward:
        """A forward begins."""
        self._waiting = [f for f in self._waiting if _waits(f)]
        self.current = Forward()
        self._waiting.append(self.current)
        return self.current

    def learned(self, forward: Forward, given: int | None, backward: int) -> MicroBatch:
        """The micro-batch of a forward whose backward has come."""
        if forward.batch is not None:
            return forward.batch
        if self._learned is not None and self._learned[0] == backward:
            forward.batch = self._learned[1]
            return forward.batch
        others = [f for f in self._others(forward) if not f.is_aside]
        batch = self._join([*others, forward], given)
        for f in batch.forwards:
            f.batch = batch
        self._learned = backward, batch
        return batch

    def asked(self, forward: Forward, given: int | None, backward: int) -> MicroBatch:
        """The same, if this backward only asks for gradients by name."""
        if self._asked is None or self._asked[0] != backward:
            together = [*self._others(forward), forward]
            self._asked = backward, self._join(together, given)
        return self._asked[1]

    def _others(self, forward: Forward) -> list[Forward]:
        return [f for f in self._waiting if f is not forward and _waits(f)]

    def _join(self, forwards: list[Forward], given: int | None) -> MicroBatch:
        return MicroBatch(forwards=forwards, owner=self, given=given)

    def warn_once(self, message: str) -> None:
        """Say it the first time."""
        if not self._warned:
            warnings.warn(message, stacklevel=2)
        self._warned = True


@dataclass(kw_only=True)
class Call:
    """One forward of one layer that waits for its backward.

    ``rows`` are the examples looked at, ``scale`` how many each stands for, ``sent``
    the statistic of its inputs if that has left. ``leaf`` finds the tensor that the
    weight's gradient goes to. ``is_mine``: whether moments are made of it here;
    ``is_apart``: whether that of the inputs is, of the features that this rank has.
    """

    block: Block
    module: nn.Module
    leaf: Leaf
    want: tuple[str, ...]
    forward: Forward
    token: Token
    rows: Rows
    scale: float
    observed: Observed
    is_mine: bool = True
    is_apart: bool = False
    inputs: Tensor | None = None
    sent: Sent | None = None
    done: bool = False
    asked: bool = False

    @property
    def inputs_name(self) -> str:
        """The name of the statistic of its inputs."""
        return f"{self.block.name}/{INPUTS}"

    def offer_inputs(self, sink: Sink) -> None:
        """Let what is known of its inputs leave."""
        moments = self.observed.moments
        if INPUTS in self.want and not (self.is_mine or self.is_apart):
            sink.left_out(self.inputs_name)
        if INPUTS not in moments:
            return
        with torch.no_grad():
            moment = self.block.in_parts(INPUTS, moments[INPUTS])
            self.sent = sink.made(self.inputs_name, moment)
        if self.sent is not None:
            del moments[INPUTS]

    def theirs(self, *, based: bool) -> Iterator[str]:
        """The names of the statistics of this call that another rank makes."""
        for s in self.kinds(based=based):
            if not (self.is_apart and s.kind == INPUTS):
                yield s.name

    def kinds(self, *, based: bool) -> Iterator["StatisticSpec"]:
        """The statistics that it adds to; S only if there are bases to have it in."""
        for s in self.block.spec.statistics:
            if s.kind in self.want and (s.kind != "S" or based):
                yield s

    def zeros(self, *, based: bool) -> dict[str, Tensor]:
        """What an empty batch adds to every sum."""
        like = widen(local(self.block.parameters[0]))
        return {
            s.kind: like.new_zeros(s.stack, *[s.size] * (2 - s.diagonal))
            for s in self.kinds(based=based)
        }

    def finish(self) -> None:
        """Let tensors go: the graph may outlive the backward (of a loss in a log)."""
        self.observed, self.inputs, self.sent = Observed(), None, None
        self.done = True


@dataclass(kw_only=True)
class Captured:
    """The raw sums of a step, by statistic name, with what they are divided by.

    ``step_terms`` are those of the whole step's loss, if a user has given them;
    ``members`` how many inputs each matrix had, where they are counted.
    """

    sums: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    calls: dict[str, int] = field(default_factory=dict[str, int])
    positions: dict[str, int] = field(default_factory=dict[str, int])
    members: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    batches: list[MicroBatch] = field(default_factory=list[MicroBatch])
    step_terms: int | None = None

    @property
    def forwards(self) -> int:
        """How many micro-batches the loss was divided by."""
        seen = len(self.batches)
        return min(seen, 1) if self.step_terms else seen

    def count(self, name: str) -> int:
        """How many terms a statistic's mean is over, on this rank.

        For a statistic of examples these are the terms of the loss: all of them, also
        of a micro-batch in which the layer did not run and so has no gradient.
        """
        if name.rpartition("/")[2] in POSITION_KINDS:
            return self.positions.get(name, 0)
        if self.step_terms and self.batches:
            return self.step_terms
        return sum(batch.terms for batch in self.batches)

    def learn(self, batch: MicroBatch) -> None:
        """Count a micro-batch, once."""
        if not any(batch is known for known in self.batches):
            self.batches.append(batch)

    def add(self, name: str, moment: Tensor, seen: Observed) -> None:
        """Let a statistic's sum grow; the moment is kept and may be written to."""
        if name in self.sums:
            self.sums[name].add_(moment)
        else:
            self.sums[name] = moment
        self.note(name, seen)

    def note(self, name: str, seen: Observed) -> None:
        """Count a part of a statistic's sum."""
        if name.rpartition("/")[2] in POSITION_KINDS:
            self.positions[name] = self.positions.get(name, 0) + seen.positions
        self.calls[name] = self.calls.get(name, 0) + 1
        if seen.members is not None:
            self.members[name] = seen.members + self.members.get(name, 0)


@dataclass(frozen=True, kw_only=True)
class Sums:
    """The sums of the due statistics of a step.

    Attributes:
        packed: over all ranks, of the statistics that this rank owns, by name.
        traces: of this rank's own sums, of all due statistics, in one order.
    """

    packed: dict[str, Tensor]
    traces: dict[str, Tensor]


def packed(captured: Captured, due: Iterable[str], like: Tensor) -> Sums:
    """The sums of one process, which owns all statistics."""
    sums = Sums(packed={}, traces={})
    for name in due:
        x = captured.sums.pop(name, None)
        sums.traces[name] = like.new_zeros(()) if x is None else trace(x)
        if x is not None:
            sums.packed[name] = flatten(x)
    return sums


def _waits(forward: Forward) -> bool:
    return forward.batch is None and forward.is_awaited


def _leaves(tree: Any) -> Iterator[Tensor | int]:
    """The tensors in nested arguments, and the lengths of lists of tensors."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        for leaf in tree.values():
            yield from _leaves(leaf)
    elif isinstance(tree, list | tuple):
        if all(isinstance(leaf, Tensor) for leaf in tree):
            yield len(tree)
        for leaf in tree:
            yield from _leaves(leaf)


def _listed(sizes: Any) -> str:
    return ", ".join(str(n) for n in sizes) or "unknown"
