"""The parts of a step that `KFAC` and `SPNGD` share, in the order a step runs them."""

import warnings
from collections.abc import Callable, Generator, Mapping
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
from natgrad.checkpoint.state_dict import convert, load, save
from natgrad.checkpoint.validate import require_state
from natgrad.diagnostics.probe import Probe
from natgrad.diagnostics.timer import Meter, metered
from natgrad.distributed.communicator import (
    CommError,
    CommOptions,
    Communicator,
    world_of,
)
from natgrad.distributed.overlap import Outbox
from natgrad.distributed.replicate import make_alike
from natgrad.engine.agreement import Verdict, gradient_norm, reach_verdict
from natgrad.engine.auto import Profile
from natgrad.engine.planning import Planning
from natgrad.engine.replicas import Replicas
from natgrad.factors.statistics import Refreshed, Statistics
from natgrad.layers.registration import (
    register,
    shape_of,
    statistics_like,
    warn_silent,
)
from natgrad.options import Curvature
from natgrad.plan import Plan, Strategy
from natgrad.rules.preconditioner import Preconditioner


class Engine:
    """Blocks, plan, hooks, statistics and communication for one model.

    ``trained`` are the ids of the parameters to precondition, if not all. ``optimizer``
    has the parameter groups, ``rule`` what else decides its updates.
    A step is `reduce_statistics`, `reduce_gradients`, `agree`, `refresh`,
    `precondition`, `share`, `end`; or `skip_step` after `agree`.
    """

    def __init__(
        self,
        model: nn.Module,
        config: Curvature,
        *,
        strategy: str | Strategy,
        placement: str,
        comm: CommOptions,
        group: Any,
        grad_scaler: torch.amp.GradScaler | None,
        profile: Profile | None = None,
        trained: frozenset[int] | None = None,
        optimizer: Optimizer | None = None,
        rule: Mapping[str, Any] | None = None,
        agrees_on_overflow: bool = False,
    ) -> None:
        self.config = config
        self.skipped_steps = 0
        self.closed = False
        self.gathered = self._warned = False
        self.probe: Probe | None = None
        self._reduced: list[Tensor] = []
        self.before_replan: list[Callable[[], None]] = []
        self._comm_options, self._group = comm, group
        self.model, ddp = unwrap(model)
        self.blocks = register(self.model, config, trained)
        require_unwatched(self.blocks)
        self.block = {b.name: b for b in self.blocks}
        self.like = statistics_like(self.blocks)
        self._replicas = Replicas(self.model, config, optimizer, rule)
        self._planning = Planning(
            self.model,
            self.blocks,
            config,
            strategy=strategy,
            placement=placement,
            ddp=ddp,
            profile=profile,
            device=self.like.device,
            group=group,
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
            self.blocks, config, self.plan, self.comm, self.like, self.meter
        )
        self.statistics.seconds = {} if self._planning.measures else None
        self.preconditioner = Preconditioner(self.statistics)
        self.moments = self.preconditioner.moments
        self.capture = Capture(
            self.model,
            self.blocks,
            loss=config.loss,
            sampled=config.fisher == "sampled",
            subsample=config.subsample,
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
        self.capture.on_forward = self.follow_model
        self.begin()

    def _connect(self, plan: Plan) -> Communicator:
        same, options = self._replicas.fingerprint(), self._comm_options
        return Communicator(plan, options, self._group, fingerprint=same)

    def _open_outbox(self) -> Outbox:
        blocks = self.blocks if self.own_gradients else None
        # a scaler writes to gradients after the backward: what left early would be void
        return Outbox(self.comm, self.like, blocks, early=not self._scaled)

    @property
    def step(self) -> int:
        """Steps done so far."""
        return self.statistics.step

    # -- the step, in order -----------------------------------------------------------

    def begin(self) -> None:
        """Tell the hooks what the coming step estimates and sends."""
        due = [s.spec.name for s in self.statistics.due()]
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
    def refresh(self, sums: dict[str, Tensor], verdict: Verdict) -> None:
        """Averages and inverses of what is due, on owners and workers."""
        old = self.preconditioner.bases()
        self.statistics.refresh(sums, verdict)
        self.preconditioner.follow(old)

    def precondition(
        self, directions: dict[str, Tensor], gradients: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Natural gradients, or what the chosen rule makes of the directions.

        ``directions`` are the gradients or averages of them; see `Preconditioner`.
        """
        blocks = [self.block[name] for name in directions]
        updates = self.preconditioner(blocks, directions, gradients)
        if self.probe is not None:
            self.probe.note(directions, updates)
        return updates

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
            warn_silent(self.blocks, self.capture.fired, self.config)
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
        for p in (p for block in self.blocks for p in block.parameters):
            p.grad = None
        self.begin()

    # -- for users --------------------------------------------------------------------

    def sampled_backward(
        self, outputs: Tensor, likelihood: str, targets: Tensor | None
    ) -> None:
        """Backward of labels drawn from the model; gradients stay as they are."""
        if (fisher := self.config.fisher) != "sampled":
            raise RuntimeError(f"Needs fisher='sampled', was made with {fisher=}.")
        loss = sampled_loss(outputs, likelihood, targets, self.config.loss)
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
        if not any(total := self.comm.agree(mine).tolist()):
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
        self.capture.on_forward = self.follow_model
        self.follow_model()
        if inside_ddp(self.model):
            self.own_gradients = False
            self._follow(self._planning.plan_for_ddp())
            self.begin()

    def follow_model(self) -> None:
        """Go on with the dtype and device that the parameters have now."""
        if not self.closed and convert(self):
            self._outbox.close()
            self._outbox = self._open_outbox()
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
        if self.closed:
            raise RuntimeError("This optimizer was closed: make a new one to go on.")
        exact = torch.autocast(self.like.device.type, enabled=False)  # as no forward's
        try:
            with self.meter("step"), exact:
                self.follow_model()
                for block in self.blocks:
                    block.require_bias()
                yield
        except BaseException as error:
            if not isinstance(error, CommError) and self.comm.fail(error):
                self._begin_again()
            raise
