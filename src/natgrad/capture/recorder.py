"""Hooks that turn a forward and a backward into raw statistics, for what is due.

Note [One call of a layer]
A forward hook makes the moments of the layer's input at once and puts a *tensor hook*
on its output; the tensor hook makes the moments of the gradient and only then adds both
to the step's sums. So a forward that is never followed by its backward (evaluation, a
forward under no_grad, the recomputed forward of activation checkpointing) counts for
nothing, and no activation outlives the graph. A second backward through a graph that
was retained counts for nothing either, nor does one that makes a graph of its own
(create_graph=True: the inner gradient of a gradient penalty), nor one that makes no
gradient of the layer's weight (an adversary asks for that of the inputs). A tensor
hook, unlike a module's backward hook, also works when the next layer is an in-place
ReLU.

Note [Scaling]
With N the terms that the loss averages over, the gradient of one term is ghat = N g.
So the sum of ghat ghat^T is N^2 times the sum of g g^T, and G is that over the number
of examples. N is the batch size that the model was called with; it is multiplied by k
when the losses of k micro-batches were each divided by k. A micro-batch is a forward
of the model; without one, what layers did between two backwards. If N is given for the
whole step, there is no k. An AMP loss scale S multiplies g and is divided out again.
The loss of sampled labels has neither k nor S.
"""

import random
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.capture.autograd import Sentinel, accumulates, backward_id
from natgrad.capture.hooks import Hooks, batch_size
from natgrad.diagnostics.timer import Meter
from natgrad.layers import Block, Observed
from natgrad.requiring import require_count

Rows = slice | EllipsisType
POSITION_KINDS = ("A",)
"""Statistics averaged over positions; all others are averaged over examples."""


@dataclass(kw_only=True)
class Call:
    """One forward of one layer that waits for its backward.

    ``rows`` are the examples looked at, ``scale`` how many each stands for.
    """

    block: Block
    module: nn.Module
    want: tuple[str, ...]
    forward: int
    terms: int
    rows: Rows
    scale: float
    observed: Observed
    inputs: Tensor | None = None
    done: bool = False


@dataclass(kw_only=True)
class Captured:
    """The raw sums of a step, by statistic name, with what they are divided by.

    ``step_terms`` are those of the whole step's loss, if a user has given them.
    """

    sums: dict[str, Tensor] = field(default_factory=lambda: {})
    calls: dict[str, int] = field(default_factory=lambda: {})
    positions: dict[str, int] = field(default_factory=lambda: {})
    terms: dict[str, dict[int, int]] = field(default_factory=lambda: {})
    step_terms: int | None = None

    @property
    def forwards(self) -> int:
        """How many micro-batches the loss was divided by."""
        seen = {f for terms in self.terms.values() for f in terms}
        return min(len(seen), 1) if self.step_terms else len(seen)

    def count(self, name: str) -> int:
        """How many terms a statistic's mean is over, on this rank.

        For a statistic of examples these are the terms of the loss: all of them, also
        of a micro-batch in which the layer did not run and so has no gradient.
        """
        block, _, kind = name.rpartition("/")
        if kind in POSITION_KINDS:
            return self.positions.get(name, 0)
        if self.step_terms and self.forwards:
            return self.step_terms
        return sum(self.terms.get(block, self.terms.get("", {})).values())


