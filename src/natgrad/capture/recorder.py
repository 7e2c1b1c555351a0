"""Hooks that turn a forward and a backward into raw statistics, for what is due.

Note [One call of a layer]
A forward hook makes the moments of the layer's input at once and puts a *tensor hook*
on its output; the tensor hook makes the moments of the gradient and only then adds both
to the step's sums. So a forward that is never followed by its backward (evaluation, a
forward under no_grad, the recomputed forward of activation checkpointing) counts for
nothing, and no activation outlives the graph. A second backward through a graph that
was retained counts for nothing either, nor does one that makes a graph of its own
(create_graph=True, in a gradient penalty), nor one that makes no gradient of the
layer's weight (an adversary asks for that of the inputs). A tensor hook, unlike a
module's backward hook, also works before an in-place ReLU.

Note [By name]
`torch.autograd.grad` of parameters is either a probe beside the loss or what the step
will use, put into ``.grad`` by hand. What it shows is kept aside: it counts if the step
has no other backward, and else it was a probe. Where that is wrong, `ignore` says so.

Note [Scaling]
With N the terms that the loss averages over, the gradient of one term is ghat = N g.
So the sum of ghat ghat^T is N^2 times the sum of g g^T, and G is that over the number
of examples. N is that of the micro-batch (Note [Terms] in `forwards`); it is multiplied
by k when the losses of k micro-batches were each divided by k. If N is given for the
whole step, there is no k. An AMP loss scale S is divided out. Sampled labels have none.
"""

import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.capture.forwards import (
    POSITION_KINDS,
    Call,
    Captured,
    Forward,
    Forwards,
    Leaf,
    MicroBatch,
    Use,
)
from natgrad.capture.hooks import Hooks, Sentinel, accumulates, backward_id, leaf_of
from natgrad.capture.peers import ALONE, Peers
from natgrad.capture.sink import INPUTS, Armed
from natgrad.diagnostics.timer import Meter
from natgrad.layers import Block, Observed
from natgrad.math.precision import rescaled, rounded
from natgrad.math.shards import local, whole
from natgrad.math.statistics import Rows, widen
from natgrad.requiring import require_count


