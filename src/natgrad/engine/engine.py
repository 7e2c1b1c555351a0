"""The protocol of a step: `Engine.run` is its order, for every optimizer."""

import warnings
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from natgrad.capture.forwards import Captured, Sums, packed
from natgrad.capture.sampling import drawn_backward, sampled_loss
from natgrad.capture.sink import Armed
from natgrad.diagnostics.timer import metered
from natgrad.distributed.communicator import (
    CommError,
)
from natgrad.engine.agreement import Verdict, gradient_norm, reach_verdict
from natgrad.engine.machinery import Machinery
from natgrad.engine.step import Directions, Update, Updates
from natgrad.factors.averages import Refreshed
from natgrad.factors.growths import growths
from natgrad.layers.block import Block, statistics_like
from natgrad.layers.registration import warn_silent
from natgrad.layers.unwrap import inside_ddp
from natgrad.math.shards import local
from natgrad.rules.lengths import Length, Sight


class Engine(Machinery):
    """Takes steps, each of them `run`, by the stages below it."""

    def run(self, update: Update) -> bool:
        """One step; False if it was skipped, because a gradient is not finite.

        What an optimizer does with gradients before the rules, and with updates after
        them, is its `Update`; all else is the same for every optimizer.
        """
        with self.attempt():
            overflow = update.begin()
            captured, sums = self.reduce_statistics()
            gradients = self.reduce_gradients(update)
            verdict = self.agree(captured, sums, gradients, overflow)
            if not verdict.finite:
                self.skip_step(overflow=update.skipped(overflow))
                return False
            gradients = verdict.among(gradients)
            waiting = self.waiting()
            moving = {n: g for n, g in gradients.items() if n not in waiting}
            given = update.directions(moving)
            updates = self.precondition(given, late=True)
            self.refresh(sums.packed, verdict, gradients)
            self.references.begin(self.blocks, self.like)
            updates |= self.precondition(given)
            updates, clips = self.measured(updates, given, update)
            present = verdict.present - waiting
            update.write(Updates(updates, clips, present, waiting))
            self.end(captured)
        return True

    @contextmanager
    def attempt(self) -> Generator[None]:
        """A step. However it ends, capture is armed for the next one.

        Unless ranks have lost each other: no step can begin any more.
        """
        if self.closed:
            raise RuntimeError("This optimizer was closed: make a new one to go on.")
        # not rounded as a forward's products may be
        exact = torch.autocast(self.like.device.type, enabled=False)
        try:
            with self.meter("step"), exact:
                self.follow_model()
                for block in self.blocks:
                    block.require_same()
                yield
        except BaseException as error:
            if not isinstance(error, CommError) and self.comm.fail(error):
                self.restart()
            raise
        self.arm()

    def arm(self) -> None:
        """Tell capture what the coming step estimates, in which bases, and sends."""
        due = self.statistics.to_capture()
        bases = self.preconditioner.bases_for_capture()
        self.capture.arm(
            Armed(
                step=self.statistics.step,
                due=tuple(due),
                bases=bases,
                sink=self._outbox,
            )
        )
        if self._outbox is not None:
            self._outbox.open(due, self.calls)

    @metered("reduce")
    def reduce_statistics(self) -> tuple[Captured, Sums]:
        """What was captured, and sums over all ranks of what this rank owns."""
        due = self.capture.armed.due
        if self.auto is not None:
            self.auto.stop(due=bool(due))
        captured = self.capture.take()
        self.calls |= captured.calls
        if self._outbox is None:
            return captured, packed(captured, due, self.like)
        return captured, self._outbox.finish(captured)

    @metered("gradients")
    def reduce_gradients(self, update: Update) -> dict[str, Tensor]:
        """Mean gradients ``(s, m, n)`` of the blocks that this rank works on."""
        if self.shards is not None:
            return self.shards.collect(update.local_gradients)
        if self._outbox is None or self._outbox.gradients is None:
            rank, workers = self.comm.rank, self.plan.workers
            mine = [b for b in self.blocks if rank in workers[b.name]]
            local = {b.name: b.gradient() for b in mine}
            return {name: g for name, g in local.items() if g is not None}
        means = self._outbox.gradients.finish()
        return {
            name: flat.div_(self.comm.world).reshape(self.block[name].shape)
            for name, flat in means.items()
        }

    def gradients_of(self, name: str) -> list[Tensor] | None:
        """The ``.grad`` of a block's parameters, if those are the means to go by."""
        block = self.block[name]
        if self.own_gradients or self.sharded or block.is_foreign:
            return None
        found = [p.grad for p in block.parameters if p.grad is not None]
        plain = all(g.dtype == self.like.dtype and not g.is_sparse for g in found)
        return found if plain and len(found) == len(block.parameters) else None

    def agree(
        self,
        captured: Captured,
        sums: Sums,
        gradients: dict[str, Tensor],
        overflow: Tensor | None,
    ) -> Verdict:
        """What is equal on all ranks. See Note [One decision on all ranks]."""
        held = {b.name: b.has_gradient for b in self.blocks}
        means = [*gradients.values()] if self.own_gradients else []
        step, alone = self.statistics.step, self.comm.world == 1
        verdict = reach_verdict(
            self.comm,
            norm=gradient_norm(self.blocks, means, self.like, overflow),
            blocks=held,
            traces=sums.traces,
            captured=captured,
            digests=() if alone else self._replicas.digests(step, self.comm),
            facts=self.statistics.facts(),
            counted=self.statistics.counted(),
        )
        if not alone:
            ddp = not self.own_gradients
            self._replicas.require(step, verdict, held if ddp else None, self.comm)
        return verdict

    @metered("refresh")
    def refresh(
        self,
        sums: dict[str, Tensor],
        verdict: Verdict,
        gradients: dict[str, Tensor],
    ) -> None:
        """Averages and inverses of what is due, on owners and workers."""
        old = self.preconditioner.bases()
        self.statistics.refresh(sums, verdict, gradients)
        self.preconditioner.follow(old)

    def waiting(self) -> frozenset[str]:
        """Names of the blocks whose rule has no factors of earlier steps to use."""
        states = self.statistics.states
        late = [b for b in self.blocks if b.rule.late and b.kind is not None]
        return frozenset(
            b.name
            for b in late
            if not all(states[s.name].timing.inverted for s in b.spec.statistics)
        )

    def precondition(
        self, given: Directions, *, late: bool = False
    ) -> dict[str, Tensor]:
        """What the rules make of the directions: those that come late, or the others.

        A late one is applied before the refresh, with the factors of earlier steps.
        """
        blocks = [self.block[name] for name in given.directions]
        blocks = [b for b in blocks if b.rule.late == late]
        updates = self.preconditioner(
            blocks, given.directions, given.gradients, given.newest
        )
        if self.probe is not None:
            self.probe.note(given.directions, updates)
        return updates

    def measured(
        self, updates: dict[str, Tensor], given: Directions, update: Update
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Updates at their lengths, and factors that some are still to be clipped by.

        All ranks see the lengths in one order, whatever they work on.
        """
        rank, workers = self.comm.rank, self.plan.workers
        seen = self.statistics, self.preconditioner
        found: dict[str, Tensor] = {}
        clips: dict[str, Tensor] = {}
        for length, names in self._by_length.items():
            mine = {name: u for name, u in updates.items() if name in names}
            sight = Sight(
                blocks=self.block,
                directions=given.directions,
                gradients=given.gradients,
                like=self.like,
                lr=update.learning_rate(names),
                # several ranks may work on a block: the first counts it
                first=frozenset(name for name in mine if workers[name][0] == rank),
                total=self._total,
                noise=given.noise,
                growth=partial(growths, *seen, given.directions),
                references=self.references,
                whole=self._whole,
            )
            mine = length.scaled(mine, sight)
            clip = length.clip(mine, sight)
            found |= mine
            if clip is not None:
                layers = [name for name in names if self.block[name].kind is not None]
                clips |= dict.fromkeys(layers, clip)
        return {n: found[n] for n in given.directions if n in found}, clips

    @cached_property
    def _by_length(self) -> dict[Length, dict[str, None]]:
        """Names of blocks by their length, in the blocks' order."""
        found: dict[Length, dict[str, None]] = {}
        for name, parts in self.parts.items():
            found.setdefault(parts.length, {})[name] = None
        return found

    def _total(self, x: Tensor) -> Tensor:
        """The sum over all ranks."""
        return x if self.comm.world == 1 else self.comm.agree(x)

    def clipped(self, found: Updates) -> dict[str, Tensor]:
        """Updates, each times its factor."""
        clips = found.clips
        return {n: u * clips[n] if n in clips else u for n, u in found.updates.items()}

    def _whole(self, names: Sequence[str], norms: Tensor) -> Tensor:
        """Norms of whole tensors. See `Sight.whole`."""
        cut = [i for i, name in enumerate(names) if self.block[name].is_cut]
        if self.comm.world == 1 or not cut:
            return norms
        parts = norms[:, cut]
        copies = parts.new_tensor([self.block[names[i]].spec.copies for i in cut])
        squares = (parts.double().square() / copies).flatten()
        found = self.comm.agree(squares).sqrt().to(norms)
        return norms.index_copy(1, norms.new_tensor(cut).long(), found.view_as(parts))

    def share(
        self, values: dict[str, Tensor], present: frozenset[str]
    ) -> dict[str, Tensor]:
        """The tensors (updates or weights) that other ranks work on, ``(s, m, n)``.

        Sent in half precision, this rank's own come back too, rounded as others see
        them, so that all ranks go on with the same numbers.
        """
        if self.comm.world == 1:
            return {}
        names = [b.name for b in self.blocks if b.name in present]
        like = self.like
        flight = self.comm.begin("share_updates", names, like.dtype, like.device)
        for name in (n for n in names if n in values):
            flight.put(name, values[name].flatten())
        return {
            name: flat.reshape(self.block[name].shape)
            for name, flat in flight.finish().items()
        }

    def weights_before(self, mine: list[Block]) -> dict[int, Tensor] | None:
        """The weights that this rank will change, if only changes are to be shared."""
        comm, dtype = self.comm, self.like.dtype
        wire = comm.options.wire_dtype
        if comm.world == 1 or wire("share_updates", dtype) == dtype:
            return None
        ours = [b for b in mine if not b.is_foreign]
        return {id(p): p.clone() for b in ours for p in b.parameters}

    def share_weights(
        self,
        mine: list[Block],
        updates: dict[str, Tensor],
        present: frozenset[str],
        before: dict[int, Tensor] | None,
    ) -> None:
        """Stage 5: every rank gets the weights that another rank has updated.

        In half precision their changes instead, which all ranks add, rounded equally: a
        rounded weight would swallow the changes that are smaller than its last bit.
        Of parameters that another optimizer has, the mean gradient.
        """
        if self.comm.world == 1:
            return
        shared = dict(updates)
        for b in mine:
            if not b.is_foreign:
                shared[b.name] = b.fold(list(b.parameters))
            if not b.is_foreign and before is not None:
                old = b.fold([before[id(p)] for p in b.parameters])
                shared[b.name] = shared[b.name] - old
        foreign = {n: u for n, u in updates.items() if self.block[n].is_foreign}
        for name, stack in (foreign | self.share(shared, present)).items():
            block = self.block[name]
            if block.is_foreign:
                if self.own_gradients:
                    block.write_gradient(stack)
                continue
            for p, x in zip(block.parameters, block.unfold(stack), strict=True):
                p.copy_(x if before is None else before.get(id(p), p) + x)

    def end(self, captured: Captured) -> None:
        """Count the step."""
        if self.statistics.step == 0:
            warn_silent(self.blocks, set(captured.calls), self.options)
        if self.probe is not None:
            self.probe.finish()
        if self.comm.rank == 0 or self.shards is not None:
            step, loud = self.statistics.step, self.comm.rank == 0
            self.references.watch(step, self.blocks, self.like, warn=loud)
        self.preconditioner.stacks.forget()
        self.statistics.step += 1
        if self.comm.world > 1:
            self.comm.end_step()
        if self.gathered:
            self._release()
        if self._planning.measures:
            self._replan()

    def skip_step(self, *, overflow: bool = False) -> None:
        """Leave everything as it was: a gradient is not finite on some rank."""
        self.skipped_steps += not overflow
        self.statistics.last = Refreshed()
        if self.comm.rank == 0 and not overflow:
            warnings.warn(
                f"Step {self.statistics.step} is skipped: a gradient is not finite "
                f"({self.skipped_steps} skipped so far).",
                stacklevel=4,
            )
        for p in (p for b in self.blocks if not b.is_foreign for p in b.parameters):
            p.grad = None

    def only_initialises(self, groups: Iterable[Mapping[str, Any]]) -> bool:
        """Whether a step is torch's way of making an optimizer fill its state.

        That is zero gradients at a zero learning rate, without a forward or backward,
        on any rank at any time: there is nothing to do, and nobody to wait for.
        """
        if any(float(group["lr"]) != 0.0 for group in groups):
            return False
        if self.capture.current.calls or self.capture.current.batches:
            return False
        grads = [p.grad for b in self.blocks for p in b.parameters if p.requires_grad]
        return all(g is not None and not local(g).any() for g in grads)

    def before_forward(self) -> None:
        """Follow the model; leave gradients to DDP if it was wrapped since."""
        self.follow_model()
        wrapped = self._may_be_wrapped and inside_ddp(self.model)
        self._may_be_wrapped = False
        if wrapped:
            self.own_gradients = False
            self._follow(self._planning.plan_for_ddp())

    def follow_model(self) -> None:
        """Go on with the dtype and device that the parameters have now."""
        like, old = statistics_like(self.blocks), self.like
        same = (like.dtype, like.device) == (old.dtype, old.device)
        if not self.closed and not same:
            self.convert(like)

    def sampled_backward(
        self, outputs: Tensor, likelihood: str, targets: Tensor | None
    ) -> None:
        """Backward of labels drawn from the model; gradients stay as they are."""
        if self.options.fisher != "sampled":
            raise RuntimeError(
                "sampled_backward needs fisher='sampled'; this one was made with "
                f"fisher={self.options.fisher!r}."
            )
        loss = sampled_loss(outputs, likelihood, targets, self.options.loss)
        if self.capture.armed.due:
            drawn_backward(self.capture, self.blocks, [loss])