class Capture:
    """The hooks on a model's blocks and the sums they have made since `take`.

    Attributes:
        step: the number of the step, from which subsampling draws.
        on_forward: called before a forward that is to be captured.
        bases: says in which eigenbases a block's S is to be estimated, if any.
        on_growth: called with a statistic's name each time its sum has grown.
        on_abandon: called when a step's captures are dropped because it was skipped.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: list[Block],
        *,
        loss: str,
        sampled: bool,
        subsample: int | None = 1,
        world: int = 1,
        grad_scaler: torch.amp.GradScaler | None = None,
        meter: Meter | None = None,
    ) -> None:
        self._due: frozenset[str] = frozenset()
        self.step = 0
        self.on_forward: Callable[[], None] | None = None
        self.on_growth: Callable[[str], None] | None = None
        self.bases: Callable[[Block], tuple[Tensor, Tensor] | None] = lambda _: None
        self.on_abandon: Callable[[], None] | None = None
        self.fired: set[str] = set()
        self._model = model
        self._loss = loss
        self._sampled = sampled
        self._subsample, self._world = subsample, world
        self._sampling = False
        self._scaler = grad_scaler
        self._loss_scale: float | None = None
        self._forward = 0
        self._expected = 0
        self._backward = -1
        self._learned = False
        self._batch = 0
        self._terms: int | None = None
        self._terms_used = False
        self._sentinel = Sentinel()
        self._captured = Captured()
        self.meter = meter or Meter(torch.device("cpu"))
        self._hooks = Hooks(model, blocks, self._begin_forward, self._after_forward)
        weakref.finalize(self, self._hooks.close).atexit = False

    @property
    def due(self) -> frozenset[str]:
        """Names of the statistics to estimate; set by the owner before a forward."""
        return self._due

    @due.setter
    def due(self, names: frozenset[str]) -> None:
        self._due = names
        self._hooks.watch(bool(names))

    @property
    def current(self) -> Captured:
        """What was captured so far in this step."""
        return self._captured

    def take(self) -> Captured:
        """What was captured since the last `take`, which begins anew."""
        captured, self._captured = self._captured, Captured()
        self._sentinel.watch(None)
        self._terms, self._batch = None, 0
        return captured

    def set_loss_terms(self, terms: int, whole_step: bool = False) -> None:
        """Say how many terms the coming loss averages over, or all of the step's."""
        require_count("terms", terms)
        if whole_step and self._captured.terms:
            raise RuntimeError(
                "The terms of a whole step must be given before the first backward of "
                "the step."
            )
        self._terms, self._terms_used = terms, False
        self._captured.step_terms = terms if whole_step else None

    @contextmanager
    def sampling(self) -> Generator[None]:
        """While open, backward passes are those of sampled labels."""
        self._sampling = True
        try:
            yield
        finally:
            self._sampling = False

    def close(self) -> None:
        """Remove every hook."""
        self._hooks.close()
        self.take()

    def _begin_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not (self._model.training and torch.is_grad_enabled()):
            return
        if self.on_forward is not None:
            self.on_forward()
        self._count_forward(batch_size((args, kwargs)))

    def _count_forward(self, batch: int) -> None:
        # Inside a backward this is a recomputed forward (activation checkpointing),
        # while gradients are still arriving.
        if backward_id() == -1:
            self._drop_if_cleared()
        self._forward += 1
        self._learned = False
        self._loss_scale = None
        self._batch = batch

    def _drop_if_cleared(self) -> None:
        """Forget a step that was skipped (an AMP overflow, say).

        The statistics live as long as the gradients they belong to.
        """
        if not self._sentinel.is_cleared():
            return
        coming = None if self._terms_used else self._terms
        whole = coming is not None and self._captured.step_terms is not None
        self.take()
        self._terms = coming
        self._captured.step_terms = coming if whole else None
        if self.on_abandon is not None:
            self.on_abandon()

    def _after_forward(
        self,
        block: Block,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> None:
        if not (self._model.training and torch.is_grad_enabled()):
            return
        if not (isinstance(output, Tensor) and output.requires_grad):
            return
        if self._learned and backward_id() == -1:  # called without the model's forward
            self._count_forward(0)
        specs = block.spec.statistics
        want = tuple(s.kind for s in specs if s.name in self.due)
        if not want or not block.is_trained:
            self._expect_terms(block, output)
            return
        x: Tensor = next(iter((*args, *kwargs.values()))).detach()
        assert block.kind is not None
        block.require_bias()
        rows, scale = self._rows(block, module, x, output)
        with self._estimating(block, want[0], x.device.type):
            observed = block.kind.observe(module, x[rows], output, want)
            observed.stand_for(scale)
        call = Call(
            block=block,
            module=module,
            want=want,
            forward=self._forward,
            terms=self._loss_terms(block, output),
            rows=rows,
            scale=scale,
            observed=observed,
            # autograd keeps a layer's input for the gradient of its weight anyway
            inputs=x[rows] if "S" in want else None,
        )
        output.register_hook(partial(self._after_backward, call))

    def _rows(
        self, block: Block, module: nn.Module, x: Tensor, output: Tensor
    ) -> tuple[Rows, float]:
        """Every k-th example from a random start: a view, and each equally likely."""
        assert block.kind is not None
        whole = ..., 1.0
        alike = x.dim() > 0 and output.dim() > 0 and len(x) == len(output)
        vectors = block.kind.vectors(module, output) if alike else 0
        if not vectors:
            return whole
        everyone = len(x) * self._world
        stride = self._subsample or block.spec.enough_stride(everyone, vectors)
        stride = min(stride, len(x))
        if stride <= 1:
            return whole
        # From step and micro-batch alone: alike on all ranks and after a restart.
        before = max(map(len, self._captured.terms.values()), default=0)
        start = random.Random(f"{self.step}/{before}").randrange(stride)
        return slice(start, None, stride), len(x) / len(range(start, len(x), stride))

    def _expect_terms(self, block: Block, output: Tensor) -> None:
        """Count a micro-batch in which, so far, no layer with a due statistic ran."""
        if not self.due or self._loss == "tokens" or self._expected == self._forward:
            return
        self._expected = forward = self._forward
        terms = self._loss_terms(block, output)

        def count(_: Tensor) -> None:
            if self._counts(block):
                self._begin_backward()
                known = self._captured.terms.setdefault("", {})
                known.setdefault(forward, self._terms or terms)

        output.register_hook(count)

    def _counts(self, block: Block) -> bool:
        """Whether the backward that runs now is one to learn from."""
        if self._sampling != self._sampled or torch.is_grad_enabled():
            return False
        if self._sampling or not block.is_trained:
            return True
        return accumulates(block.parameters[0])

    def _begin_backward(self) -> None:
        """Gradients may have been cleared after the forward as well."""
        self._learned = True
        if self._backward != backward_id():
            self._backward = backward_id()
            self._drop_if_cleared()

    def _loss_terms(self, block: Block, output: Tensor) -> int:
        if self._loss == "tokens":
            return output.numel() // _features(block)
        return self._batch or len(output)

    def _after_backward(self, call: Call, g: Tensor) -> None:
        if call.done or not self._counts(call.block):
            return
        self._begin_backward()
        assert call.block.kind is not None
        with self._estimating(call.block, call.want[-1], g.device.type):
            moments = call.block.kind.gradient_moments(
                call.module, g.detach()[call.rows], call.observed.kept, call.want
            )
            moments |= self._scale_moment(call, g)
            self._scale(moments, call)
            self._add(call, call.observed.moments | moments)
        # The graph may outlive the backward (a loss that is kept for logging).
        call.observed, call.inputs, call.done = Observed(), None, True

    def _scale_moment(self, call: Call, g: Tensor) -> dict[str, Tensor]:
        """S, in steps that estimate it and when there are bases to have it in."""
        bases = self.bases(call.block) if call.inputs is not None else None
        if bases is None or call.inputs is None or call.block.kind is None:
            return {}
        inputs, outputs = call.inputs, g.detach()[call.rows]
        moment = call.block.kind.scale_moment(call.module, inputs, outputs, *bases)
        return {"S": moment}

    @contextmanager
    def _estimating(self, block: Block, kind: str, device: str) -> Generator[None]:
        """In full precision; a forward's time is A's, a backward's G's."""
        with (
            self.meter("estimate", f"{block.name}/{kind}"),
            torch.no_grad(),
            torch.autocast(device, enabled=False),
        ):
            yield

    def _scale(self, moments: dict[str, Tensor], call: Call) -> None:
        if not moments:
            return  # and ask no scaler, which is a synchronisation
        terms = self._terms or call.terms
        factor = call.scale * (1.0 if self._loss == "sum" else float(terms) ** 2)
        scaler = None if self._sampled else self._scaler
        if scaler is not None and scaler.is_enabled():
            if self._loss_scale is None:  # a synchronisation: once a backward
                self._loss_scale = float(scaler.get_scale())
            factor /= self._loss_scale**2
        for moment in moments.values():
            moment.mul_(factor)

    def _add(self, call: Call, moments: dict[str, Tensor]) -> None:
        into = self._captured
        per = call.block.name if self._loss == "tokens" else ""
        into.terms.setdefault(per, {})[call.forward] = self._terms or call.terms
        self._terms_used = True
        if not self._sentinel.is_set:
            self._sentinel.watch(call.block.parameters[0])
        for kind, moment in moments.items():
            name = f"{call.block.name}/{kind}"
            self.fired.add(name)
            if name in into.sums:
                into.sums[name].add_(moment)
            else:
                into.sums[name] = moment
            if kind in POSITION_KINDS:
                seen = into.positions.get(name, 0)
                into.positions[name] = seen + call.observed.positions
            into.calls[name] = into.calls.get(name, 0) + 1
            if self.on_growth is not None:
                self.on_growth(name)


def _features(block: Block) -> int:
    """How many numbers a layer puts out at each position."""
    if block.is_norm:
        return block.parameters[0].numel()
    return block.spec.stack * block.spec.rows
