"""The protocol of a step: `Engine.run` is its order, for every optimizer."""

import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from natgrad.capture.captured import Captured
from natgrad.capture.hooks import require_unwatched
from natgrad.capture.recorder import Capture
from natgrad.capture.sampling import differentiate, sampled_loss
from natgrad.capture.unwrap import inside_ddp, unwrap
from natgrad.checkpoint.gather import gather, part_of, release, warn_partial
from natgrad.checkpoint.state_dict import load, save
from natgrad.checkpoint.validate import require_state
from natgrad.diagnostics.probe import Probe
from natgrad.diagnostics.timer import Meter, metered
from natgrad.distributed.communicator import (
    CommError,
    Communicator,
    world_of,
)
from natgrad.distributed.overlap import Outbox
from natgrad.distributed.replicate import make_alike
from natgrad.engine.agreement import Verdict, gradient_norm, reach_verdict
from natgrad.engine.planning import Planning
from natgrad.engine.replicas import Replicas
from natgrad.engine.step import Directions, Update, Updates
from natgrad.factors.statistics import Refreshed, Statistics
from natgrad.layers.registration import (
    Groups,
    parts_for,
    register,
    shape_of,
    statistics_like,
    warn_silent,
)
from natgrad.options import Options
from natgrad.plan import Plan
from natgrad.rules.lengths import Length, Sight
from natgrad.rules.preconditioner import Preconditioner