class Capture:
    """The hooks on a model's blocks and the sums they have made since `take`.

    Attributes:
        armed: what it looks for.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: list[Block],
        *,
        loss: str,
        sampled: bool,
        subsample: int | None,
        world: int,
        peers: Peers = ALONE,
        precision: torch.dtype | None = None,
        grad_scaler: torch.amp.GradScaler | None,
        meter: Meter,
        before_forward: Callable[[], None],
    ) -> None:
        self.armed, self._due = Armed(), frozenset[str]()
        self._needs_terms = False
        self._before_forward = before_forward
        self._model = model
        self._loss, self._sampled, self._precision = loss, sampled, precision
        self._subsample, self._world = subsample, world // peers.count
        self._peers = peers
        turns = [b.name for i, b in enumerate(blocks) if peers.has_turn(i)]
        self._turns = frozenset(turns)
        self._sampling = False
        self._scaler = grad_scaler
        self._loss_scale: float | None = None
        self._forwards = Forwards(tokens=loss == "tokens")
        self._backward = -1
        self._learned, self._ignores = True, False
        self._terms: int | None = None
        self._terms_used = False
        self._sentinel = Sentinel()
        self._captured, self._asked = Captured(), Captured()
        self.meter = meter
        calls = self._begin_forward, self._after_model, self._after_forward
        self._hooks = Hooks(model, blocks, *calls)
        weakref.finalize(self, self._hooks.close).atexit = False

    def arm(self, armed: Armed) -> None:
        """Look for this from the next forward on."""
        self.armed, self._due = armed, frozenset(armed.due)
        kinds = {name.rpartition("/")[2] for name in armed.due}
        self._needs_terms = not kinds.issubset(POSITION_KINDS)
        self._hooks.watch(bool(armed.due))

    @property
    def current(self) -> Captured:
        """What was captured so far in this step."""
        return self._captured

    def take(self) -> Captured:
        """What was captured since the last `take`. See Note [By name]."""
        learned, asked = self._captured, self._asked
        self._captured, self._asked = Captured(), Captured()
        self._sentinel.watch(None)
        self._terms = None
        if learned.batches or not asked.batches:
            return learned
        asked.step_terms = learned.step_terms
        return asked

    def set_loss_terms(self, terms: int, whole_step: bool = False) -> None:
        """Say how many terms the coming loss averages over, or all of the step's."""
        require_count("terms", terms)
        if whole_step and self._captured.batches:
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

    @contextmanager
    def ignoring(self) -> Generator[None]:
        """While open, neither forwards nor backwards count."""
        before, self._ignores = self._ignores, True
        try:
            yield
        finally:
            self._ignores = before

    def close(self) -> None:
        """Remove every hook."""
        self._hooks.close()
        self.take()

    @property
    def _listens(self) -> bool:
        """Whether a forward that runs now may be one to learn from."""
        return self._model.training and torch.is_grad_enabled() and not self._ignores

    def _begin_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._listens:
            return
        self._before_forward()
        self._count_forward().call(args, kwargs)

    def _count_forward(self) -> Forward:
        # Inside a backward this is a recomputed forward (activation checkpointing),
        # while gradients are still arriving.
        if backward_id() == -1:
            self._drop_if_cleared()
        self._learned = False
        self._loss_scale = None
        return self._forwards.begin()

    def _after_model(self, output: Any) -> None:
        if self._listens:
            self._forwards.current.returns(output)
            if self.armed.sink is not None and backward_id() == -1:
                self.armed.sink.forward_ended()

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
        if self.armed.sink is not None:
            self.armed.sink.abandon()

    def _after_forward(
        self,
        block: Block,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> None:
        if not self._listens:
            return
        if not (isinstance(output, Tensor) and output.requires_grad):
            return
        given = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        if not given:
            return
        if self._learned and backward_id() == -1:  # called without the model's forward
            self._count_forward()
        forward = self._forwards.current
        forward.passes(block, module, output)
        leaf = leaf_of(block, module)
        want = tuple(s.kind for s in block.spec.statistics if s.name in self._due)
        if not want or not block.is_trained or block.bias_has_changed:
            self._expect_backward(forward, block, leaf, output)
            return
        assert block.kind is not None
        x, *others = (a.detach() for a in given)
        rows, scale = self._rows(block, module, x, output)
        sink = self.armed.sink
        some = sink is None or output.numel() > 0  # of an empty batch nothing is sent
        mine = some and block.name in self._turns
        apart = some and block.is_apart(module, x)
        with self._estimating(block, want[0], x.device.type):
            observed, x = Observed(), x if apart else whole(x)
            x = rounded(x[rows], self._precision)
            if output.numel() and (mine or apart):
                seen, y = (x, *others), local(output)
                observed = block.kind.observe_call(module, seen, y, want)
                observed.stand_for(scale)
                observed.positions *= mine
        call = Call(
            block=block,
            module=module,
            leaf=leaf,
            want=want,
            forward=forward,
            token=forward.token(),
            rows=rows,
            scale=scale,
            observed=observed,
            is_mine=mine,
            is_apart=apart,
            # autograd keeps a layer's input for the gradient of its weight anyway
            inputs=x if "S" in want else None,
        )
        if sink is not None and backward_id() == -1:  # else a backward recomputes it
            call.offer_inputs(sink)
        output.register_hook(partial(self._after_backward, call))

    def _rows(
        self, block: Block, module: nn.Module, x: Tensor, output: Tensor
    ) -> tuple[Rows, float]:
        # From step and micro-batch alone: the same on all ranks and after a restart.
        before = f"{self.armed.step}/{len(self._captured.batches)}"
        some, world = self._subsample, self._world
        return block.some_rows(module, x, output, some, world, before)

    def _expect_backward(
        self, forward: Forward, block: Block, leaf: Leaf, output: Tensor
    ) -> None:
        """Count a micro-batch in which, so far, no layer with a due statistic ran."""
        if not self._due or forward.is_expected:
            return
        forward.is_expected = True

        def count(token: object, _: Tensor) -> None:
            if (use := self._use(block, leaf, forward)) is not None:
                self._learn(forward, use)

        output.register_hook(partial(count, forward.token()))

    def _use(self, block: Block, leaf: Leaf, forward: Forward) -> Use | None:
        """Whether the backward that runs now counts, at this layer."""
        use = self._counts(block, leaf)
        # a backward that makes a graph is a part of the loss to come
        forward.is_aside |= use != "learned" and not torch.is_grad_enabled()
        return use

    def _counts(self, block: Block, leaf: Leaf) -> Use | None:
        if self._sampling != self._sampled or torch.is_grad_enabled() or self._ignores:
            return None
        if self._sampling or not block.is_trained:
            return "learned"
        kept = accumulates(leaf())
        return "asked" if kept is None else "learned" if kept else None

    def _learn(self, forward: Forward, use: Use) -> tuple[MicroBatch, Captured]:
        """Count the micro-batch whose backward runs now; where its sums go."""
        self._begin_backward()
        if use == "asked":
            batch = self._forwards.asked(forward, self._terms, self._backward)
            into = self._asked
        else:
            batch = self._forwards.learned(forward, self._terms, self._backward)
            into, self._terms_used = self._captured, True
        if self._needs_terms:
            batch.settle()
        into.learn(batch)
        return batch, into

    def _begin_backward(self) -> None:
        """Gradients may have been cleared after the forward as well."""
        self._learned = True
        if self._backward != backward_id():
            self._backward = backward_id()
            self._drop_if_cleared()
            self._sentinel.expect()

    def _after_backward(self, call: Call, g: Tensor) -> None:
        use = None if call.done else self._use(call.block, call.leaf, call.forward)
        if use is None or (use == "asked" and call.asked):
            return
        batch, into = self._learn(call.forward, use)
        assert call.block.kind is not None
        with self._estimating(call.block, call.want[-1], g.device.type):
            g = local(g) if call.want == (INPUTS,) else whole(g.detach())
            if not call.is_mine:
                self._leave_out(call, into)
                moments = dict[str, Tensor]()
            elif g.numel():
                g, times = rescaled(g.detach()[call.rows], self._precision)
                given = call.module, g, call.observed.kept, call.want
                moments = call.block.kind.gradient_moments(*given)
                moments |= self._scale_moment(call, g)
                # of no moments ask no scaler: that is a synchronisation
                times *= self._factor(call, batch) if moments else 1.0
                moments = {kind: x.mul_(times) for kind, x in moments.items()}
            else:
                moments = call.zeros(based=self._has_bases(call))
            self._add(call, moments, into)

    def _leave_out(self, call: Call, into: Captured) -> None:
        """Count what another rank makes. See Note [Peers]."""
        sink = self.armed.sink
        for name in call.theirs(based=self._has_bases(call)):
            into.note(name, Observed())
            if sink is not None and into is self._captured:
                sink.grown(name, into)

    def _has_bases(self, call: Call) -> bool:
        return call.inputs is not None and call.block.name in self.armed.bases

    def _scale_moment(self, call: Call, g: Tensor) -> dict[str, Tensor]:
        """S, in steps that estimate it and when there are bases to have it in."""
        bases = self.armed.bases.get(call.block.name)
        if bases is None or call.inputs is None or call.block.kind is None:
            return {}
        given = call.module, call.inputs, widen(g), *bases
        return {"S": call.block.kind.scale_moment(*given)}

    @contextmanager
    def _estimating(self, block: Block, kind: str, device: str) -> Generator[None]:
        """Outside of autocast; a forward's time is A's, a backward's G's."""
        with (
            self.meter("estimate", f"{block.name}/{kind}"),
            torch.no_grad(),
            torch.autocast(device, enabled=False),
        ):
            yield

    def _factor(self, call: Call, batch: MicroBatch) -> float:
        """See Note [Scaling]."""
        factor = call.scale * (1.0 if self._loss == "sum" else float(batch.terms) ** 2)
        factor *= self._peers.count
        scaler = None if self._sampled else self._scaler
        if scaler is not None and scaler.is_enabled():
            if self._loss_scale is None:  # a synchronisation: once a backward
                self._loss_scale = float(scaler.get_scale())
            return factor / self._loss_scale**2
        return factor

    def _add(self, call: Call, moments: dict[str, Tensor], into: Captured) -> None:
        observed, sent, sink = call.observed, call.sent, self.armed.sink
        if into is self._asked:  # the backward that counts may still come
            call.asked = True
            kept = {kind: x.clone() for kind, x in observed.moments.items()}
            if sent is not None:
                kept[INPUTS] = sent.whole(call.block)
        else:
            kept = observed.moments
            call.finish()
            if not self._sentinel.is_set:
                self._sentinel.watch(call.block.parameters[0])
            if sent is not None and sink is not None:
                into.note(call.inputs_name, observed)
                sink.counted(call.inputs_name, sent)
        for kind, all_ in (kept | moments).items():
            name, moment = f"{call.block.name}/{kind}", call.block.in_parts(kind, all_)
            into.add(name, moment, observed)
            if sink is not None and into is self._captured:
                sink.grown(name, into)