class Engine:
    """Blocks, plan, hooks, statistics and communication for one model.

    ``groups`` has the parts of the update by the ids of the parameters to train, if
    they are not all the same; ``optimizer`` the parameter groups.
    ``agrees_on_overflow``: see Note [Agreed overflow].

    A step is `run`.
    """

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        *,
        grad_scaler: torch.amp.GradScaler | None,
        groups: Groups | None = None,
        optimizer: Optimizer | None = None,
        agrees_on_overflow: bool = False,
    ) -> None:
        self.options = options
        group = options.group
        self.skipped_steps = 0
        self.closed = False
        self.gathered = self._warned = False
        self.probe: Probe | None = None
        self._reduced: list[Tensor] = []
        self.before_replan: list[Callable[[], None]] = []
        self.model, ddp = unwrap(model)
        self.blocks = register(self.model, options, groups)
        require_unwatched(self.blocks)
        self.block = {b.name: b for b in self.blocks}
        self.parts = {b.name: parts_for(b, options, groups) for b in self.blocks}
        self.like = statistics_like(self.blocks)
        updates = list(dict.fromkeys(self.parts.values()))
        self._replicas = Replicas(self.model, options, updates, optimizer)
        self._planning = Planning(
            self.model,
            self.blocks,
            options,
            ddp=ddp,
            device=self.like.device,
        )
        self.auto = self._planning.auto
        self.own_gradients = not ddp and world_of(group) > 1
        self._scaled = grad_scaler is not None and grad_scaler.is_enabled()
        if self.own_gradients and self._scaled and not agrees_on_overflow:
            raise ValueError(
                "A GradScaler skips steps on one rank alone unless gradients are "
                "averaged before it looks: wrap the model in DistributedDataParallel."
            )
        self.plan = self._planning.plan()
        self.comm = self._connect(self.plan)
        if self.own_gradients:
            make_alike(self.model, self.comm)
        self.meter = Meter(self.like.device)
        self.statistics = Statistics(
            self.blocks,
            options,
            self.parts,
            plan=self.plan,
            comm=self.comm,
            like=self.like,
            meter=self.meter,
        )
        self.statistics.seconds = {} if self._planning.measures else None
        self.preconditioner = Preconditioner(self.statistics)
        self.moments = self.preconditioner.moments
        self.capture = Capture(
            self.model,
            self.blocks,
            loss=options.loss,
            sampled=options.fisher == "sampled",
            subsample=options.subsample,
            world=self.comm.world,
            grad_scaler=grad_scaler,
            meter=self.meter,
        )
        self.capture.bases = self.preconditioner.bases_for_capture
        self._outbox = self._open_outbox()
        self.capture.on_growth = lambda name: self._outbox.sums.grown(
            name, self.capture.current
        )
        self.capture.on_abandon = lambda: self._outbox.abandon()
        self.begin()

    def _connect(self, plan: Plan) -> Communicator:
        options, same = self.options, self._replicas.fingerprint()
        return Communicator(plan, options.comm, options.group, fingerprint=same)

    def _open_outbox(self) -> Outbox:
        blocks = self.blocks if self.own_gradients else None
        # a scaler writes to gradients after the backward: what left early would be void
        return Outbox(self.comm, self.like, blocks, early=not self._scaled)

    @property
    def step(self) -> int:
        """Steps done so far."""
        return self.statistics.step

    # -- the step, in order -----------------------------------------------------------

    def run(self, update: Update) -> bool:
        """One step; False if it was skipped, because a gradient is not finite.

        What an optimizer does with gradients before the rules, and with updates after
        them, is its `Update`; all else is the same for every optimizer.
        """
        with self.attempt():
            overflow = update.begin()
            captured, sums = self.reduce_statistics()
            gradients = self.reduce_gradients()
            verdict = self.agree(captured, overflow)
            if not verdict.finite:
                self.skip_step(overflow=update.skipped(overflow))
                return False
            gradients = verdict.among(gradients)
            self.refresh(sums, verdict, gradients)
            given = update.directions(gradients)
            updates = self.precondition(given)
            updates, clips = self.measured(updates, given, update)
            update.write(Updates(updates, clips, verdict.present))
            self.end()
        return True

    def begin(self) -> None:
        """Tell the hooks what the coming step estimates and sends."""
        due = self.statistics.to_capture()
        self.capture.due = frozenset(due)
        self.capture.step = self.step
        self._outbox.open(due)

    def _begin_again(self) -> None:
        """After a step that has failed, on all ranks: what of it was sent is void."""
        if self.comm.world > 1:
            self.capture.take()
            self._outbox.settle()
        self.begin()

    @metered("reduce")
    def reduce_statistics(self) -> tuple[Captured, dict[str, Tensor]]:
        """Packed sums over all ranks of the due statistics that this rank owns."""
        if self.auto is not None:
            self.auto.stop(due=bool(self.capture.due))
        captured = self.capture.take()
        return captured, self._outbox.sums.finish(captured)

    @metered("gradients")
    def reduce_gradients(self) -> dict[str, Tensor]:
        """Mean gradients ``(s, m, n)`` of the blocks that this rank works on."""
        self._reduced = []
        if self._outbox.gradients is None:
            rank, workers = self.comm.rank, self.plan.workers
            mine = [b for b in self.blocks if rank in workers[b.name]]
            local = {b.name: b.gradient() for b in mine}
            return {name: g for name, g in local.items() if g is not None}
        means = self._outbox.gradients.finish()
        self._reduced = list(means.values())
        return {
            name: flat.div_(self.comm.world).reshape(shape_of(self.block[name]))
            for name, flat in means.items()
        }

    def agree(self, captured: Captured, overflow: Tensor | None = None) -> Verdict:
        """What all ranks know alike. See Note [One decision on all ranks]."""
        held = {b.name: b.has_gradient for b in self.blocks}
        verdict = reach_verdict(
            self.comm,
            norm=gradient_norm(self.blocks, self._reduced, self.like, overflow),
            blocks=held,
            traces=self._outbox.sums.traces,
            captured=captured,
            digests=self._replicas.digests(self.step, self.comm),
            facts=self.statistics.facts(),
        )
        ddp = not self.own_gradients
        self._replicas.require(self.step, verdict, held if ddp else None, self.comm)
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

    def precondition(self, given: Directions) -> dict[str, Tensor]:
        """What the rules make of the directions."""
        blocks = [self.block[name] for name in given.directions]
        updates = self.preconditioner(blocks, given.directions, given.gradients)
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
        by_length: dict[Length, dict[str, None]] = {}
        for name, parts in self.parts.items():
            by_length.setdefault(parts.length, {})[name] = None
        found: dict[str, Tensor] = {}
        clips: dict[str, Tensor] = {}
        for length, names in by_length.items():
            mine = {name: u for name, u in updates.items() if name in names}
            sight = Sight(
                blocks=self.block,
                directions=given.directions,
                gradients=given.gradients,
                like=self.like,
                lr=update.learning_rate([*names]),
                # several ranks may work on a block: the first counts it
                first=frozenset(name for name in mine if workers[name][0] == rank),
                total=self.comm.agree,
            )
            mine = length.scaled(mine, sight)
            clip = length.clip(mine, sight)
            found |= mine
            if clip is not None:
                layers = [name for name in names if self.block[name].kind is not None]
                clips |= dict.fromkeys(layers, clip)
        return {name: found[name] for name in updates}, clips

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
            name: flat.reshape(shape_of(self.block[name]))
            for name, flat in flight.finish().items()
        }

    def end(self) -> None:
        """Count the step and tell the hooks what the next one estimates."""
        if self.step == 0:
            warn_silent(self.blocks, self.capture.fired, self.options)
        if self.probe is not None:
            self.probe.finish()
        self.statistics.step += 1
        self.comm.end_step()
        if self.gathered:
            self._release()
        if self._planning.measures:
            self._replan()
        self.begin()

    def skip_step(self, *, overflow: bool = False) -> None:
        """Leave everything as it was: a gradient is not finite on some rank."""
        self.skipped_steps += not overflow
        self.statistics.last = Refreshed()
        if self.comm.rank == 0 and not overflow:
            warnings.warn(
                f"Step {self.step} is skipped: a gradient is not finite "
                f"({self.skipped_steps} skipped so far).",
                stacklevel=4,
            )
        for block in self.blocks:
            for p in block.parameters:
                p.grad = None
        self.begin()

    # -- for users --------------------------------------------------------------------

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
        if self.capture.due:
            with self.meter("sampled"), self.capture.sampling():
                differentiate(loss, self.blocks)

    def gather(self) -> None:
        """Collective: put all statistics on every rank, until the next step."""
        states, is_eigen = self.statistics.states, self.statistics.is_eigen
        eigen = frozenset(name for name, s in states.items() if is_eigen(s))
        gather([*states.values()], self.plan, self.comm, self.like, eigen=eigen)
        self.moments.gather(self.blocks, self.plan, self.comm, self.like)
        self.gathered = True

    def _release(self) -> None:
        release([*self.statistics.states.values()], self.plan, self.comm.rank)
        self.moments.release(self.plan, self.comm.rank)
        self.gathered = False

    def _replan(self) -> None:
        """Once: give owners new statistics by the seconds that inversions took."""
        states, seconds = self.statistics.states, self.statistics.seconds or {}
        mine = self.like.new_tensor([seconds.get(name, 0.0) for name in states])
        total: list[float] = self.comm.agree(mine).tolist()
        if not any(total):
            return
        self.gather()
        for prepare in self.before_replan:
            prepare()
        self._follow(self._planning.plan_by(dict(zip(states, total, strict=True))))
        self._release()

    def _follow(self, plan: Plan) -> None:
        """Collective, between steps: go on under another plan."""
        self.plan, moved = plan, self.comm.moved
        self.comm.close()
        self.comm = self._connect(plan)
        self.comm.moved = moved
        self.statistics.plan, self.statistics.comm = plan, self.comm
        if not self._planning.measures:
            self.statistics.seconds = None
        self._outbox.close()
        self._outbox = self._open_outbox()

    def look_for_ddp(self) -> None:
        """Leave gradients to DDP if the model was wrapped after this was made."""
        self.capture.on_forward = None
        if not inside_ddp(self.model):
            return
        self.own_gradients = False
        self._follow(self._planning.plan_for_ddp())
        self.begin()

    def state_dict(self, *, warn: bool = True) -> dict[str, Any]:
        """Statistics, inverses and timing, as tensors and numbers.

        After `gather` all of them; else only this rank's part, and once a warning.
        """
        whole = self.gathered or self.comm.world == 1
        part = None if whole else part_of(self.plan, self.comm)
        if part and warn and self.step and not self._warned:
            self._warned = warn_partial(self.comm)
        seconds, calls = dict(self._planning.seconds), dict(self._outbox.sums.expected)
        return {**save(self), "part": part, "calls": calls, "seconds": seconds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`: a whole one, or this rank's part.

        A part whose owners were measured is collective, as they are taken over.
        """
        seconds = self._planning.saved_seconds(state, self.statistics.states)
        if self.step == 0 and seconds is not None:
            self._follow(self._planning.plan_by(seconds))
            self.begin()
        require_state(state, self, part_of(self.plan, self.comm))
        load(self, state)
        self._outbox.sums.expected = dict(state["calls"])
        self._release()
        self.capture.take()
        self.begin()

    def close(self) -> None:
        """Remove every hook and stop communicating."""
        self.capture.close()
        self.comm.close()
        if self.auto is not None:
            self.auto.close()
        self._outbox.close()
        self.closed = True

    @contextmanager
    def closing_on_error(self) -> Generator[None]:
        """Leave no hook behind if the rest of a constructor raises."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    @contextmanager
    def attempt(self) -> Generator[None]:
        """A step. What it raises leaves the next step able to begin."""
        self.require_open()
        # not rounded as a forward's products may be
        exact = torch.autocast(self.like.device.type, enabled=False)
        try:
            with self.meter("step"), exact:
                for block in self.blocks:
                    block.require_bias()
                yield
        except BaseException as error:
            if not isinstance(error, CommError) and self.comm.fail(error):
                self._begin_again()
            raise

    def require_open(self) -> None:
        """Raise if `close` was called."""
        if self.closed:
            raise RuntimeError("This optimizer was closed: make a new one to go on.")
